"""Ranks for these tests: quick to give up, and none left behind."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from ranks.processes import ROOT, hear_ctrl_c

from minidist import ranks
from minidist.ranks import collect


@pytest.fixture(scope="package", autouse=True)
def no_ranks_left():
    yield
    ranks.stop()


@pytest.fixture
def impatient(monkeypatch):
    """Free the victims of a failure, and see a deadlock, after a fifth of a second."""
    monkeypatch.setattr(collect, "GRACE_S", 0.2)
    monkeypatch.setattr(collect, "CERTAIN_S", 0.2)
    monkeypatch.setattr(collect, "LOOK_S", 0.1)


@pytest.fixture
def environ(tmp_path):
    """Environment of a process that uses minidist from this tree, with its temporary files in a folder of its own."""
    tmp = tempfile.mkdtemp(prefix="r-")  # pytest's own folders have names too long for a socket
    yield {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": tmp, "IPYTHONDIR": str(tmp_path / "ipython")}
    shutil.rmtree(tmp)


@pytest.fixture
def script(environ, tmp_path):
    """Start a Python script; it is killed at the end of the test if it still runs."""
    started = []

    def start(source: str) -> subprocess.Popen:
        path = tmp_path / "script.py"
        path.write_text(source)
        process = subprocess.Popen(
            [sys.executable, str(path)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_ctrl_c,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
