"""What a learner calls about an exercise: `check`, `hint`, `finish`."""

from __future__ import annotations

from minidist.course import grading, kernel, progress, session, tasks
from minidist.course.session import Cell


class CheckFailed(AssertionError):
    """In tests: a check did not come out as the notebook promises."""


def check(key: str, *, seed: int | None = None) -> None:
    """Grade the cells executed so far against a task such as "00.1" and print the verdict. Never raises for a learner.

    A lesson's number, such as "07", checks all its tasks and ends in a table. Every attempt draws fresh inputs; `seed` repeats
    the one that a report names.
    """
    if session.grading():
        return
    if key in tasks.by_lesson():
        print(grading.summary([_check(tasks.find(one), seed) for one in tasks.by_lesson()[key]]))
        return
    try:
        task = tasks.find(key)
    except ValueError as error:
        say_or_raise(str(error))
        return
    _check(task, seed)


def _check(task: grading.Task, seed: int | None) -> grading.Result:
    key, cells = task.key, _cells(task)
    print(f"{key}: checking ...", end="\r", flush=True)  # the verdict takes its place
    result = grading.grade(task, cells, seed=seed)
    lines = result.lines()
    if result.status not in ("passed", "not started"):
        graded = [cell for cell in cells if not grading.SKIPPED_TAGS.intersection(cell.tags)]
        warned = [f"  {line}" for line in kernel.warnings(task, graded, kernel.namespace())]
        lines = [*lines[:-1][: 9 - len(warned)], *warned, lines[-1]]
    print("\n".join(lines))
    session.current.tries[key] = session.current.tries.get(key, 0) + (result.status not in ("not started", "missing"))
    entry = {name: value for name, value in result.to_json().items() if name in JOURNAL}
    progress.record("check", key, **entry)
    unsolved = session.mode() == "unsolved"
    if unsolved and (result.status != "not started" or result.points != 0):
        raise CheckFailed(f"{key}: the unsolved notebook should be 'not started' with 0 points: {result.status}")
    if session.strict() and not unsolved and result.points < result.max:
        raise CheckFailed("\n".join(result.lines()))
    return result


JOURNAL = ("task_version", "points", "max", "status", "message_id", "seed", "seconds")


def hint(key: str) -> None:
    """Print the next of a task's three hints: direction, tool, outline. Costs nothing."""
    if session.grading():
        return
    try:
        task = tasks.find(key)
    except ValueError as error:
        say_or_raise(str(error))
        return
    shown = session.current.hints.get(key, 0)
    if shown == len(task.hints):
        print(f"{key}: that was the last hint; here it is again.")
        shown -= 1
    print(f"Hint {shown + 1} of {len(task.hints)}: {task.hints[shown]}")
    session.current.hints[key] = shown + 1
    progress.record("hint", key, number=shown + 1)


class NotFinished(AssertionError):
    """In tests: the notebook showed an error, or left a rank alive."""


def finish(lesson: str) -> None:
    """The last cell of a notebook: stop the ranks, and account for everything that went wrong on the way."""
    if session.grading():
        return
    from minidist import ranks

    ranks.stop()
    errors = list(session.current.errors)
    alive = _alive(ranks)
    if alive:
        errors.append(f"ranks still alive: {alive}")
    progress.record("finish", lesson, errors=len(errors))
    if errors and session.strict():
        raise NotFinished("\n".join(errors))
    asked = session.current.asked
    open_guesses = len(asked - set(session.current.guesses))
    print(f"Lesson {int(lesson)} has run to its end; no rank is left.")
    if open_guesses:
        print(f"Predictions left open: {open_guesses} of {len(asked)}. They are the point, honestly.")
    for error in errors:
        print(f"On the way: {error}")


def _alive(ranks) -> list:
    return [entry for entry in ranks.status() or []]


def _cells(task: grading.Task) -> list[Cell]:
    """Executed cells, each with the tags that the shipped exercise notebook gives the cell of that id."""
    from minidist.course import notebook

    tags = {}
    try:
        for path in notebook.shipped("exercises").glob(f"{task.lesson}_*.ipynb"):
            tags = {cell.id: cell.tags for cell in notebook.read_cells(path)}
    except ValueError:
        pass  # an installation without exercises: nothing is skipped by tag
    return [Cell(cell.id, cell.source, tags.get(cell.id, ())) for cell in session.current.cells]


def say_or_raise(message: str) -> None:
    """Tell a learner what went wrong; in tests raise it."""
    if session.strict():
        raise CheckFailed(message)
    print(message)
