"""What an exercise is made of: its task, the cases it is tried on, what came back, what was wrong, what it earned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field


@dataclass
class Case:
    """One call of the learner's function on every rank. `inputs[r]` are rank r's arguments after the mesh: JSON values and
    tensors, also inside lists and dicts. No rank is given another's."""

    world_size: int
    inputs: list[list]
    """{"tensor": nested lists, "dtype": "float64"} arrives as a tensor too (one without elements needs its "shape")"""
    part: str = ""
    """of a task whose parts score alone: the part that this case is about"""
    limit_s: float | None = None
    """seconds before it counts as a hang; default: the task's"""


@dataclass
class Outcome:
    """What a case left: each rank's encoded value and the lines of its tape as dicts, or the problem that ended it."""

    values: list
    tapes: list[list[dict]]
    """every operation, those of `torch.distributed` itself too; an answer's tag "check" reads "act" here"""
    problem: dict | None = None
    """kind "error", "hang", "died", "mismatch" or "stub"; text; rank or None; suspects: ranks the others wait for"""
    inputs: list = field(default_factory=list)
    """each rank's inputs as the submission left them, encoded"""
    held: list[int] = field(default_factory=list)
    """bytes of tensor memory that each rank holds when the call is over, beyond what it held before: results, caches"""
    ledgers: list[list[dict]] = field(default_factory=list)
    """what the recorder saw each rank launch, whatever its tape says"""


@dataclass
class Fault:
    """The first thing wrong with an outcome. `part` of the points is lost, and all parts after it."""

    part: str
    id: str
    message: str
    expected: str = ""
    got: str = ""


@dataclass
class Task:
    """One exercise: what is asked, what it pays, how it is judged."""

    key: str
    version: int
    title: str
    function: str
    parts: dict[str, int]
    """points by part, in order: a part pays only if it and all parts before it are right in every case"""
    minutes: int
    hints: tuple[str, str, str]
    cases: Callable[[int], list[Case]]
    judge: Callable[[Case, Outcome], Fault | None]
    explain: Callable[[Case, dict], Fault | None] = lambda case, problem: None
    """a task's own reading of a problem (a hang, an error) before the general one"""
    refused: dict[str, str] = field(default_factory=dict)
    """names that a submission may not touch, each with the reason: modules, or functions and classes of modules"""
    allowed: tuple[str, ...] = ()
    """modules of minidist that an answer may import, besides `course` and `ranks`; none named: all but the refused"""
    limit_s: float = 10.0
    """seconds a case may take before it counts as a hang"""
    reference_s: float = 0.0
    """seconds that the solution's slowest case takes here; ten times that, scaled to the machine, is the limit if longer"""
    drive: str = ""
    """ "module:function" called on every rank as `(mesh, answer, *inputs)`, where an answer is a class that has to be used
    before it does anything; it runs among the submission, so it decides nothing"""
    cell: str = ""
    """name of the answer's cell, where several tasks grade one answer; default: answer-NN-k"""
    independent: bool = False
    """parts score alone: each is a function of that name, in a cell answer-NN-k-NAME, with the cases marked as its own"""

    def __post_init__(self):
        assert self.parts and all(points > 0 for points in self.parts.values()), f"{self.key}: every part pays something"

    @property
    def lesson(self) -> str:
        """The lesson's number, such as "00"."""
        return self.key.split(".")[0]

    @property
    def functions(self) -> list[str]:
        """Names that an answer has to define."""
        return list(self.parts) if self.independent else [self.function]

    @property
    def max(self) -> int:
        """Points for all parts."""
        return sum(self.parts.values())


@dataclass
class Result:
    """What an attempt earned and, if not everything, why."""

    lesson: str
    task: str
    task_version: int
    points: int
    max: int
    status: str
    """passed, partial, failed, not started, missing or error"""
    message_id: str
    message: str
    expected: str = ""
    got: str = ""
    world_size: int | None = None
    seed: int = 0
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """At most ten lines for the learner."""
        shown = [f"{self.task}: {self.status}, {self.points} of {self.max} points"]
        if self.world_size is not None:
            shown.append(f"  first seen with {self.world_size} rank{'s' * (self.world_size > 1)}, seed {self.seed}")
        shown += [f"  expected: {_clip(self.expected)}"] * bool(self.expected)
        shown += [f"  got:      {_clip(self.got)}"] * bool(self.got)
        shown += [f"  {_clip(line, 140)}" for line in self.message.split("\n")[: 9 - len(shown)]]
        if self.status in ("partial", "failed", "error"):
            shown.append(f"  hint({self.task!r}) has a nudge; check({self.task!r}, seed={self.seed}) repeats this attempt.")
        return shown

    def to_json(self) -> dict:
        """Plain values, as `minidist grade --json` prints them."""
        return asdict(self)


def _clip(text: str, width: int = 110) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
