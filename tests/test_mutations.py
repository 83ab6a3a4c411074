"""Tests that must be able to fail: each entry of `mutations` breaks the engine once, in a copy; the tests it names must notice.

Marked `full`: every entry runs a small test session. A mutation that survives is a hole in the tests.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import context, data, experts, pipeline, stages, tensor

ROOT = Path(__file__).parent.parent
MUTATIONS = [entry for subject in (data, tensor, context, experts, pipeline, stages) for entry in subject.MUTATIONS]
"""file under minidist/, what stands there, what is put there, tests under tests/ of which one must fail"""


def session(copy: Path, mutation: tuple[str, str, str, str]) -> subprocess.CompletedProcess:
    """The tests of one entry in a copy of the package that holds its fault."""
    file, old, new, tests = mutation
    for name in ("minidist", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    target = copy / "minidist" / file
    text = target.read_text()
    assert text.count(old) == 1, f"{file} holds {text.count(old)} times what this mutation replaces: bring it up to date"
    target.write_text(text.replace(old, new))
    paths = [str(copy / "tests" / name) for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=60", *paths]
    return subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MUTATIONS)])
def test_a_mutation_is_noticed(mutation, tmp_path):
    done = session(tmp_path / "copy", mutation)
    assert done.returncode == 1, f"this mutation survived: {mutation[1]!r} -> {mutation[2]!r}\n{done.stdout[-2000:]}"
