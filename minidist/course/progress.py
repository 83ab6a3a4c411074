"""Progress: an append-only journal in the learner's course folder, one JSON object a line, folded into what is done."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.course.grading import Task

NAME = "progress.jsonl"
NOT_TRIED = ("not started", "missing")  # checks of no answer


def folder() -> Path:
    """The learner's course folder: `$MINIDIST_COURSE` (set by `minidist lab`), else the nearest folder upwards that holds
    a journal, else `$MINIDIST_HOME` (default ~/.cache/minidist), so that a notebook run in a checkout litters nothing."""
    if os.environ.get("MINIDIST_COURSE"):
        return Path(os.environ["MINIDIST_COURSE"])
    here = Path.cwd()
    for place in (here, *here.parents):
        if (place / NAME).is_file():
            return place
    return Path(os.environ.get("MINIDIST_HOME") or Path.home() / ".cache" / "minidist")


def record(event: str, key: str, **fields) -> None:
    """Append one event ("predict", "claim", "check", "hint", "seen", "finish") about a key such as "00.1".

    A folder that cannot be written costs the learner the journal and nothing else: it is said, never raised.
    """
    entry = {"time": round(time.time(), 3), "event": event, "key": key, **fields}
    path = folder() / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file, _locked(file):
            file.seek(0, os.SEEK_END)
            if file.tell():  # a line torn by a crash must not swallow this one
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
                file.write(b"\n" if torn else b"")
            file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        print(f"(progress is not being kept: {error})")


@contextmanager
def _locked(file) -> Iterator[None]:
    """Exclusive while two notebooks of one learner write. Without fcntl (Windows) the single append has to do."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)


def history(where: Path | None = None) -> tuple[list[dict], int]:
    """All events of a course folder (default: the learner's) in order, and the number of damaged lines that were skipped."""
    path = (where or folder()) / NAME
    events, damaged = [], 0
    if not path.is_file():
        return events, damaged
    for raw in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(raw)
            shape = {"event": str, "key": str, "time": int | float}
            if not all(isinstance(entry[name], kind) for name, kind in shape.items()):
                raise TypeError
            events.append(entry)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += bool(raw.strip())
    return events, damaged


def fold(events: list[dict], tasks: dict[str, list[str]]) -> dict[str, str]:
    """State of each lesson of `tasks` (lesson number -> its task keys): "open", "started" or "done".

    Done means every task of the lesson once had all its points; a lesson without tasks is never done.
    """
    full = {e["key"] for e in events if e["event"] == "check" and e.get("points") and e["points"] == e.get("max")}
    touched = {str(e["key"]).split(".")[0] for e in events}
    states = {}
    for lesson, keys in tasks.items():
        if keys and full.issuperset(keys):
            states[lesson] = "done"
        else:
            states[lesson] = "started" if lesson in touched else "open"
    return states


def fold_task(events: list[dict], task: Task) -> dict:
    """Where a task stands: "open", "started" or "done", its best points, and what it took."""
    mine = [event for event in events if event["key"] == task.key and event.get("status") not in NOT_TRIED]
    checks = [event for event in mine if event["event"] == "check"]
    paid = [event["points"] for event in checks if isinstance(event.get("points"), int)]
    full = any(event.get("points") and event["points"] == event.get("max") for event in checks)
    return {
        "task": task.key,
        "task_version": task.version,
        "status": "done" if full else "started" if mine else "open",
        "points": max([0, *(min(points, task.max) for points in paid)]),
        "max": task.max,
        "tries": len(checks),
        "hints": len({event.get("number") for event in mine if event["event"] == "hint"}),
        "solution_seen": any(event["event"] == "seen" for event in mine),
    }
