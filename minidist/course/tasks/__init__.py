"""Tasks: one module a lesson (`NN_topic.py`, so imported by name), each with the specs, hints and graders of its exercises.

A module defines `TASKS`, a list of `minidist.course.grading.Task`. Graders run in the judge's process; submissions never do.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.course.grading import Task


def by_lesson() -> dict[str, list[str]]:
    """Task keys of every lesson that has any: {"00": ["00.1"]}."""
    found: dict[str, list[str]] = {}
    for task in every():
        found.setdefault(task.lesson, []).append(task.key)
    return found


def every() -> list[Task]:
    """All tasks, in order of lesson and number."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0].isdigit())
    return [task for name in modules for task in importlib.import_module(f"{__name__}.{name}").TASKS]


def find(key: str) -> Task:
    """The task with this key; ValueError with the nearest one otherwise."""
    known = {task.key: task for task in every()}
    if key in known:
        return known[key]
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
    raise ValueError(f"there is no task {key!r}: did you mean {near[0]!r}? (tasks: {', '.join(known)})")
