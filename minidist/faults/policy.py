"""What a run does about numbers that are not finite: skip the step, stop after so many, or go back. A state machine, no ranks.

A step whose gradient is not finite on some rank changes nothing on any rank: that much `train.step` does by itself, so one bad
batch costs one step. Several in a row say that it is the weights, finite though they are, from which no batch recovers. Then
the run stops, or goes back to the last checkpoint from before and reads on behind the data that it has seen since: PaLM did so
by hand, some 20 times (Chowdhery et al. 2022, section 5.1, "training instability").

In float16 a skipped step is how the loss scale finds its place, so a limit below 16 in a row can end a sound run there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What follows from a step. At most one of `stop` and `roll_back` is set."""

    line: str = ""
    """for the log; empty where all is well"""
    stop: bool = False
    """end the run as failed"""
    roll_back: bool = False
    """load the last checkpoint (none was saved since the first bad step), and go on at the present place in the data"""


class Policy:
    """Counts bad steps. The same numbers go in on every rank, so every rank comes to the same verdict.

    `limit`: bad steps in a row that are too many; 0 never minds. `roll_backs`: how often to go back instead of stopping, until
    a step beyond the bad ones is good; going back as often in vain stops the run.
    """

    def __init__(self, limit: int, roll_backs: int = 0):
        self.limit, self.roll_backs = limit, roll_backs
        self.bad = 0
        """bad steps in a row, up to now"""
        self._left = roll_backs
        self._furthest = 0  # step at which the run last gave up

    @property
    def healthy(self) -> bool:
        """Whether the present weights may be saved as good ones: not while steps are bad."""
        return self.bad == 0

    def step(self, number: int, bad: bool) -> Verdict:
        """Step `number` is over; `bad`: it was skipped, or its loss was not finite."""
        if not bad:
            self.bad = 0
            if number > self._furthest:
                self._left = self.roll_backs
            return Verdict()
        self.bad += 1
        line = f"step {number}: a gradient was not finite on some rank; every rank skipped the update"
        if self.limit == 0 or self.bad < self.limit:
            return Verdict(line)
        row = f"step {number}: {self.bad} steps in a row were not finite" if self.bad > 1 else f"step {number} was not finite"
        self.bad, self._furthest = 0, max(self._furthest, number)
        if self._left > 0:
            self._left -= 1
            return Verdict(f"{row}: back to the last checkpoint, past the data since", roll_back=True)
        tried = f", {self.roll_backs} times in vain went back" if self.roll_backs else ""
        return Verdict(f"{row}{tried}: the run stops; lower optim.lr, or set a smaller optim.clip", stop=True)
