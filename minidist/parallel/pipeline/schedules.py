"""The schedules that have a name, each as a row of words for one rank: kind and chunk, `F0` or `B1`.

Micro-batches are not in the words: on one chunk they come in order, so the n-th `F0` of a row is micro-batch n. p is the number
of ranks, m of micro-batches, r this rank's place, v the chunks that a rank holds. All work for any p, m and v.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from minidist.parallel.pipeline.actions import Action, Schedule, loop, vee


def gpipe(p: int, m: int, r: int) -> list[str]:
    """All forwards, then all backwards (Huang et al. 2019). Bubble (p-1)/m of the ideal time; m in flight."""
    return ["F0"] * m + ["B0"] * m


def one_f_one_b(p: int, m: int, r: int) -> list[str]:
    """A backward as soon as there is one (PipeDream-Flush; Narayanan et al. 2021). GPipe's bubble; p - r in flight."""
    warm = min(p - 1 - r, m)
    return ["F0"] * warm + ["F0", "B0"] * (m - warm) + ["B0"] * warm


def interleaved(p: int, m: int, r: int, v: int) -> list[str]:
    """1F1B over v chunks a rank (Narayanan et al. 2021). Bubble (p-1)/(v m) of the ideal time, for v times the messages.

    Micro-batches go in rounds of p: a round through chunk 0, then through chunk 1, and so on. Where p does not divide m, the
    rounds are as many as fit, as even as can be: the bubble stays, and larger rounds hold more, with g micro-batches in the
    first (v-1) g + 2 (p-1-r) + 1 chunks in flight.
    """
    if v == 1:
        return one_f_one_b(p, m, r)
    rounds = max(1, m // p)
    sizes = [m // rounds + (place < m % rounds) for place in range(rounds)]
    chunks = [chunk for size in sizes for chunk in range(v) for _ in range(size)]
    forwards = [f"F{chunk}" for chunk in chunks]
    backwards = [f"B{v - 1 - chunk}" for chunk in chunks]
    warm = min((v - 1) * sizes[0] + 2 * (p - 1 - r), m * v)
    steady = [word for pair in zip(forwards[warm:], backwards, strict=False) for word in pair]
    return forwards[:warm] + steady + backwards[m * v - warm :]


def breadth_first(p: int, m: int, r: int, v: int) -> list[str]:
    """All micro-batches through a chunk before the next one (Lamy-Poirier 2023). Bubble (p-1)/(v m); v m in flight.

    With ZeRO 3, a chunk's weights are gathered twice a step and not for every micro-batch.
    """
    return [f"F{chunk}" for chunk in range(v) for _ in range(m)] + [
        f"B{chunk}" for chunk in reversed(range(v)) for _ in range(m)
    ]


def zb_h1(p: int, m: int, r: int) -> list[str]:
    """1F1B whose weight gradients wait for a place where the rank would idle (Qi et al. 2023, section 2.1).

    Rank r does them r micro-batches late. Bubble (p-1)(F + I - W), a third of 1F1B's where the three take the same time; at
    most p in flight on any rank, 1F1B's maximum.
    """
    warm, late = min(p - 1 - r, m), min(r, m)
    words = ["F0"] * warm
    for done in range(m):
        words += ["F0"] * (done + warm < m) + ["I0"] + ["W0"] * (done >= late)
    return words + ["W0"] * late


def zb_v(p: int, m: int, r: int) -> list[str]:
    """Two chunks, there and back, so that the loss is on rank 0 (Qi et al. 2024). No idle time within a rank where F = I = W.

    Ranks start one after the other and end so: (p-1) forwards of a chunk are the whole bubble. At most 2p chunks in flight, as
    much as 1F1B's p micro-batches. Made for 2p - 1 micro-batches or more; with fewer, those beyond m are left out.
    """
    n = max(m, 2 * p - 1)
    return [
        *["F0"] * (2 * (p - r) - 1),
        *["F1", "F0"] * r,
        *["F1", "I1", "W1"] * (p - r),
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (n - 2 * p + 1 + r),
        *["I0", "W0", "F1", "I1", "W1"] * (p - 1 - r),
        *["I0", "I1"] * r,
        *["I0", "W0"] * (p - r),
        *["W1"] * r,
        *["W0"] * r,
    ]


def dualpipe_v(p: int, m: int, r: int) -> list[str]:
    """DeepSeek's DualPipe cut in half, two chunks there and back (DeepSeek-AI 2024; Qi et al.'s V). W: the oldest that waits.

    Made for running a forward of one chunk and a backward of the other side by side, so that the all-to-all of one hides behind
    the work of the other; here the two go one after the other. Made for 2p micro-batches or more. With fewer there is no middle
    part, and what the others have of micro-batches beyond m is left out.
    """
    return [
        *["F0"] * (2 * (p - 1 - r)),
        *["F0", "F1"] * (r + 1),
        *["I1", "W", "F1"] * (p - 1 - r),
        *["F0", "B1", "F1", "B0"] * (m - 2 * p + r + 1),
        *["B1", "F1", "B0"] * (p - 1 - r),
        *[f"{'B' if place <= r else 'I'}{1 - place % 2}" for place in range(2 * (r + 1))],
        *["W", "I0"] * (p - 1 - r),
        *["W"] * (r + 1),
    ]


ONE, ANY, TWO = "one chunk", "any number of chunks", "two chunks"
TABLE: dict[str, tuple[Callable[..., list[str]], str]] = {
    "gpipe": (gpipe, ONE),
    "1f1b": (one_f_one_b, ONE),
    "interleaved": (interleaved, ANY),
    "bfs": (breadth_first, ANY),
    "zb-h1": (zb_h1, ONE),
    "zb-v": (zb_v, TWO),
    "dualpipe-v": (dualpipe_v, TWO),
}
NAMES = tuple(TABLE)


def make(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The named schedule. ValueError, with the remedy, for a name that is none, or chunks that the schedule does not have."""
    stages = stages_of(name, ranks, chunks)
    if micro_batches < 1:
        raise ValueError(f"micro_batches = {micro_batches}: give at least 1")
    row, kind = TABLE[name]
    more = (chunks,) if kind == ANY else ()
    rows = (_numbered(row(ranks, micro_batches, rank, *more)) for rank in range(ranks))
    return Schedule(name, tuple(tuple(a for a in actions if a.micro < micro_batches) for actions in rows), stages)


def stages_of(name: str, ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """By rank and chunk, the stages under a named schedule. ValueError as `make`."""
    if name not in TABLE:
        raise ValueError(f"schedule {name!r}: use one of {', '.join(NAMES)}")
    if ranks < 1 or chunks < 1:
        raise ValueError(f"a schedule of {ranks} ranks with {chunks} chunks each: give at least 1 of both")
    kind = TABLE[name][1]
    if kind == TWO and chunks != 2:
        raise ValueError(f"schedule {name!r} has two chunks on every rank: set chunks = 2, not {chunks}")
    if kind == ONE and chunks != 1:
        several = ", ".join(other for other in NAMES if TABLE[other][1] == ANY)
        raise ValueError(f"schedule {name!r} has one chunk on every rank: set chunks = 1, or use one of {several} for {chunks}")
    return vee(ranks) if kind == TWO else loop(ranks, chunks)


def _numbered(words: Iterable[str]) -> list[Action]:
    """Actions from words: each takes the next micro-batch of its chunk. B counts as I and W; a bare W is the oldest I's."""
    count: Counter[str] = Counter()
    waiting: deque[str] = deque()  # chunks whose I waits for its W
    actions = []
    for word in words:
        if word == "W":
            word += waiting.popleft()
        elif word[0] == "I":
            waiting.append(word[1:])
        kind, chunk = word[0], word[1:]
        counted = {"B": "IW"}.get(kind, kind)
        actions.append(Action(kind, count[counted[0] + chunk], int(chunk)))
        count.update(part + chunk for part in counted)
    return actions
