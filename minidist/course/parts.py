"""Tasks whose parts score alone: each part is a function of its own, run and judged as if it were a task of one part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.course.grading import Result, Task
    from minidist.course.nursery import Nursery
    from minidist.course.session import Cell

UNWRITTEN = ("not started", "missing")


def steps(task: Task) -> list[Task]:
    """A task of one part for every part: the function of that name, and the cases marked with it."""

    def cases_of(part: str):
        return lambda seed: [case for case in task.cases(seed) if case.part == part]

    cell = task.cell or f"answer-{task.key.replace('.', '-')}"
    return [
        replace(task, independent=False, function=part, parts={part: points}, cases=cases_of(part), cell=f"{cell}-{part}")
        for part, points in task.parts.items()
    ]


def grade_parts(
    task: Task, cells: list[Cell], seed: int, limit_s: float | None, nursery: Nursery, grade: Callable[..., Result]
) -> Result:
    """Grade every part; the result has the sum of points and speaks first of the first part that is begun and not right."""
    began = time.monotonic()
    results = {step.function: grade(step, cells, seed=seed, limit_s=limit_s, nursery=nursery) for step in steps(task)}
    return replace(_together(task, results), seconds=round(time.monotonic() - began, 2))


def _together(task: Task, results: dict[str, Result]) -> Result:
    points = sum(result.points for result in results.values())
    right = [part for part, result in results.items() if result.status == "passed"]
    begun = [part for part, result in results.items() if result.status not in UNWRITTEN and part not in right]
    rest = [part for part in results if part not in right and part not in begun]
    first = (begun or rest or right)[0]
    told = results[first]
    if len(right) == len(results):
        return replace(told, points=points, max=task.max)
    status = told.status if len(rest) == len(results) or not points else "partial"
    unsaid = [part for part in rest if part != first]
    tally = " ".join(f"{word}: {', '.join(names)}." for word, names in (("Right", right), ("Not started", unsaid)) if names)
    lines = [told.message if told.status in UNWRITTEN else f"{first}: {told.message}", tally]
    lines += [f"{part}: {results[part].message.splitlines()[0]}" for part in begun[1:]]  # as many as a report has room for
    return replace(told, points=points, max=task.max, status=status, message="\n".join(filter(None, lines)))
