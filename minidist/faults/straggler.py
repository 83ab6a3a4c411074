"""Stragglers: which ranks compute more slowly than their peers, how sure that is, and the line that says so.

In a job that sums gradients every step takes as long as its slowest rank, and a clock around the step shows the same time on
all of them. What differs is how long a rank does not wait: that is compared here. Medians, since a step in which one rank was
interrupted is no news; a rank is slow when it is so step after step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, median_low

from minidist.core.hang import names
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh

WINDOW = 20  # steps that are looked back on
LEAST = 0.15  # share of compute time above its peers' from which a rank is worth a line
SURE = 4.0  # so many standard deviations of one step's noise
SIGMA_OF_MAD = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation


@dataclass(frozen=True)
class Slow:
    """A rank that computes more slowly than its peers."""

    rank: int
    excess: float
    """share of compute time above that of its peers, the median over the window: 0.5 is half as much again"""
    sigmas: float
    """the excess in standard deviations of what a step's ratio varies by, over all ranks"""
    steps: int
    """steps of the window in which it was slow"""
    window: int
    """steps of the window"""

    def __str__(self):
        return (
            f"rank {self.rank} is slow: {self.excess:.0%} more compute time than its peers, the median of {self.window} steps "
            f"({self.steps} of them slow, {min(self.sigmas, 99):.0f} sigma)"
        )


def slow_ranks(
    seconds: Sequence[Sequence[float]],
    alike: Sequence[Sequence[int]] | None = None,
    *,
    least: float = LEAST,
    sure: float = SURE,
) -> list[Slow]:
    """The slow ones, worst first. `seconds[step][rank]` is what the rank spent in that step without waiting for others.

    `alike` has groups of ranks with the same work, which are compared (default: all); stages of a pipeline are not alike. A
    rank is slow when the median of its ratio to the group's (lower) median is at least 1 + `least`, lies `sure` standard
    deviations above 1, and every step of the newer half of the window was above 1 + least / 2. So at most half of a group can
    be found slow, and a rank that was held up once is not.
    """
    found = []
    for group in alike or ([range(len(seconds[0]))] if seconds else []):
        if len(group) < 2 or len(seconds) < 2:
            continue
        usual = [median_low([step[rank] for rank in group]) for step in seconds]
        ratios = {rank: [step[rank] / middle for step, middle in zip(seconds, usual, strict=True)] for rank in group}
        centre = {rank: median(values) for rank, values in ratios.items()}
        spread = SIGMA_OF_MAD * median(abs(x - centre[rank]) for rank, values in ratios.items() for x in values)
        for rank, values in ratios.items():
            slow = [x >= 1 + least / 2 for x in values]
            excess = centre[rank] - 1
            sigmas = excess / max(spread, 1e-9)
            if excess >= least and sigmas >= sure and all(slow[len(slow) // 2 :]):
                found.append(Slow(rank, excess, sigmas, sum(slow), len(slow)))
    return sorted(found, key=lambda one: -one.excess)


def alike(layout: Layout) -> list[list[int]]:
    """Ranks that have the same work: those of one pipeline stage. (Experts may get unequal numbers of tokens: see the routing
    figures before a node is blamed.)"""
    whole = range(layout.world_size)
    return [[rank for rank in whole if layout.coordinates(rank)["pp"] == stage] for stage in range(layout.pp)]


class Stragglers:
    """Looks back on a window of steps and says what has changed."""

    def __init__(self, groups: Sequence[Sequence[int]], window: int = WINDOW):
        self.groups, self.window = groups, window
        self.slow: list[Slow] = []
        """those of now"""
        self._seconds: deque[Sequence[float]] = deque(maxlen=window)

    def step(self, seconds: Sequence[float]) -> list[str]:
        """Take the compute times of all ranks in one step; the lines to print: a rank became slow, or is no longer."""
        self._seconds.append(seconds)
        if len(self._seconds) < self.window:
            return []
        before = {one.rank for one in self.slow}
        self.slow = slow_ranks(self._seconds, self.groups)
        now = {one.rank for one in self.slow}
        lines = [str(one) for one in self.slow if one.rank not in before]
        if back := sorted(before - now):
            lines.append(f"{names(back)} {'keep' if len(back) > 1 else 'keeps'} pace again")
        return lines


class Stopwatch:
    """One rank's compute time: what a step took, less what the rank stood still in collectives, by its tape."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.seconds = 0.0
        """of the last step"""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, within which nobody clears the tape."""
        tape, began = self.mesh.tape, time.monotonic()
        lines = len(tape)
        yield
        self.seconds = time.monotonic() - began - sum(line.waited for line in tape.lines[lines:])
