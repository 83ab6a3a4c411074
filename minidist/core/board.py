"""The board: shared memory of one host in which every rank says what it is doing, and its parent and peers read it.

One writer a rank, any number of readers, no locks: a rank writes its own region only. A region is a ring of the rank's
latest collectives and one status byte. The parent draws hang reports from it; the teaching check compares fingerprints
through it, so that checking never needs a second collective (which would hang where the first does).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass, field

ENTRIES = 256  # collectives remembered a rank; older ones are overwritten
ENTRY_BYTES = 512  # one JSON object, zero-padded
HEADER = struct.Struct("<BxxxxxxxQd")  # status, entries written so far, monotonic time of the last change
REGION_BYTES = 64 + ENTRIES * ENTRY_BYTES
STATUS = ("idle", "running", "waiting")  # outside a run; in Python or arithmetic; in a collective


@dataclass
class RankState:
    """What one rank's region says: `status`, the `entry` it waits in (None unless waiting), `since` when (seconds of
    time.monotonic()), and the `history` of its collectives, oldest first."""

    status: str
    entry: dict | None
    since: float
    history: list[dict] = field(default_factory=list)


class Board:
    """Regions of `ranks` ranks in a memory-mapped file.

    An entry is a small dict with the keys op, group, ranks, seq, shape, dtype, peer, detail, where, time.
    """

    def __init__(self, path: str, ranks: int):
        self.path, self.ranks = path, ranks
        self._written = [0] * ranks  # only the writer's own item is ever used
        fd = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(fd, ranks * REGION_BYTES)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: str, ranks: int) -> Board:
        """Make the file (zeroed: every rank idle, no history) and open it."""
        with open(path, "wb") as file:
            file.truncate(ranks * REGION_BYTES)
        return cls(path, ranks)

    @classmethod
    def open(cls, path: str) -> Board:
        """Open a board that `create` made."""
        return cls(path, os.path.getsize(path) // REGION_BYTES)

    def close(self) -> None:
        """Unmap. The file belongs to whoever created it."""
        self._memory.close()

    def enter(self, rank: int, entry: dict) -> None:
        """The rank launches a collective: append it to its history."""
        base = rank * REGION_BYTES + 64 + self._written[rank] % ENTRIES * ENTRY_BYTES
        self._memory[base : base + ENTRY_BYTES] = _encode(entry)
        self._written[rank] += 1
        self._head(rank, "running")

    def wait(self, rank: int, number: int) -> None:
        """The rank waits for the `number`-th (from 1) of its collectives; `leave` when it has it."""
        self._head(rank, "waiting", number)

    def leave(self, rank: int, status: str = "running") -> None:
        """The rank waits no longer: it runs, or is idle between two runs."""
        self._head(rank, status)

    def written(self, rank: int) -> int:
        """Collectives this rank has launched since `reset`."""
        return self._written[rank]

    def reset(self, rank: int, status: str = "running") -> None:
        """Forget the rank's history: a new run begins."""
        start = rank * REGION_BYTES
        self._memory[start : start + REGION_BYTES] = bytes(REGION_BYTES)
        self._written[rank] = 0
        self._head(rank, status)

    def state(self, rank: int) -> RankState:
        """Read a rank's region. Entries torn by a write in progress are left out."""
        status, packed, since = HEADER.unpack_from(self._memory, rank * REGION_BYTES)
        written, number = packed >> 32, packed & 0xFFFFFFFF
        first = max(0, written - ENTRIES)
        history = [self._entry(rank, i) for i in range(first, written)]
        entry = self._entry(rank, number - 1) if STATUS[status] == "waiting" and number else None
        return RankState(STATUS[status], entry, since, [item for item in history if item])

    def find(self, rank: int, key: tuple) -> dict | None:
        """The rank's entry with this (group, seq), looking back from its newest; None if it has not got there yet."""
        _, packed, _ = HEADER.unpack_from(self._memory, rank * REGION_BYTES)
        written = packed >> 32
        for i in range(written - 1, max(-1, written - 1 - ENTRIES), -1):
            entry = self._entry(rank, i)
            if entry and entry["group"] == key[0] and entry["seq"] <= key[1]:  # numbers only grow: smaller means not yet
                return entry if entry["seq"] == key[1] else None
        return None

    def _head(self, rank: int, status: str, number: int = 0) -> None:
        packed = self._written[rank] << 32 | number
        HEADER.pack_into(self._memory, rank * REGION_BYTES, STATUS.index(status), packed, time.monotonic())

    def _entry(self, rank: int, number: int) -> dict | None:
        base = rank * REGION_BYTES + 64 + number % ENTRIES * ENTRY_BYTES
        raw = self._memory[base : base + ENTRY_BYTES].rstrip(b"\0")
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            return None


def _encode(entry: dict) -> bytes:
    raw = json.dumps(entry, separators=(",", ":")).encode()
    if len(raw) > ENTRY_BYTES:  # a long path or many ranks: keep what identifies the collective
        short = {**entry, "ranks": entry["ranks"][:4], "where": entry["where"][-120:], "detail": str(entry["detail"])[:80]}
        raw = json.dumps(short, separators=(",", ":")).encode()[:ENTRY_BYTES]
    return raw.ljust(ENTRY_BYTES, b"\0")
