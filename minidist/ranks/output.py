"""Print what ranks say: "[rank] text", in the order of ranks, or in order of arrival."""

from __future__ import annotations

import sys
from collections import deque

MOST_HELD = 10_000  # pieces of output kept for a rank whose turn has not come; of more, the latest


class Printer:
    """Rank 0's lines appear at once; another rank's when all ranks before it are done. So two runs look the same."""

    def __init__(self, ranks: int, as_it_comes: bool = False):
        self.ranks, self.as_it_comes = ranks, as_it_comes
        self.live = 0  # the rank whose lines appear at once
        self._held = {rank: deque(maxlen=MOST_HELD) for rank in range(ranks)}  # (stream, lines)
        self._done: set[int] = set()

    def say(self, rank: int, stream: str, text: str) -> None:
        """Show or hold back whole lines of one rank."""
        lines = "".join(f"[{rank}] {line}\n" for line in text.splitlines())
        if self.as_it_comes or rank == self.live:
            _print(stream, lines)
        else:
            self._held[rank].append((stream, lines))

    def done(self, rank: int) -> None:
        """This rank will say no more in this run."""
        self._done.add(rank)
        while self.live in self._done:
            self.live += 1
            for stream, lines in self._held.pop(self.live, ()):
                _print(stream, lines)

    def finish(self) -> None:
        """Show whatever is held back: the run is over, however it went."""
        for rank in range(self.ranks):
            self.done(rank)


def _print(stream: str, lines: str) -> None:
    target = sys.stderr if stream == "stderr" else sys.stdout
    target.write(lines)
    target.flush()
