"""Grading: run a submission in a fresh process at several world sizes, judge what came back where it never ran.

`check('00.1')` in a notebook and `minidist grade NOTEBOOK` take the same path: the sources of the cells, in order, go to
ranks of `course.sandbox` in an empty folder (`course.nursery` starts it); results and tapes cross back as JSON and raw bytes
of tensors; the task's own judge names the first fault, here, where no submission ever ran, and computes what is right after
it has ended. Before a judge is asked, each rank's tape is compared with what its recorder saw (`course.ledger`).
"""

from __future__ import annotations

import ast
import random
import re
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from minidist.course import ledger, parts
from minidist.course.crossing import pack_input, readable
from minidist.course.nursery import Nursery
from minidist.course.session import Cell
from minidist.course.task import Case, Fault, Outcome, Result, Task

SKIPPED_TAGS = {"check", "predict", "widget", "demo"}
NOT_STARTED = "Write {} in its cell, run the cell, then check again."
START_S = 60.0  # for the interpreter, torch and the notebook's own cells, before any limit of a task counts
LOOP_S = 0.010  # of the loop in `slowness`, on a 2.1 GHz server core


def grade(
    task: Task,
    cells: list[Cell],
    *,
    seed: int | None = None,
    limit_s: float | None = None,
    threads: int = 0,
    nursery: Nursery | None = None,
) -> Result:
    """Run and judge one attempt. Never raises for anything the submission does; points lie in 0..max.

    Many attempts in a row go faster through one `nursery`: each still gets processes of its own. `threads`: of torch on each
    rank, for tests; 0 leaves the choice to `ranks`.
    """
    seed = random.SystemRandom().randrange(1, 10**6) if seed is None else seed
    if task.independent:
        with nullcontext(nursery) if nursery else Nursery() as place:
            return parts.grade_parts(task, cells, seed, limit_s, place, partial(grade, threads=threads))
    began = time.monotonic()
    wanted = [cell for cell in cells if not SKIPPED_TAGS.intersection(cell.tags)]
    fault = _unwritten(task, wanted) or _refused(task, wanted)
    points = world_size = None
    if fault is None:
        cases = task.cases(seed)
        job = _job(task, wanted, cases, limit_s, threads)
        worlds = len({case.world_size for case in cases})
        patience_s = START_S * (1 + worlds) + 2 * sum(case["limit_s"] for case in job["cases"])
        with nullcontext(nursery) if nursery else Nursery() as place:
            answer = place.run(job, patience_s)
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


def grade_folder(folder: Path, *, seed: int | None = None) -> list[Result]:
    """Grade every notebook of a folder that bears the number of a lesson with exercises."""
    from minidist.course import tasks

    known = tasks.by_lesson()
    paths = [path for path in sorted(folder.glob("*.ipynb")) if path.name.split("_")[0] in known]
    if not paths:
        raise ValueError(f"{folder}: no exercises in it: give a folder with notebooks such as 00_ranks.ipynb")
    return [result for path in paths for result in grade_notebook(path, seed=seed)]


def table(results: list[Result]) -> str:
    """The report of `minidist grade` for people: each result's lines, then the table."""
    return "\n".join([line for result in results for line in result.lines()] + ["", summary(results)])


