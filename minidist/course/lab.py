"""`minidist lab`: the learner's own copy of the course, and JupyterLab on it. Nothing of the learner's is ever overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from minidist.course import notebook, progress, tasks, update

KINDS = ("lessons", "exercises")
FIRST = "lessons/00_ranks.ipynb"  # it opens with the map


def default_dir() -> Path:
    """~/minidist-course, or what `$MINIDIST_COURSE` says."""
    return Path(os.environ.get("MINIDIST_COURSE") or Path.home() / "minidist-course")


def copy_course(target: Path) -> list[str]:
    """Copy lessons and exercises (never solutions) into `target`, or bring a copy up to date. Returns a line for each that is
    neither new nor as it was.

    Cells that the learner has not touched become ours, theirs stay, new ones are added. Where both changed a cell, or theirs
    cannot be read, theirs stays and ours lands beside it as NN_topic.new.ipynb.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"--dir {target}: there is a file of that name: give a folder")
    said, bases = [], update.read_base(target)
    for kind in KINDS:
        try:
            (target / kind).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--dir {target}: cannot make a folder there ({error.strerror}): give another") from None
        for ours in sorted(notebook.shipped(kind).glob("*.ipynb")):
            name = f"{kind}/{ours.name}"
            theirs = target / name
            if theirs.exists():
                line = _bring_up_to_date(ours, theirs, bases.get(name))
                said += [f"{name}: {line}"] * bool(line)
                if line == SAVED_MEANWHILE:
                    continue
            else:
                _copy_new(ours, theirs)
            bases[name] = update.fingerprint(notebook.read(ours)["cells"])
    update.write_base(target, bases)
    (target / progress.NAME).touch(exist_ok=True)
    return said


SAVED_MEANWHILE = "you saved it just now, so it is left alone: run minidist lab again to have it updated"


def _bring_up_to_date(ours: Path, theirs: Path, base: update.Base | None) -> str:
    """One notebook; what was done in words, "" for nothing."""
    before, shipped = theirs.read_bytes(), notebook.read(ours)
    try:
        content = notebook.read(theirs)
        merged = update.merge(base, shipped["cells"], content["cells"])
    except (ValueError, AttributeError):  # cut short by a full disk, or its ids lost
        if base == update.fingerprint(shipped["cells"]) and any(theirs.parent.glob(f"{theirs.stem}.new*.ipynb")):
            return ""  # told before
        return f"yours cannot be compared cell by cell and is kept; ours is {_beside(ours, theirs)}"
    if merged.cells != content["cells"] and not update.write(theirs, {**content, "cells": merged.cells}, before):
        return SAVED_MEANWHILE
    said = []
    if merged.refreshed:
        said.append(f"cells brought up to date: {', '.join(merged.refreshed)}")
    if merged.conflicts:
        cells = ", ".join(merged.conflicts)
        said.append(f"you and we both changed {cells}: yours is kept; ours is {_beside(ours, theirs)}")
    return "; ".join(said)


def _beside(ours: Path, theirs: Path) -> str:
    """Save ours beside theirs, unless it lies there already; its name."""
    beside = theirs.with_suffix(".new.ipynb")
    if not (beside.exists() and _same_cells(ours, beside)):
        beside = _free(beside)
        _copy_new(ours, beside)
    return beside.name


def restore(key: str, directory: str | Path | None = None) -> str:
    """Put the answer cell of a task such as "07.2" back into the learner's exercises. Returns what was done, in words.

    An edited cell is not lost: it stays above the fresh one as raw text. ValueError for an unknown task, or no course.
    """
    task = tasks.find(key)
    target = Path(directory).expanduser() if directory else default_dir()
    cell = task.cell or f"answer-{key.replace('.', '-')}"
    for shipped in notebook.shipped("exercises").glob(f"{task.lesson}_*.ipynb"):
        path = target / "exercises" / shipped.name
        if not target.is_dir():
            raise ValueError(f"--dir {target}: there is no course: make it with minidist lab, or give its folder")
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            _copy_new(shipped, path)
            return f"{path.name}: it was gone; the whole notebook is back"
        return update.bring_back(path, cell, shipped)
    raise ValueError(f"{key}: this installation has no exercises of lesson {task.lesson}")


def _copy_new(source: Path, target: Path) -> None:
    """Copy to a name that must be free; "x" refuses what a race has put there."""
    with source.open("rb") as ours, target.open("xb") as theirs:
        shutil.copyfileobj(ours, theirs)


def _free(path: Path) -> Path:
    number = 2
    candidate = path
    while candidate.exists():
        candidate = path.with_name(f"{path.name.removesuffix('.ipynb')}{number}.ipynb")
        number += 1
    return candidate


def _same_cells(ours: Path, theirs: Path) -> bool:
    """Whether two notebooks have the same sources in the same order, whatever their outputs. A damaged one differs."""
    try:
        return [update.source(c) for c in notebook.read(ours)["cells"]] == [
            update.source(c) for c in notebook.read(theirs)["cells"]
        ]
    except (ValueError, AttributeError):
        return False


def command(target: Path, *, browser: bool = True, port: int | None = None) -> list[str]:
    """The command that starts JupyterLab: loopback only, at lesson 0."""
    line = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--ServerApp.root_dir={target}"]
    line.append(f"--LabApp.default_url=/lab/tree/{FIRST}")
    line.append("--log-level=WARN")  # the address is still printed
    if not browser:
        line.append("--no-browser")
    if port is not None:
        line += [f"--port={port}", "--ServerApp.port_retries=0"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")
    return line


def config_path() -> str:
    """Our own Jupyter settings, which only keep it from asking whether it may fetch news, before whatever the user has."""
    own = str(Path(__file__).parent / "jupyter")
    return os.pathsep.join([own, *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])])


def lab(directory: str | Path | None = None, *, browser: bool = True, port: int | None = None) -> int:
    """Copy the course, say where it is, and run JupyterLab until it ends. Returns its exit status."""
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"--port {port}: give a number from 1 to 65535")
    target = Path(directory).expanduser().resolve() if directory else default_dir()
    for line in copy_course(target):
        print(line)
    print(f"Your course: {target}\nStart with {FIRST}; JupyterLab prints its address below.", flush=True)
    env = {**os.environ, "MINIDIST_COURSE": str(target), "JUPYTER_CONFIG_PATH": config_path()}
    line = command(target, browser=browser, port=port)
    if os.name == "posix":  # become Jupyter: stopping this process then stops it, not its parent
        sys.stdout.flush()
        os.execve(line[0], line, env)
    try:
        return subprocess.call(line, env=env)
    except KeyboardInterrupt:
        return 0
