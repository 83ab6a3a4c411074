"""pytest plugin (`-p minidist.course.pytest_plugin`): runs of lessons, solutions and exercises that cannot pass by accident.

It gives the whole test run a home of its own, tells each notebook's kernel how strict to be, and after each notebook looks for
processes and files that it left behind. It also fails a cell that ran past its time and swallowed the interrupt, which
nbval counts as a pass.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

STRICT = {"lessons": "1", "solutions": "1", "exercises": "unsolved"}
GRACE_S = 5.0  # for processes on their way out
_OURS = ("MINIDIST_HOME", "MINIDIST_RUNS", "MINIDIST_COURSE")


def pytest_configure(config) -> None:
    """A home for this run; workers of xdist share the one that their controller made."""
    if os.environ.get("MINIDIST_TEST_ROOT"):
        return
    root = tempfile.mkdtemp(prefix="minidist-tests-")
    before = {name: os.environ.get(name) for name in (*_OURS, "MINIDIST_STRICT", "MINIDIST_TEST_ROOT", "PYTHONPATH")}
    os.environ["MINIDIST_TEST_ROOT"] = root
    for name in _OURS:
        os.environ[name] = str(Path(root, name.removeprefix("MINIDIST_").lower()))

    # kernels start in the notebook's folder: let them import the package that the tests import
    package = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [before["PYTHONPATH"]])])

    def undo():
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(root, ignore_errors=True)

    config.add_cleanup(undo)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    """Before a notebook's kernel starts (nbval starts it with the first cell): its mark and its strictness."""
    notebook = _notebook(item)
    if notebook is None or getattr(notebook, "minidist_mark", None):
        return
    notebook.minidist_mark = f"{os.getpid()}-{time.monotonic_ns()}"
    notebook.minidist_files = _files(notebook.path)
    os.environ["MINIDIST_NOTEBOOK"] = notebook.minidist_mark
    os.environ["MINIDIST_STRICT"] = STRICT.get(notebook.path.parent.name, "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A cell past its time fails, whether or not it let itself be interrupted."""
    notebook = _notebook(item)
    before = notebook is not None and notebook.timed_out
    result = yield
    if notebook is not None and notebook.timed_out and not before:
        pytest.fail("the cell ran past its time and swallowed the interrupt", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """After a notebook's last cell, when its kernel has been shut down: is anything left?"""
    result = yield
    notebook = _notebook(item)
    if notebook is not None and (nextitem is None or _notebook(nextitem) is not notebook):
        os.environ.pop("MINIDIST_NOTEBOOK", None)
        os.environ.pop("MINIDIST_STRICT", None)
        left = leftovers(notebook.minidist_mark)
        if left:
            for process in left:  # told below; the next notebook starts clean
                with contextlib.suppress(OSError):
                    os.kill(int(process.split()[0]), signal.SIGKILL)
            pytest.fail(f"{notebook.path.name} left processes behind: {left}", pytrace=False)
        new = sorted(_files(notebook.path) - notebook.minidist_files)
        if new:
            pytest.fail(f"{notebook.path.name} left files in the tree: {new}", pytrace=False)
    return result


def leftovers(mark: str, grace_s: float = GRACE_S) -> list[str]:
    """Processes that inherited this notebook's mark and outlive it, as "pid command". [] where there is no /proc."""
    deadline = time.monotonic() + grace_s
    while True:
        found = [text for pid in _pids() if (text := _marked(pid, mark))]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _marked(pid: str, mark: str) -> str:
    try:
        environ = Path("/proc", pid, "environ").read_bytes().split(b"\0")
        if f"MINIDIST_NOTEBOOK={mark}".encode() not in environ or int(pid) == os.getpid():
            return ""
        if Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return ""
        return f"{pid} {Path('/proc', pid, 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace').strip()}"
    except OSError:
        return ""


def _pids() -> list[str]:
    return [p.name for p in Path("/proc").iterdir() if p.name.isdigit()] if Path("/proc").is_dir() else []


def _files(notebook: Path) -> set[str]:
    """Names beside a notebook and at the top of its tree; caches of the tools apart."""
    places = (notebook.parent, notebook.parent.parent)
    return {f"{p.parent.name}/{p.name}" for place in places for p in place.iterdir() if not p.name.startswith((".", "__"))}


def _notebook(item):
    """The notebook file of an nbval cell, or None for any other test."""
    parent = getattr(item, "parent", None)
    return parent if type(parent).__name__ == "IPyNbFile" else None