def summary(results: list[Result]) -> str:
    """One row a task, and the sum."""
    rows = [("task", "points", "status", "why")]
    rows += [(r.task, f"{r.points} of {r.max}", r.status, r.message_id if r.message_id != r.status else "") for r in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
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
            named = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == task.function
            if named or getattr(node, "name", None) == task.function:
                found = node
    if found is None:
        where = f"the cell named {task.cell or 'answer-' + task.key.replace('.', '-')}"
        return Fault(
            first,
            "missing",
            f"{task.function} is nowhere among the cells. Its place is {where}: restore it with `minidist restore {task.key}`.",
        )
    if isinstance(found, ast.ClassDef):  # its constructor stands for it, with the key of whichever task comes first
        found = next((node for node in found.body if getattr(node, "name", None) == "__init__"), found)
    body = [ast.unparse(node) for node in found.body if not _docstring(node)] if isinstance(found, ast.FunctionDef) else []
    if body and re.fullmatch(rf"raise NotImplementedError\('{task.lesson}\.\d+'\)", body[0]):
        return Fault(first, "not started", NOT_STARTED.format(task.function))
    return None


def _parsed(source: str) -> ast.Module | None:
    from minidist.course.graded import without_magics

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


def _job(task: Task, cells: list[Cell], cases: list[Case], limit_s: float | None, threads: int) -> dict:
    """What the sandbox is told: nothing that would help to guess an answer's judgement."""
    usual_s = max(task.limit_s, 10 * task.reference_s * slowness() if task.reference_s else 0.0)
    told = [asdict(case) | {"inputs": pack_input(case.inputs)} for case in cases]
    for case in told:
        case["limit_s"] = limit_s or case["limit_s"] or usual_s
    return {
        "cells": [[cell.id, cell.source] for cell in cells],
        "task": task.key,
        "function": task.function,
        "drive": task.drive,
        "refused": task.refused,
        "allowed": list(task.allowed),
        "cases": told,
        "start_s": START_S,
        "threads": threads,
    }


@cache
def slowness() -> float:
    """How many times longer this machine takes for a loop of plain Python than the one that `Task.reference_s` is from."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        sum(i * i for i in range(200_000))
        best = min(best, time.perf_counter() - began)
    return max(1.0, best / LOOP_S)


def _score(task: Task, cases: list[Case], answer: dict) -> tuple[int, Fault | None, int | None]:
    """Points, the worst fault (the earliest part; the first case among equals) and its world size."""
    order = list(task.parts)
    worst: tuple[int, Fault, int | None] | None = None
    outcomes = [_outcome(raw) for raw in answer.get("cases", [])]
    for case, outcome in zip(cases, outcomes, strict=False):
        fault = _judged(task, case, outcome)
        if fault is not None and (worst is None or order.index(fault.part) < worst[0]):
            worst = (order.index(fault.part), fault, case.world_size)
    if worst is None and len(outcomes) < len(cases):
        worst = (0, _unanswered(order[0], answer.get("note") or "The grader got no answer."), None)
    if worst is None:
        return task.max, None, None
    return sum(task.parts[part] for part in order[: worst[0]]), worst[1], worst[2]


def _outcome(raw: dict) -> Outcome:
    """An outcome as it crossed, for a judge to read."""
    try:
        fields = {name: readable(raw.get(name, [])) for name in ("values", "inputs")}
        tapes = [[ledger.counted(line) for line in tape] for tape in raw["tapes"]]
        return Outcome(**{**raw, **fields, "tapes": tapes})
    except Exception as error:
        told = f"A rank sent what no rank of ours sends: {error}"
        return Outcome([], [], {"kind": "died", "rank": None, "suspects": [], "text": told})


def _unanswered(part: str, note: str) -> Fault:
    """Why there is no answer: the cells as a whole came to nothing."""
    refused = re.search(r"raised (?:Refused|ClosedFile): (.+)", note)
    return Fault(part, "refused", refused[1]) if refused else Fault(part, "error", note)


def _judged(task: Task, case: Case, outcome: Outcome) -> Fault | None:
    """The task's verdict. A grader that fails itself pays nothing and says so: no score may come from our own mistakes."""
    if outcome.problem:
        return _problem(task, case, outcome.problem)
    first, last = next(iter(task.parts)), list(task.parts)[-1]
    if altered := ledger.altered(outcome.tapes, outcome.ledgers):
        return Fault(first, "tape-altered", altered)
    try:
        fault = task.judge(case, outcome)
        if fault is None and (differ := ledger.differ(outcome.tapes)):
            return Fault(last, "tapes-differ", differ)
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
    if refused := re.search(r"^minidist\.course\.guard\.\w+: (.+)$", text, re.MULTILINE):
        return Fault(first, "refused", refused[1])
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
