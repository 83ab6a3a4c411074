"""Actions and schedules: what each rank of a pipeline does, in which order, as data.

The model is cut into stages, numbered in the order of its layers. A rank holds one stage or several, its chunks. A schedule
is one list of actions a rank, and says nothing of transfers: what a rank sends and receives, and when, follows from the lists
(`program.lower`). The same lists are verified, timed by the simulator, drawn, and executed by the runtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

KINDS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward for the input: what the stage before waits for",
    "W": "backward for the weights, after I: nobody waits for it before the end of the step",
}
_ACTION = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names the action, its rank and the reason."""


@dataclass(frozen=True, order=True)
class Action:
    """One thing that a rank does: a pass over one of its chunks for one micro-batch. Written `F3`, or `F3.1` on chunk 1."""

    kind: str
    """one of KINDS"""
    micro: int
    """number of the micro-batch within the step, from 0"""
    chunk: int = 0
    """which of the rank's stages, from 0"""

    def __str__(self):
        return f"{self.kind}{self.micro}.{self.chunk}" if self.chunk else f"{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of str(action). ValueError where it is none."""
        found = _ACTION.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no action: write F3, B3, I3 or W3 for micro-batch 3, and F3.1 on the rank's chunk 1")
        return cls(found[1], int(found[2]), int(found[3] or 0))


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one step."""

    name: str
    lists: tuple[tuple[Action, ...], ...]
    """by place on the pp axis: its actions in order"""
    stages: tuple[tuple[int, ...], ...]
    """by place on the pp axis: the stages that it holds, by chunk; see `loop` and `vee`"""

    @property
    def ranks(self) -> int:
        """Places on the pp axis."""
        return len(self.lists)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 + max((action.micro for actions in self.lists for action in actions), default=-1)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By stage: (rank, chunk) that holds it."""
        held = {stage: (rank, chunk) for rank, row in enumerate(self.stages) for chunk, stage in enumerate(row)}
        return tuple(held[stage] for stage in sorted(held))


def loop(ranks: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Stages dealt out round and round: chunk c of rank r is stage c * ranks + r (Narayanan et al. 2021, section 2.2)."""
    return tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks))


def vee(ranks: int) -> tuple[tuple[int, ...], ...]:
    """Two chunks a rank, there and back: r and 2 * ranks - 1 - r, so that rank 0 holds both ends (Qi et al. 2024)."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


@dataclass(frozen=True)
class Transfer:
    """One end of a message between two ranks: a hidden state on its way down the stages, or its gradient on its way up."""

    op: str
    """"send" or "recv" """
    kind: str
    """"F": the output of a forward; "B": the gradient of a stage's input"""
    micro: int
    chunk: int
    """of this rank: whose result is sent, or for which it is received"""
    peer: int
    """the other rank's place on the pp axis"""

    def __str__(self):
        what = Action(self.kind, self.micro, self.chunk)
        return f"{self.op} {what} {'to' if self.op == 'send' else 'from'} rank {self.peer}"


Program = tuple[Action | Transfer, ...]
"""all that one rank does in a step, in order"""
