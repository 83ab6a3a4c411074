"""`solution('07.2')`: the answer and the reasoning of a task, once it has been passed or tried, or when asked for outright."""

from __future__ import annotations

from minidist.course import exercise, notebook, progress, session, tasks
from minidist.course.grading import Task

TRIES = 3  # checked answers, right or wrong, after which the solution opens by itself


def solution(key: str, *, now: bool = False) -> None:
    """Show the course's own answer to a task such as "07.2", and why it is so.

    It opens after a pass or three checked tries; `now=True` opens it at once. That it was seen is noted in the journal and
    costs nothing.
    """
    if session.grading():
        return
    try:
        task = tasks.find(key)
    except ValueError as error:
        exercise.say_or_raise(str(error))
        return
    passed, tries = attempts(key)
    if not (passed or tries >= TRIES or now):
        print(
            f"{key}: {tries} of {TRIES} checked tries so far, then the solution opens. hint({key!r}) has a nudge;\n"
            f"solution({key!r}, now=True) opens it now, at no cost but the fun."
        )
        return
    try:
        answer, why = text(task)
    except ValueError as error:
        exercise.say_or_raise(f"{key}: {error}")
        return
    progress.record("seen", key, passed=passed, tries=tries)
    _show(f"### Solution {key}: {task.title}\n\n```python\n{answer}\n```\n\n{why}")


def attempts(key: str) -> tuple[bool, int]:
    """(whether the task once had all its points, how many answers were checked), from the journal and this kernel."""
    events = [event for event in progress.history()[0] if event["event"] == "check" and event["key"] == key]
    passed = any(event.get("status") == "passed" for event in events)
    checked = sum(event.get("status") not in progress.NOT_TRIED for event in events)
    return passed, max(checked, session.current.tries.get(key, 0))


def text(task: Task) -> tuple[str, str]:
    """(answer, reasoning in Markdown) of a task, from the course's solved notebook; ValueError where it is not shipped."""
    number = task.key.replace(".", "-")
    wanted = (task.cell or f"answer-{number}", f"why-{number}")
    for path in sorted(notebook.shipped("solutions").glob(f"{task.lesson}_*.ipynb")):
        cells = {cell.get("id"): "".join(cell["source"]) for cell in notebook.read(path)["cells"]}
        found = [cells[name] for name in cells if name == wanted[0] or name.startswith(wanted[0] + "-")]  # a cell a part
        if found:
            return "\n\n\n".join(found), cells.get(wanted[1], "")
    raise ValueError(f"its solution (cell {wanted[0]!r}) is not in this installation")


def _show(markdown: str) -> None:
    """Rendered in a notebook, as it is elsewhere."""
    try:
        from IPython import get_ipython
        from IPython.display import Markdown, display
    except ImportError:
        print(markdown)
        return
    if get_ipython() is None:
        print(markdown)
    else:
        display(Markdown(markdown))
