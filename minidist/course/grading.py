"""Grading: run a submission in a fresh process at several world sizes, judge what came back where it never ran.

`check('00.1')` in a notebook and `minidist grade NOTEBOOK` take the same path: the sources of the cells, in order, go to
`course.sandbox` in an empty folder (`course.nursery` starts it); results and tapes cross back as JSON; the task's own
judge names the first fault.
"""

from __future__ import annotations

import ast
import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minidist.course import parts
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

SKIPPED_TAGS = {"check", "predict", "widget", "demo"}
NOT_STARTED = "Write {} in its cell, run the cell, then check again."
START_S = 60.0  # for the interpreter, torch and the notebook's own cells, before any limit of a task counts


@dataclass
class Case:
    """One call of the learner's function on every rank. `inputs[r]` are rank r's arguments after the mesh, JSON values."""

    world_size: int
    inputs: list[list]
    """{"tensor": nested lists, "dtype": "float64"} arrives as a tensor (one without elements needs its "shape" too)"""
    part: str = ""
    """of a task whose parts score alone: the part that this case is about"""


@dataclass
class Outcome:
    """What a case left: each rank's encoded value and the lines of its tape as dicts, or the problem that ended it."""

    values: list
    tapes: list[list[dict]]
    problem: dict | None = None
    """kind "error", "hang", "died", "mismatch" or "stub"; text; rank or None; entered: ranks waiting in a collective"""
    inputs: list = field(default_factory=list)
    """each rank's inputs as the submission left them, encoded"""


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
    """names that a submission may not touch, each with the reason"""
    limit_s: float = 10.0
    drive: str = ""
    """"module:function" called on every rank as `(mesh, answer, *inputs)`, where an answer is a class that has to be used
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


def grade(
    task: Task,
    cells: list[Cell],
    *,
    seed: int | None = None,
    limit_s: float | None = None,
    nursery: Nursery | None = None,
) -> Result:
    """Run and judge one attempt. Never raises for anything the submission does; points lie in 0..max.

    Many attempts in a row go faster through one `nursery`: each still gets a process of its own.
    """
    seed = random.SystemRandom().randrange(1, 10**6) if seed is None else seed
    if task.independent:
        with nullcontext(nursery) if nursery else Nursery() as place:
            return parts.grade_parts(task, cells, seed, limit_s, place, grade)
    began = time.monotonic()
    wanted = [cell for cell in cells if not SKIPPED_TAGS.intersection(cell.tags)]
    fault = _unwritten(task, wanted) or _refused(task, wanted)
    points = world_size = None
    if fault is None:
        cases = task.cases(seed)
        limit_s = limit_s or task.limit_s
        with nullcontext(nursery) if nursery else Nursery() as place:
            answer = place.run(_job(task, wanted, cases, limit_s), START_S + 2 * limit_s * len(cases))
        points, fault, world_size = _score(task, cases, answer)
    return _result(task, points or 0, fault, world_size, seed, time.monotonic() - began)


def grade_notebook(path: str | Path, *, seed: int | None = None) -> list[Result]:
    """Grade every task whose lesson the notebook's name begins with ("00_ranks.ipynb": 00.1, ...)."""
    from minidist.course import notebook, tasks

    path = Path(path)
    cells = notebook.read_cells(path)
    mine = [task for task in tasks.every() if task.lesson == path.name.split("_")[0]]
    if not mine:
        known = ", ".join(f"{lesson}_*.ipynb" for lesson in tasks.by_lesson())
        raise ValueError(f"{path.name}: no lesson has exercises under that name: grade a notebook named {known}")
    with Nursery() as nursery:
        return [grade(task, cells, seed=seed, nursery=nursery) for task in mine]


def table(results: list[Result]) -> str:
    """The report of `minidist grade` for people: each result's lines, then the sum."""
    lines = [line for result in results for line in result.lines()]
    lines.append(f"total: {sum(r.points for r in results)} of {sum(r.max for r in results)} points")
    return "\n".join(lines)


def _unwritten(task: Task, cells: list[Cell]) -> Fault | None:
    """Whether the answer is not there, or is still the stub; seen from the source, so that no process has to start."""
    first, found = next(iter(task.parts)), None
    for cell in cells:
        tree = _parsed(cell.source)
        if tree is None and f"def {task.function}" in cell.source:
            found = cell  # the sandbox will say what is wrong with it
        for node in ast.walk(tree) if tree else ():
            if getattr(node, "name", None) == task.function or getattr(node, "id", None) == task.function:
                found = node
    if found is None:
        where = f"the cell named {task.cell or 'answer-' + task.key.replace('.', '-')}"
        return Fault(first, "missing", f"{task.function} is nowhere among the cells: bring back {where}, and run it.")
    if isinstance(found, ast.ClassDef):  # its constructor stands for it, with the key of whichever task comes first
        found = next((node for node in found.body if getattr(node, "name", None) == "__init__"), found)
    body = [ast.unparse(node) for node in found.body if not _docstring(node)] if isinstance(found, ast.FunctionDef) else []
    if body and re.fullmatch(rf"raise NotImplementedError\('{task.lesson}\.\d+'\)", body[0]):
        return Fault(first, "not started", NOT_STARTED.format(task.function))
    return None


