"""What a notebook test lets pass although something went wrong: each is planted here, and has to be seen.

Small notebooks, run by pytest with the plugin that our own lessons run under.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "from minidist import course, ranks"
TAIL = "course.finish('00')"

# folder/name -> cells, the cell that must fail (-1: the last one's teardown; None: all pass) and what the report must say
PLANTED = {
    "lessons/healthy": ([HEAD, "%%ranks 1\nprint(rank)", TAIL], None, ""),
    "lessons/unknown_magic": ([HEAD, "%%rankz 4\nprint(1)", TAIL], 2, "a cell ended with UsageError"),
    "lessons/swallowed_interrupt": (
        ["import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass"],
        0,
        "ran past its time and swallowed the interrupt",
    ),
    "lessons/failure_that_did_not_happen": ([HEAD, "%%ranks 1 --expect error\npass"], 1, "expected to end in an error"),
    "lessons/widget_error": ([HEAD, "course.widget(lambda v: 1 / 0, x=(0, 2, 1, 1))", TAIL], 2, "a widget's drawing"),
    "lessons/thread_error": (
        [HEAD, "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()", TAIL],
        2,
        "thread .* ended with ZeroDivisionError",
    ),
    "lessons/process_left": (
        ["import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True);"],
        -1,
        "left processes behind: .*sleep 600",
    ),
    "lessons/file_left": (["open('litter.txt', 'w').close()"], -1, "left files in the tree: .*litter.txt"),
    "solutions/unsolved": (
        [HEAD, 'def gather_squares(mesh, secret):\n    raise NotImplementedError("00.1")', "course.check('00.1')"],
        2,
        "not started, 0 of 10 points",
    ),
    "exercises/unsolved": (
        [HEAD, 'def gather_squares(mesh, secret):\n    raise NotImplementedError("00.1")', "course.check('00.1')", TAIL],
        None,
        "",
    ),
    "exercises/attempted": (
        [HEAD, "def gather_squares(mesh, secret):\n    import torch.distributed", "course.check('00.1')"],
        2,
        "the unsolved notebook should be 'not started'",
    ),
}


def write(path: Path, cells: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    made = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for i, text in enumerate(cells)
    ]
    spec = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"}}
    path.write_text(json.dumps({"cells": made, "metadata": spec, "nbformat": 4, "nbformat_minor": 5}))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What failed, by notebook: {"lessons/healthy": [(cell, "failure" or "error" of teardown, text), ...]}."""
    folder = tmp_path_factory.mktemp("planted") / "tree"
    folder.mkdir()
    for name, (cells, _, _) in PLANTED.items():
        write(folder / f"{name}.ipynb", cells)
    (folder / "pytest.ini").write_text("[pytest]\n")
    slow = "lessons/swallowed_interrupt.ipynb"  # the others start ranks, which may take a while on a busy machine
    runs = [start(folder, "slow.xml", 2, slow), start(folder, "rest.xml", 60, ".", f"--deselect={slow}", f"--ignore={slow}")]
    failed: dict[str, list[tuple[int, str, str]]] = {name: [] for name in PLANTED}
    for run, name in zip(runs, ("slow.xml", "rest.xml"), strict=True):
        said, _ = run.communicate(timeout=240)
        cases = list(ElementTree.parse(folder.parent / name).iter("testcase"))
        assert cases, said
        for case in cases:
            notebook = case.get("classname").replace(".", "/").removesuffix("/ipynb")
            for kind in ("failure", "error"):
                for node in case.findall(kind):
                    failed[notebook].append((int(case.get("name").split()[-1]), kind, f"{node.get('message')}\n{node.text}"))
    return failed


def start(folder: Path, report: str, timeout_s: int, *what: str) -> subprocess.Popen:
    """One pytest run of planted notebooks, in an environment without ours."""
    options = ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={timeout_s}", "--rootdir=."]
    plugins = ["-p", "minidist.course.pytest_plugin", "-p", "no:cacheprovider"]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MINIDIST_", "PYTEST_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *plugins, *options, f"--junitxml=../{report}", *what],
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name, report):
    cells, where, said = PLANTED[name]
    failed = report[name]
    if where is None:
        assert failed == []
        return
    assert failed, f"{name} passed"
    cell, kind, text = failed[0]
    text = re.sub(r"\x1b\[[0-9;]*m|#x1B\[[0-9;]*m", "", text)
    assert (cell, kind) == ((len(cells) - 1, "error") if where == -1 else (where, "failure")), text
    assert re.search(said, text, re.DOTALL), text
