"""`minidist lab`: the learner's own copy of the course, and JupyterLab on it. Nothing of the learner's is ever overwritten."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from minidist.course import notebook, progress

KINDS = ("lessons", "exercises")
FIRST = "lessons/00_ranks.ipynb"  # it opens with the map


def default_dir() -> Path:
    """~/minidist-course, or what `$MINIDIST_COURSE` says."""
    return Path(os.environ.get("MINIDIST_COURSE") or Path.home() / "minidist-course")


def copy_course(target: Path) -> list[str]:
    """Copy lessons and exercises (never solutions) into `target`. Returns what was done, a line a file that is not new.

    A notebook with the learner's outputs but our cells is left alone. One whose cells differ from ours is kept too, and
    ours lands beside it as NN_topic.new.ipynb.
    """
    if target.exists() and not target.is_dir():
        raise ValueError(f"--dir {target}: there is a file of that name: give a folder")
    said = []
    for kind in KINDS:
        try:
            (target / kind).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--dir {target}: cannot make a folder there ({error.strerror}): give another") from None
        for ours in sorted(notebook.shipped(kind).glob("*.ipynb")):
            theirs = target / kind / ours.name
            if not theirs.exists():
                _copy_new(ours, theirs)
            elif not _same_cells(ours, theirs):
                beside = theirs.with_suffix(".new.ipynb")
                if not beside.exists() or not _same_cells(ours, beside):
                    beside = _free(beside)
                    _copy_new(ours, beside)
                said.append(f"{kind}/{theirs.name}: yours differs from ours and is kept; ours is {beside.name}")
    journal = target / progress.NAME
    journal.touch(exist_ok=True)
    return said


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
        return _sources(ours) == _sources(theirs)
    except ValueError:
        return False


def _sources(path: Path) -> list[str]:
    cells = notebook.read(path)["cells"]
    return ["".join(cell.get("source", "")) for cell in cells if isinstance(cell, dict)]


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