def _parsed(source: str) -> ast.Module | None:
    from minidist.course.sandbox import without_magics

    try:
        return ast.parse(without_magics(source))
    except SyntaxError:
        return None


def _docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _refused(task: Task, cells: list[Cell]) -> Fault | None:
    """Look for refused names as they would be written; a name built at run time leaves no line on the tape and pays nothing."""
    for cell in cells:
        tree = _parsed(cell.source)
        if tree is None:
            continue
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        for name, reason in task.refused.items():
            if any(used == name or used.startswith(name + ".") for used in names):
                return Fault(next(iter(task.parts)), "refused", f"{name} is not allowed here: {reason}")
    return None


def _job(task: Task, cells: list[Cell], cases: list[Case], limit_s: float) -> dict:
    """What the sandbox is told: nothing that would help to guess an answer's judgement."""
    return {
        "cells": [[cell.id, cell.source] for cell in cells],
        "task": task.key,
        "function": task.function,
        "drive": task.drive,
        "cases": [asdict(case) for case in cases],
        "limit_s": limit_s,
    }


def _score(task: Task, cases: list[Case], answer: dict) -> tuple[int, Fault | None, int | None]:
    """Points, the worst fault (the earliest part; the first case among equals) and its world size."""
    order = list(task.parts)
    worst: tuple[int, Fault, int | None] | None = None
    outcomes = [Outcome(**raw) for raw in answer.get("cases", [])]
    for case, outcome in zip(cases, outcomes, strict=False):
        fault = _judged(task, case, outcome)
        if fault is not None and (worst is None or order.index(fault.part) < worst[0]):
            worst = (order.index(fault.part), fault, case.world_size)
    if worst is None and len(outcomes) < len(cases):
        worst = (0, Fault(order[0], "error", answer.get("note") or "The grader got no answer."), None)
    if worst is None:
        return task.max, None, None
    return sum(task.parts[part] for part in order[: worst[0]]), worst[1], worst[2]


def _judged(task: Task, case: Case, outcome: Outcome) -> Fault | None:
    """The task's verdict. A grader that fails itself pays nothing and says so: no score may come from our own mistakes."""
    if outcome.problem:
        return _problem(task, case, outcome.problem)
    first = next(iter(task.parts))
    try:
        fault = task.judge(case, outcome)
        assert fault is None or (isinstance(fault, Fault) and fault.part in task.parts), f"judged as {fault!r}"
        return fault
    except Exception as error:
        reason = f"The grader itself failed ({type(error).__name__}: {error}). Please report this, with your answer."
        return Fault(first, "grader", reason)


def _problem(task: Task, case: Case, problem: dict) -> Fault:
    first = next(iter(task.parts))
    if problem["kind"] == "stub":
        return Fault(first, "not started", NOT_STARTED.format(task.function))
    own = task.explain(case, problem)
    if own is not None:
        return own
    who = "" if problem["rank"] is None else f"Rank {problem['rank']} raised:"
    text = problem["text"].strip()
    if problem["kind"] == "mismatch":
        shown = ["The ranks do not call the same thing:", *text.rpartition("CommMismatch: ")[2].split("\n")]
    elif problem["kind"] == "error":
        shown = [who, *_own_frame(text.split("\n"))]
    else:
        shown = text.split("\n")
    return Fault(first, problem["kind"], "\n".join(line for line in shown if line))


def _own_frame(lines: list[str]) -> list[str]:
    """Of a traceback: the innermost frame in the learner's cells, its code, and what was raised."""
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "<cell ')]
    return [line.strip() for line in lines[frames[-1] : frames[-1] + 2]] + lines[-1:] if frames else lines[-2:]


def _result(task: Task, points: int, fault: Fault | None, world_size: int | None, seed: int, seconds: float) -> Result:
    points = max(0, min(points, task.max))
    if fault is None:
        status, fault = "passed", Fault("", "passed", "All parts are right.")
    elif fault.id in ("not started", "missing"):
        status, world_size = fault.id, None
    elif fault.id in ("error", "grader"):
        status = "error"
    else:
        status = "partial" if points else "failed"
    head = (task.lesson, task.key, task.version, points, task.max, status)
    return Result(*head, fault.id, fault.message, fault.expected, fault.got, world_size, seed, round(seconds, 2))


def _clip(text: str, width: int = 110) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
