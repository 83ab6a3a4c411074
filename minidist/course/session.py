"""The session: what one kernel remembers of its learner: cells as last executed, guesses, and every error that was shown.

Notebook test runners look for error messages on the wire; an unknown magic, a swallowed interrupt and an exception in a
widget's callback send none. So whatever goes wrong is recorded here too, and `finish()` asks.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field


@dataclass
class Cell:
    """One notebook cell as it was last executed, or as it stands in a file."""

    id: str
    """the cell's id, equal to its name in our notebooks; "" where the front end does not say"""
    source: str
    tags: tuple[str, ...] = ()


@dataclass
class Session:
    """State of this kernel."""

    cells: list[Cell] = field(default_factory=list)
    """executed so far; a cell that was run again moves to the end"""
    asked: set[str] = field(default_factory=set)
    """keys that a `predict` cell has asked about"""
    guesses: dict[str, object] = field(default_factory=dict)
    revealed: set[str] = field(default_factory=set)
    hints: dict[str, int] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    widgets: list = field(default_factory=list)
    """the live part of each widget shown, for the test that sweeps them"""


current = Session()


def mode() -> str:
    """`MINIDIST_STRICT`: "" for a learner; "1" in tests (claims and checks raise); "unsolved" in tests of the exercise
    notebooks (a check raises unless the task is found not started and pays nothing)."""
    return os.environ.get("MINIDIST_STRICT", "")


def strict() -> bool:
    """Whether a miss raises instead of being told."""
    return mode() not in ("", "0")


def grading() -> bool:
    """Whether this process runs a submission for the grader: then checks, guesses and widgets are silent."""
    return bool(os.environ.get("MINIDIST_GRADING"))


def failed(message: str) -> None:
    """Record something that went wrong, for `finish()`."""
    current.errors.append(message)


def watch() -> None:
    """Hook into the notebook's shell, once: keep executed cells, and record errors however they were shown."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None or getattr(shell, "_minidist_watched", False):
        return
    shell._minidist_watched = True
    current.cells.extend(Cell("", source) for source in shell.user_ns.get("In", [])[1:] if source.strip())
    shell.events.register("pre_run_cell", _before)
    shell.events.register("post_run_cell", _after)
    threading.excepthook = _in_thread(threading.excepthook)


def _before(info) -> None:
    if not info.raw_cell or not info.raw_cell.strip():
        return
    name = getattr(info, "cell_id", None) or ""
    current.cells[:] = [cell for cell in current.cells if not name or cell.id != name]
    current.cells.append(Cell(name, info.raw_cell))


def _after(result) -> None:
    source = result.info.raw_cell or ""
    if source.strip() and source not in (cell.source for cell in current.cells[-1:]):
        _before(result.info)  # the cell that imported the course, where the shell keeps no history
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        first = (str(error).splitlines() or [""])[0]  # the cell has shown the rest
        failed(f"a cell ended with {type(error).__name__}: {first}")


def _in_thread(before):
    def record(args):
        failed(f"thread {args.thread.name if args.thread else '?'} ended with {args.exc_type.__name__}: {args.exc_value}")
        before(args)

    return record
