"""Every task of every lesson: what is no answer pays nothing (C57, C58), the reference passes whatever the seed and the number
of threads (C58), and exercise k needs nothing of the lessons after it (C59)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minidist.course import grading, notebook, tasks
from minidist.course.grading import Outcome
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

ROOT = Path(__file__).parents[2]
BANKS = ROOT / "tests/banks"
TASKS = tasks.every()
BY_TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.key)
ATTEMPTS = [(1, 1), (2, 2), (3, 1)]  # seed, threads
LIMIT_S = 3.0

# Each wraps the answer `theirs` into something that looks like one; `_change` is what becomes of its result on a rank.
WRAP = """
def _wrapped(theirs):
    def answer(mesh, *inputs):
        value = theirs(mesh, *inputs)
        return _change(value, mesh, inputs)
    return answer
"""
PLAIN = """
def _wrapped(theirs):
    def answer(*inputs):
        return _change(theirs(*inputs), None, inputs)
    return answer
"""
CHANGES = {
    "zeros": """
def _change(value, mesh, inputs):
    import torch
    if isinstance(value, torch.Tensor):
        return value.zero_()
    if isinstance(value, (list, tuple)):
        return [_change(item, mesh, inputs) for item in value]
    return type(value)() if value is not None else None
""",
    "identity": """
def _change(value, mesh, inputs):
    return inputs[0]
""",
    "off by the world size": """
def _change(value, mesh, inputs):
    n = mesh.world_size + (mesh.world_size == 1) if mesh else 2
    if isinstance(value, (list, tuple)):
        return [_change(item, mesh, inputs) for item in value]
    return value * n if value is not None else None
""",
    "right on one rank only": """
def _change(value, mesh, inputs):
    import torch
    if mesh and mesh.rank == mesh.world_size - 1 and mesh.world_size > 1:
        return value
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
""",
}
CLASS_CHANGES = {  # of an answer with a model whose gradients it makes
    "zeros": "p.grad.zero_()",
    "identity": None,
    "off by the world size": "p.grad.mul_(self._mesh.world_size + (self._mesh.world_size == 1))",
    "right on one rank only": "p.grad.mul_(float(self._mesh.rank == 0 and self._mesh.world_size > 1))",
}
CLASS = """
_Theirs = {name}


class {name}(_Theirs):
    def __init__(self, mesh, model, *rest):
        self._mesh, self._model = mesh, model
        super().__init__(mesh, model, *rest)

    def finish(self):
        super().finish()
        for p in self._model.parameters():
            if p.grad is not None:
                {change}
"""
IDLE = """
class {name}:
    def __init__(self, mesh, model, *rest):
        self.model = model

    def __call__(self, *inputs):
        return self.model(*inputs)

    def no_sync(self):
        import contextlib
        return contextlib.nullcontext()

    def finish(self):
        pass
"""


def cells_of(kind: str, task) -> list[Cell]:
    """Graded cells of a lesson's shipped notebook."""
    [path] = (ROOT / kind).glob(f"{task.lesson}_*.ipynb")
    return [cell for cell in notebook.read_cells(path) if not grading.SKIPPED_TAGS.intersection(cell.tags)]


def variant(task, kind: str) -> list[Cell]:
    """The solution, spoilt in one of the ways of C58."""
    cells, extra = cells_of("solutions", task), ""
    for name in task.functions:
        if any(f"class {name}" in cell.source for cell in cells):
            change = CLASS_CHANGES[kind]
            extra += IDLE.format(name=name) if change is None else CLASS.format(name=name, change=change)
        else:
            plain = task.drive.endswith("drive_plain:plain")
            extra += f"{CHANGES[kind]}\n{PLAIN if plain else WRAP}\n{name} = _wrapped({name})\n"
    return [*cells, Cell("spoilt", extra)]


@pytest.fixture(scope="module")
def results():
    """{(task key, what): result}, two nurseries at a time."""
    jobs = [(task, kind, variant(task, kind), {}) for task in TASKS for kind in CHANGES]
    jobs += [(task, "stub", cells_of("exercises", task), {}) for task in TASKS]
    for task in TASKS:
        for seed, threads in ATTEMPTS:
            jobs.append((task, (seed, threads), cells_of("solutions", task), {"seed": seed, "threads": threads}))

    def attempt(mine):
        with Nursery() as nursery:
            return [
                grading.grade(task, cells, nursery=nursery, **{"limit_s": None if options else LIMIT_S}, **options)
                for task, _, cells, options in mine
            ]

    with ThreadPoolExecutor(2) as pool:
        halves = jobs[::2], jobs[1::2]
        found = list(pool.map(attempt, halves))
    return {
        (task.key, kind): r
        for half, rs in zip(halves, found, strict=True)
        for (task, kind, *_), r in zip(half, rs, strict=True)
    }


@BY_TASK
@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_no_answer_fails_and_says_why(task, kind, results):
    result = results[task.key, kind]
    assert result.points < result.max and result.status in ("failed", "partial", "error"), result.lines()
    assert result.message_id not in ("grader", "passed") and len(result.message) > 20, result.lines()


@BY_TASK
def test_the_stub_is_not_started_and_pays_nothing(task, results):
    result = results[task.key, "stub"]
    assert (result.status, result.points) == ("not started", 0), result.lines()


@BY_TASK
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda a: f"seed {a[0]}, {a[1]} threads")
def test_the_reference_always_passes(task, attempt, results):
    result = results[task.key, attempt]
    assert (result.status, result.points) == ("passed", result.max), result.lines()


@BY_TASK
@pytest.mark.parametrize("verdict", [0, False, -1, 10**6, "raise"], ids=str)
def test_a_judge_that_says_something_else_than_a_fault_pays_nothing(task, verdict):  # None is the stated "all right"
    def judge(case, outcome):
        if verdict == "raise":
            raise ValueError
        return verdict

    broken = dataclasses.replace(task, judge=judge, independent=False)
    cases = task.cases(1)[:2]
    fine = dataclasses.asdict(Outcome([None] * 4, [[]] * 4))
    points, fault, _ = grading._score(broken, cases, {"cases": [fine, fine]})
    assert points == 0 and fault.id == "grader"
    points, fault, _ = grading._score(dataclasses.replace(broken, judge=lambda *_: None), cases, {"cases": [fine, fine]})
    assert points == task.max and fault is None


PROGRAM = """
import importlib, json, pkgutil, sys
from pathlib import Path
from minidist.course import tasks

last, root = sys.argv[1:]
real = pkgutil.iter_modules
pkgutil.iter_modules = lambda path: [m for m in real(path) if not m.name[0].isdigit() or m.name[:2] <= last]


class Later:
    def find_spec(self, name, path=None, target=None):
        part = name.rpartition(".")[2]
        number = next((w for w in part.split("_") if w.isdigit() and len(w) == 2), "")
        if name.startswith("minidist.course.") and number > last:
            raise ImportError(f"{name} belongs to a lesson that is not there yet")


sys.meta_path.insert(0, Later())
from minidist.course import grading
[path] = Path(root, "solutions").glob(f"{last}_*.ipynb")
print(json.dumps([(r.task, r.points, r.max, r.message) for r in grading.grade_notebook(path)]))
"""


@pytest.mark.parametrize("lesson", sorted({task.lesson for task in TASKS}))
def test_an_exercise_needs_nothing_of_later_lessons(lesson):
    """Lessons 1..k solved are notebooks of their own; what could be missing is code of the course, so later code is hidden."""
    command = [sys.executable, "-c", PROGRAM, lesson, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().split("\n")[-1])
    assert found and all(points == most for _, points, most, _ in found), found
