"""The collective stage of lesson 5: which rank holds what before, after and between, with the tensors of a run just made.

`perform` runs on the ranks; `stage` is a pure function of what they returned and of the controls. A collective is drawn
as the simplest messages that make it: in round k, rank r sends to rank r + k, counted around the circle.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.core import comm
from minidist.core.mesh import Mesh

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather"]
ROOT = 1  # of broadcast and gather: not 0, so that nobody takes the root for a law of nature
LOOKS = [("#56B4E9", ""), ("#E69F00", "//"), ("#009E73", ".."), ("#CC79A7", "xx")]  # by the rank a number comes from


@dataclass(frozen=True)
class Cell:
    """A number at a place, and the ranks whose numbers are in it."""

    value: float
    ranks: frozenset[int]


Places = dict[int, dict[int, Cell]]  # rank -> place -> what is there


@dataclass(frozen=True)
class Message:
    """One number on its way: from rank and place to rank and place, added there or put there."""

    source: int
    place: int
    target: int
    to: int
    adds: bool = False


def perform(mesh: Mesh) -> dict[str, tuple[list[float], list[float]]]:
    """On every rank, each collective once: (what it brings, what it holds afterwards). Rank r brings 10 r, 10 r + 1, ..."""
    import torch

    n, world = mesh.world_size, mesh.world
    mine = 10.0 * mesh.rank + torch.arange(float(n), device=mesh.device)  # (n,)
    root = ROOT % n
    parts = comm.gather(mine[:1], world, dst=root)
    held = {
        "all_reduce": comm.all_reduce(mine.clone(), world),
        "reduce_scatter": comm.reduce_scatter(mine, world),
        "all_gather": comm.all_gather(mine[:1], world),
        "all_to_all": comm.all_to_all(mine, world),
        "broadcast": comm.broadcast(mine.clone(), world, src=root),
        "gather": torch.cat(parts) if parts else mine[:0],
    }
    short = ("all_gather", "gather")  # these bring one number each
    return {name: ((mine[:1] if name in short else mine).tolist(), after.tolist()) for name, after in held.items()}


def rounds(collective: str, n: int) -> list[list[Message]]:
    """The messages of each round. All-reduce is a reduce-scatter and then an all-gather."""
    root = ROOT % n
    by_round = range(1, n)
    if collective == "broadcast":
        return [[Message(root, place, (root + k) % n, place) for place in range(n)] for k in by_round]
    if collective == "gather":
        return [[Message((root + k) % n, 0, root, (root + k) % n)] for k in by_round]
    pairs = [[(rank, (rank + k) % n) for rank in range(n)] for k in by_round]
    scatter = [[Message(me, peer, peer, peer, adds=True) for me, peer in pair] for pair in pairs]
    if collective == "reduce_scatter":
        return scatter
    if collective == "all_to_all":
        return [[Message(me, peer, peer, me) for me, peer in pair] for pair in pairs]
    if collective == "all_gather":
        return [[Message(me, 0, peer, me) for me, peer in pair] for pair in pairs]
    return scatter + [[Message(me, me, peer, me) for me, peer in pair] for pair in pairs]


def play(collective: str, brought: list[list[float]], step: int) -> Places:
    """What each rank holds once `step` rounds are over, from what each has brought. After the last round: the result alone."""
    n = len(brought)
    plan = rounds(collective, n)
    had = {r: {i: Cell(value, frozenset([r])) for i, value in enumerate(row)} for r, row in enumerate(brought)}
    held: Places = {r: dict(row) for r, row in had.items()}
    if collective == "all_gather":
        held = {r: {r: had[r][0]} for r in had}
    elif collective == "all_to_all":
        held = {r: {r: had[r][r]} for r in had}
    elif collective == "gather":
        held = {r: {r: had[r][0]} if r == ROOT % n else {} for r in had}
    elif collective == "broadcast":
        held = {r: dict(had[r]) if r == ROOT % n else {} for r in had}
    for messages in plan[:step]:
        sent = [(held if collective in ("all_reduce", "broadcast") else had)[m.source][m.place] for m in messages]
        for message, cell in zip(messages, sent, strict=True):
            there = held[message.target].get(message.to)
            if message.adds and there:
                cell = Cell(there.value + cell.value, there.ranks | cell.ranks)
            held[message.target][message.to] = cell
    if step == 0:
        return had
    if collective == "reduce_scatter":
        held = {r: {r: row[r]} for r, row in held.items()}
    return held


def last_round(collective: str, n: int) -> int:
    """How many rounds the collective takes among n ranks."""
    return len(rounds(collective, n))


def stage(runs: dict[int, list[dict]], collective: str, ranks: int, step: int):
    """(figure, text): what every rank holds after `step` rounds. `runs[n]` is what `perform` returned on n ranks.

    A step past the last one shows the end, which must be what the run really left; ValueError if it is not.
    """
    total = last_round(collective, ranks)
    step = min(step, total)
    brought = [row[collective][0] for row in runs[ranks]]
    held = play(collective, brought, step)
    if step == total:
        for rank, row in enumerate(runs[ranks]):
            drawn = [held[rank][place].value for place in sorted(held[rank])]
            if drawn != row[collective][1]:
                raise ValueError(f"{collective}: the stage ends with {drawn} on rank {rank}, the run left {row[collective][1]}")
    words = _words(collective, ranks, step, total, held)
    return _figure(collective, ranks, held, words), words


def _words(collective: str, n: int, step: int, total: int, held: Places) -> str:
    when = "what each rank brings" if step == 0 else f"results so far, after round {step} of {total}"
    if 0 < step == total:
        when = f"the result, after round {step} of {total}"
    lines = [f"{collective} on {n} ranks, {when}:"]
    if step:
        pairs = sorted({(m.source, m.target) for m in rounds(collective, n)[step - 1]})
        lines.append("in this round rank " + ", ".join(f"{a} sent to {b}" for a, b in pairs))
    for rank in range(n):
        cells = [
            f"{cell.value:g} (from {'+'.join(map(str, sorted(cell.ranks)))}) at place {place}"
            for place, cell in sorted(held[rank].items())
        ]
        empty = "nothing" if step in (0, total) else "nothing yet"
        lines.append(f"rank {rank}: {', '.join(cells) or empty}")
    return "\n".join(lines)


def _figure(collective: str, n: int, held: Places, words: str):
    from matplotlib.patches import Patch, Rectangle

    from minidist.core.timeline import AltFigure

    figure = AltFigure(figsize=(7.6, 1.1 + 0.62 * n), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for rank in range(n):
        for place in range(n):
            cell = held[rank].get(place)
            if cell is None:
                axes.add_patch(Rectangle((place + 0.04, rank + 0.1), 0.92, 0.8, fill=False, edgecolor="#777777", linestyle=":"))
                continue
            width = 0.92 / len(cell.ranks)
            for i, source in enumerate(sorted(cell.ranks)):  # a stripe for every rank whose number is in the sum
                colour, hatch = LOOKS[source]
                stripe = (place + 0.04 + i * width, rank + 0.1)
                axes.add_patch(Rectangle(stripe, width, 0.8, facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.8))
            paper = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.6, "pad": 2.5}
            axes.text(place + 0.5, rank + 0.5, f"{cell.value:g}", ha="center", va="center", fontsize=11, bbox=paper)
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    axes.set_yticks([r + 0.5 for r in range(n)], [f"rank {r}" for r in range(n)])
    axes.set_xticks([p + 0.5 for p in range(n)], [f"place {p}" for p in range(n)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        "\n".join(words.split("\n")[: 2 if words.split("\n")[1].startswith("in this") else 1]), loc="left", fontsize=10
    )
    keys = [Patch(facecolor=c, hatch=h, edgecolor="black", label=f"from rank {r}") for r, (c, h) in enumerate(LOOKS[:n])]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    figure.alt = words
    return figure
