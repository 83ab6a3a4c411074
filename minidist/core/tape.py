"""The tape: one line for everything that crosses a rank boundary. A claim about communication is a claim about the tape.

`payload` is measured: the bytes of the whole logical tensor (an all-gather's output, a reduce-scatter's input). `sent` is
booked: what this rank sends under the bandwidth-optimal algorithm, which backends may exceed (gloo's reduce-scatter moves
an all-reduce's bytes). The bounds: Chan et al. 2007, "Collective communication: theory, practice, and experience", section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TAGS = ("grad", "weight", "act", "expert", "control", "check")  # "check" is in no total
Bytes = int | float  # an int wherever the ring's chunks divide


@dataclass
class Line:
    """One operation of one rank. Times are seconds of time.monotonic(), one clock for all processes of a host."""

    op: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather, send, recv or barrier"""
    group: str
    """name of the group, such as "dp" """
    ranks: tuple[int, ...]
    """the group's members as global ranks"""
    payload: int
    """bytes of the whole logical tensor"""
    sent: Bytes
    """bytes this rank sends under the bandwidth-optimal algorithm"""
    dtype: str
    shape: tuple[int, ...]
    """of the tensor handed in"""
    tag: str
    """why it was sent: one of TAGS"""
    seq: int
    """number of the operation within its group, from 1; point-to-point ones count per pair and direction"""
    launch: float
    finish: float | None = None
    """None until it is known to be complete"""
    where: str = ""
    """file:line of the caller outside the engine's core"""
    peer: int | None = None
    """the other (global) rank of a send, recv, broadcast or gather"""
    delay: float = 0.0
    """seconds that the delay line added"""
    waited: float = 0.0
    """seconds that this rank stood still for it; 0 on a backend with streams, where waiting only orders them"""

    @property
    def key(self) -> tuple:
        """What all members of a collective must agree on; the first line where keys differ is where ranks diverge."""
        return (self.op, self.group, self.ranks, self.dtype, self.payload, self.peer)

    def __str__(self):
        took = "pending" if self.finish is None else f"{(self.finish - self.launch) * 1e3:.2f} ms"
        peer = "" if self.peer is None else f" peer {self.peer}"
        return (
            f"{self.group} #{self.seq} {self.op}{peer} {list(self.shape)} {self.dtype} {self.tag}: "
            f"payload {self.payload} B, sent {self.sent} B, {took}, {self.where}"
        )


@dataclass(frozen=True)
class Span:
    """What a rank worked on between two moments (seconds, of the lines' clock): an action of a pipeline schedule."""

    name: str
    """as the action writes itself, such as "F3" or "B0.1" """
    start: float
    finish: float


class Tape:
    """The lines of one rank, in order of launch. Plain data: picklable, printable, and cheap to keep (about 2 us a line)."""

    def __init__(self, rank: int = 0):
        self.rank = rank
        self.lines: list[Line] = []
        self.spans: list[Span] = []
        """the work between them, where something notes it: the pipeline's runtime does"""

    def clear(self) -> None:
        """Forget everything."""
        self.lines, self.spans = [], []

    def select(self, tag: str | None = None, op: str | None = None, group: str | None = None) -> list[Line]:
        """Lines with this tag, operation and group; None means any, except that "check" lines must be asked for."""
        return [
            line
            for line in self.lines
            if (line.tag == tag if tag else line.tag != "check") and op in (None, line.op) and group in (None, line.group)
        ]

    def sent(self, tag: str | None = None, op: str | None = None, group: str | None = None) -> Bytes:
        """Booked bytes this rank sent."""
        return sum(line.sent for line in self.select(tag, op, group))

    def payload(self, tag: str | None = None, op: str | None = None, group: str | None = None) -> int:
        """Measured bytes of the logical tensors."""
        return sum(line.payload for line in self.select(tag, op, group))

    def calls(self, tag: str | None = None, op: str | None = None, group: str | None = None) -> int:
        """Number of operations."""
        return len(self.select(tag, op, group))

    def __len__(self):
        return len(self.lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __getitem__(self, index):
        return self.lines[index]

    def __str__(self):
        return "\n".join([f"tape of rank {self.rank}: {len(self.lines)} lines", *(f"  {line}" for line in self.lines)])

    __repr__ = __str__


def booked(op: str, payload: int, n: int, at_root: bool = False) -> Bytes:
    """Bytes a rank sends for `payload` bytes of the whole tensor among `n` ranks, bandwidth-optimally.

    all-reduce 2(n-1)/n of it; all-gather, reduce-scatter and even all-to-all (n-1)/n; broadcast (n-1)/n, the mean over
    the ranks of a tree in which all but one pass it on once; gather 1/n by every rank but the root; send all of it;
    recv and barrier nothing. Uneven all-to-alls are booked by their splits instead.
    """
    if n == 1:
        return 0
    if op == "gather":
        share = (0, 1) if at_root else (1, n)
    else:
        share = {
            "all_reduce": (2 * (n - 1), n),
            "all_gather": (n - 1, n),
            "reduce_scatter": (n - 1, n),
            "all_to_all": (n - 1, n),
            "broadcast": (n - 1, n),
            "send": (1, 1),
            "recv": (0, 1),
            "barrier": (0, 1),
        }[op]
    total = payload * share[0]
    return total // share[1] if total % share[1] == 0 else total / share[1]
