"""`minidist progress`: the journal folded into where the learner stands, as text, JSON or one HTML page."""

from __future__ import annotations

import html
import time
from pathlib import Path

from minidist.course import lab, progress, tasks
from minidist.course.map import LESSONS, MARKS


def where(directory: str | Path | None = None) -> Path:
    """The course folder to report on: the one given, the one around us, else the learner's default copy.

    ValueError where the one given is none.
    """
    if directory is not None:
        if not Path(directory).expanduser().is_dir():
            raise ValueError(f"--dir {directory}: no such folder: give the one that minidist lab made")
        return Path(directory).expanduser()
    around, usual = progress.folder(), lab.default_dir()
    return usual if (usual / progress.NAME).is_file() and not (around / progress.NAME).is_file() else around


def report(directory: str | Path | None = None) -> dict:
    """Everything as plain values: folder, damaged_lines, points, max and the lessons with their tasks."""
    folder = where(directory)
    events, damaged = progress.history(folder)
    known = {task.key: task for task in tasks.every()}
    by_lesson = {f"{lesson.number:02}": tasks.by_lesson().get(f"{lesson.number:02}", []) for lesson in LESSONS}
    states = progress.fold(events, by_lesson)
    lessons = []
    for lesson in LESSONS:
        number = f"{lesson.number:02}"
        rows = [{"title": known[key].title, **progress.fold_task(events, known[key])} for key in by_lesson[number]]
        lessons.append({"lesson": number, "title": lesson.title, "state": states[number], "tasks": rows})
    every = [row for lesson in lessons for row in lesson["tasks"]]
    totals = {name: sum(row[name] for row in every) for name in ("points", "max")}
    return {"folder": str(folder), "damaged_lines": damaged, **totals, "lessons": lessons}


def words(found: dict) -> str:
    """The report for a terminal: a line a lesson, and one below it for each task that was touched."""
    done = sum(lesson["state"] == "done" for lesson in found["lessons"])
    lines = [f"{found['folder']}: {done} of {len(found['lessons'])} lessons done, {found['points']} of {found['max']} points"]
    if found["damaged_lines"]:
        lines.append(f"{_counted(found['damaged_lines'], 'damaged line')} of {progress.NAME} skipped; the rest counts")
    for lesson in found["lessons"]:
        lines.append(f"{MARKS[lesson['state']]} {lesson['lesson']} {lesson['title']:<35} {lesson['state']}")
        for row in lesson["tasks"]:
            if row["status"] != "open":
                lines.append(f"     {row['task']} {row['title']:<34} {row['points']:3} of {row['max']:3}  {_details(row)}")
    return "\n".join(lines)


def _details(row: dict) -> str:
    parts = [f"{row['tries']} checked", _counted(row["hints"], "hint")]
    return ", ".join(parts + ["solution seen"] * row["solution_seen"])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def page(found: dict) -> str:
    """The report as one HTML page that needs nothing else: tables with header cells, states in words."""
    body = []
    for lesson in found["lessons"]:
        state = f"{MARKS[lesson['state']]} {lesson['state']}"
        title = f"{int(lesson['lesson'])}. {html.escape(lesson['title'])}"
        body.append(f'<tr><th scope="row">{title}</th><td>{state}</td><td></td><td></td><td></td><td></td></tr>')
        for row in lesson["tasks"]:
            cells = [row["status"], f"{row['points']} of {row['max']}", row["tries"], row["hints"]]
            cells.append("yes" if row["solution_seen"] else "no")
            tds = "".join(f"<td>{cell}</td>" for cell in cells)
            body.append(f'<tr class="task"><th scope="row">{row["task"]} {html.escape(row["title"])}</th>{tds}</tr>')
    heads = "".join(
        f'<th scope="col">{name}</th>' for name in ("Lesson or task", "State", "Points", "Tries", "Hints", "Solution seen")
    )
    damaged = f"<p>{_counted(found['damaged_lines'], 'damaged line')} of the journal skipped.</p>"
    damaged = damaged if found["damaged_lines"] else ""
    day = time.strftime("%Y-%m-%d")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minidist: progress</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
body {{ color: #111; background: #fff }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ padding: .3rem .6rem; text-align: left; border-bottom: 1px solid #999 }}
.task th {{ font-weight: normal; padding-left: 2rem }}
@media (prefers-color-scheme: dark) {{ body {{ color: #eee; background: #111 }} }}
</style></head><body>
<h1>Progress</h1>
<p>{found["points"]} of {found["max"]} points, {day}.</p>
{damaged}<table><thead><tr>{heads}</tr></thead><tbody>
{chr(10).join(body)}
</tbody></table></body></html>
"""
