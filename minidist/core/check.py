"""Teaching mode: every collective is compared with what the peers called, before it can return garbage or hang.

Each rank writes the fingerprint of a call on the board before it launches, then looks at its peers' fingerprints of the same
call: at launch, and again while it waits. So whoever comes last sees the difference at once and whoever came first sees it
while waiting; all raise. Nothing is sent: a second collective would hang where the first one does.
"""

from __future__ import annotations

import time
from itertools import combinations
from typing import TYPE_CHECKING

from minidist.core.tape import Line
from minidist.core.work import CommMismatch

if TYPE_CHECKING:
    from minidist.core.mesh import Group, Wire

STRAGGLERS_S = 0.3  # how long a report of a mismatch waits for ranks that have not come yet


def entry(line: Line, group: Group, detail: object = None) -> dict:
    """The board entry (and fingerprint) of an operation. `detail`: what else must fit, such as the splits of an all-to-all."""
    return {
        "op": line.op,
        "group": channel(line, group),
        "ranks": list(line.ranks),
        "seq": line.seq,
        "shape": list(line.shape),
        "dtype": line.dtype,
        "peer": line.peer,
        "detail": detail,
        "where": line.where,
        "time": line.launch,
    }


def channel(line: Line, group: Group) -> str:
    """What the operation's number counts in: the group, or for a transfer the pair and its direction ("world 0->1")."""
    me = group.wire.rank
    if line.op == "send":
        return f"{group.name} {me}->{line.peer}"
    if line.op == "recv":
        return f"{group.name} {line.peer}->{me}"
    return group.name


def compare(line: Line, group: Group) -> None:
    """Raise CommMismatch if a peer's call of the same number differs from this one. Peers that have not come are no news."""
    wire = group.wire
    peers = [line.peer] if line.op in ("send", "recv") else [rank for rank in line.ranks if rank != wire.rank]
    key = (channel(line, group), line.seq)
    mine = wire.board.find(wire.rank, key)
    if mine is None:  # so long ago that it has left the ring
        return
    calls = _calls(wire, peers, key, mine)
    if not any(_differences(mine, calls[peer], wire.rank, peer) for peer in calls if peer != wire.rank):
        return
    patience = time.monotonic() + STRAGGLERS_S  # then every rank, whenever it came, says the same of the same calls
    while len(calls) <= len(peers) and time.monotonic() < patience:
        time.sleep(1e-3)
        calls = _calls(wire, peers, key, mine)
    differ = [what for a, b in combinations(sorted(calls), 2) for what in _differences(calls[a], calls[b], a, b)]
    raise CommMismatch(_message(calls, key, list(dict.fromkeys(differ))))


def _calls(wire: Wire, peers: list[int], key: tuple[str, int], mine: dict) -> dict[int, dict]:
    """This rank's call, and those of its peers that have come to the same one."""
    calls = {wire.rank: mine}
    for peer in peers:
        theirs = wire.board.find(peer, key)
        if theirs and tuple(theirs["ranks"]) == tuple(mine["ranks"]):
            calls[peer] = theirs
    return calls


def _differences(mine: dict, theirs: dict, me: int, peer: int) -> list[str]:
    if {mine["op"], theirs["op"]} == {"send", "recv"}:
        names = ("shape", "dtype")
    elif mine["op"] != theirs["op"]:
        return ["operation"]
    elif mine["op"] == "all_to_all":
        at, other = mine["ranks"].index(me), mine["ranks"].index(peer)
        fits = mine["detail"]["send"][other] == theirs["detail"]["recv"][at] and (
            mine["detail"]["recv"][other] == theirs["detail"]["send"][at]
        )
        rows = mine["shape"][1:] == theirs["shape"][1:]
        return ([] if fits else ["splits"]) + ([] if rows else ["shape"]) + _unlike(mine, theirs, ("dtype",))
    else:
        names = ("shape", "dtype", "detail", *(("peer",) if mine["op"] in ("broadcast", "gather") else ()))
    return _unlike(mine, theirs, names)


def _unlike(mine: dict, theirs: dict, names: tuple[str, ...]) -> list[str]:
    words = {"peer": "root", "detail": "reduction"}
    return [words.get(name, name) for name in names if mine[name] != theirs[name]]


def _message(calls: dict[int, dict], key: tuple[str, int], differ: list[str]) -> str:
    rows = []
    for rank, call in sorted(calls.items()):
        splits = f" {call['detail']}" if call["detail"] is not None else ""
        root = f" root {call['peer']}" if call["op"] in ("broadcast", "gather") else ""
        rows.append(f"  rank {rank}: {call['op']}{root} {call['shape']} {call['dtype']}{splits} at {call['where']}")
    return "\n".join(
        [
            f"ranks differ in {' and '.join(differ)} in call #{key[1]} of {key[0]}:",
            *rows,
            "Every rank of a group must call the same operations in the same order, with tensors that fit.",
        ]
    )
