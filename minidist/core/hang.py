"""The hang report: where every rank stands, whom the others wait for, where their tapes first part. Plain data in, text out."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass

from minidist.core.board import RankState

# Operations whose tensor has the same shape on every member; all_to_all and gather may be uneven.
SAME_SHAPE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
AT_ONCE_S = 0.2  # of partings this close in time the first by name is reported: two runs of a program then say the same
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')  # as faulthandler writes it
NOT_THEIRS = re.compile(r"minidist/(core|ranks)/|/site-packages/torch/|/python3[^/]*/(?!site-packages)")


@dataclass
class Divergence:
    """The first operation of a channel on which its members do not agree. `calls` has a rank's entry, or None for none."""

    channel: str
    seq: int
    calls: dict[int, dict | None]


def hang_report(states: list[RankState], stacks: dict[int, str], now: float) -> str:
    """Say for every rank which collective it waits in (group, number, shape, since when, line of code) or where its Python is.

    `states` by rank; `stacks` has what faulthandler wrote for a rank; `now` is of time.monotonic(), as on the board.
    """
    guilty = suspects(states)
    waiting = [rank for rank, state in enumerate(states) if state.entry]
    if guilty and waiting:
        others = [rank for rank in waiting if rank not in guilty] or waiting
        left = verb(guilty, ", which has finished", ", which have finished")
        gone = left if all(states[rank].status == "idle" for rank in guilty) else ""
        head = f"{names(others)} {verb(others, 'waits', 'wait')} for {names(guilty)}{gone}."
        if set(others) <= set(guilty):
            head = f"{names(others)} wait for each other."
    elif waiting:
        head = f"{names(waiting)} {verb(waiting, 'is', 'are')} in a collective that all its ranks have entered: it is slow."
    else:
        head = "no rank waits for another, they are still computing."
    lines = [head, "", *(_describe(rank, state, stacks.get(rank, ""), now) for rank, state in enumerate(states))]
    parting = first_divergence(states)
    return "\n".join([*lines, "", *_parting(parting)] if parting else lines)


def suspects(states: list[RankState]) -> list[int]:
    """The ranks that others wait for: those in no collective where there are such, else all that owe one (a circle)."""
    owing: set[int] = set()
    for rank, state in enumerate(states):
        if state.entry:
            key = _key(state.entry)
            owing |= {peer for peer in _members(rank, state.entry) if peer != rank and not _has(states[peer], key)}
    free = {rank for rank in owing if not states[rank].entry}
    return sorted(free or owing)


def deadlocked(states: list[RankState], now: float, seconds: float) -> bool:
    """Whether no rank can go on: each has finished, or has waited `seconds` for an operation that some member never called.

    Sound as long as a rank's operations are launched by the thread that waits.
    """
    waiting = [(rank, state) for rank, state in enumerate(states) if state.status != "idle"]
    return bool(waiting) and all(
        state.entry
        and now - state.since > seconds
        and any(peer != rank and not _has(states[peer], _key(state.entry)) for peer in _members(rank, state.entry))
        for rank, state in waiting
    )


def first_divergence(states: list[RankState]) -> Divergence | None:
    """The earliest operation that some member of its group launched and another launched differently or not at all.

    Each channel (a group, or a pair and direction) is compared by its own numbers: ranks of different groups may differ.
    """
    called: dict[tuple, dict[int, dict]] = {}
    oldest: dict[tuple[int, str], int] = {}
    for rank, state in enumerate(states):
        for entry in state.history:
            called.setdefault((*_key(entry), tuple(_members(rank, entry))), {})[rank] = entry
            oldest.setdefault((rank, entry["group"]), entry["seq"])
    found = []
    for (channel, seq, members), entries in called.items():
        forgotten = any(seq < oldest.get((rank, channel), 0) for rank in members)  # left the ring of some member
        calls = {rank: entries.get(rank) for rank in members}
        if not forgotten and not _agree(calls.values()):
            found.append((min(entry["time"] for entry in entries.values()), Divergence(channel, seq, calls)))
    if not found:
        return None
    earliest = min(time for time, _ in found)
    alike = [parting for time, parting in found if time - earliest < AT_ONCE_S]
    return min(alike, key=lambda parting: (parting.seq, parting.channel))


def collective(entry: dict) -> str:
    """An entry of the board in words: "all_reduce #2 of world"."""
    return f"{entry['op']} #{entry['seq']} of {entry['group']}"


def names(ranks: Iterable[int]) -> str:
    """ "rank 2", "ranks 0 and 1", "ranks 0, 1 and 3"."""
    ranks = [str(rank) for rank in ranks]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def verb(ranks: list[int], one: str, many: str) -> str:
    """The form of a verb that goes with that many ranks."""
    return one if len(ranks) == 1 else many


def own_line(stack: str) -> tuple[str, int] | None:
    """File and line of the innermost frame that is the user's own; of the innermost at all where none is."""
    frames = [(match["file"], int(match["line"])) for match in FRAME.finditer(stack)]
    return next((frame for frame in frames if not NOT_THEIRS.search(frame[0])), frames[0] if frames else None)


def _describe(rank: int, state: RankState, stack: str, now: float) -> str:
    if state.entry:
        entry = state.entry
        among = "" if entry["op"] in ("send", "recv") else f" {entry['ranks']}"
        what = f"waits {now - state.since:.1f} s in {collective(entry)}{among}, {entry['dtype']} {entry['shape']},"
        return f"  rank {rank}: {what} at {_code(own_line(stack), entry['where'])}"
    if state.status == "idle":
        return f"  rank {rank}: has finished"
    return f"  rank {rank}: in no collective for {now - state.since:.1f} s, at {_code(own_line(stack), 'an unknown line')}"


def _code(place: tuple[str, int] | None, otherwise: str) -> str:
    """A place as "file:line: source"; `otherwise` where the stack told nothing."""
    if place is None:
        return otherwise
    file, number = place
    source = linecache.getline(file, number).strip()
    short = file if file.startswith("<") else "/".join(file.split("/")[-2:])
    return f"{short}:{number}" + (f": {source}" if source else "")


def _parting(parting: Divergence) -> list[str]:
    lines = [f"First divergence of the tapes: call #{parting.seq} of {parting.channel}"]
    groups: dict[str, list[int]] = {}
    for rank, entry in parting.calls.items():
        text = f"{entry['op']} {entry['dtype']} {entry['shape']} at {entry['where']}" if entry else "nothing"
        groups.setdefault(text, []).append(rank)
    return lines + [f"  {names(ranks)} called {text}" for text, ranks in groups.items()]


def _key(entry: dict) -> tuple[str, int]:
    return entry["group"], entry["seq"]


def _has(state: RankState, key: tuple[str, int]) -> bool:
    """Whether a rank has launched this operation, or a later one of the channel (the ring forgets)."""
    return any(entry["group"] == key[0] and entry["seq"] >= key[1] for entry in state.history)


def _members(rank: int, entry: dict) -> list[int]:
    """Who has to call: both ends of a transfer, every rank of a collective."""
    return sorted({rank, entry["peer"]}) if entry["op"] in ("send", "recv") else entry["ranks"]


def _agree(calls: Iterable[dict | None]) -> bool:
    kinds = set()
    for entry in calls:
        if entry is None:
            return False
        op = "transfer" if entry["op"] in ("send", "recv") else entry["op"]
        kinds.add((op, entry["dtype"], tuple(entry["shape"]) if op in SAME_SHAPE else None))
    return len(kinds) == 1
