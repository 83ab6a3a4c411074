"""Tests that must be able to fail: each line breaks the engine once, in a copy, and names the tests that have to notice.

Marked `full`: every entry runs a small test session. A mutation that survives is a hole in the tests.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MUTATIONS = [
    # file, what stands there, what is put there, tests of which one must fail
    ("parallel/zero.py", 'comm.all_reduce(unit.grads, self.group, tag="grad", async_op=True)', "Work.__new__(Work)", "parallel"),
    ("parallel/zero.py", "            work.wait()", "            pass", "parallel parity"),
    ("parallel/zero.py", "for unit in self.trainable[len(self._launched) :]:\n            self._reduce", "for unit in []:\n            self._reduce", "parallel"),
    ("parallel/zero.py", "            unit.grads.zero_()", "            pass", "parallel"),
    ("parallel/zero.py", "            if not self._last:\n                return", "", "parallel"),
    ("parallel/zero.py", 'comm.broadcast(unit.weights, group, src=0, tag="weight")', "pass", "parallel"),
    ("parallel/zero.py", "            if self._waiting[unit.name]:\n                return", "            return", "parallel"),
    ("parallel/units.py", "        if seen[id(parameter)] > 1:", "        if False:", "parallel"),
    ("parallel/parallelize.py", "random.normal(seed, record.name", "random.normal(seed + 1, record.name", "parity"),
    ("train/step.py", "/ max(tokens, 1)", "/ max(int(count_valid(batch.targets)), 1)", "parity"),
    ("train/step.py", "return host(comm.all_reduce(own, self.mesh.group(\"dp_cp\"), tag=\"control\"), expect=size)", "return int(own)", "parity"),
    ("train/step.py", "        if not broken:", "        if norm == norm and norm < 1e30:", "train/test_step.py"),
    ("train/step.py", "        if not broken:", "        if True:", "train/test_step.py"),
    ("train/step.py", "unit.grads.mul_(limit / norm)", "unit.grads.mul_(limit / norm / self.mesh.world_size)", "train/test_step.py"),
    ("train/step.py", "            self.taken += 1", "            pass", "train/test_step.py parity"),
    ("train/step.py", "(0, unit.matrices, True), (unit.matrices, unit.numel, False)", "(0, unit.numel, True)", "parity"),
    ("data/batch.py", "start = position + sum(sizes[:dp_rank])", "start = position", "parity data"),
    ("core/random.py", 'digest("dropout", key.seed, key.step, layer, site)', 'digest("dropout", key.seed, key.step, site)', "core/test_random.py"),
    ("core/comm.py", "return (x.cpu() if _staged(x, group) else x).contiguous()", "return x", "core/test_comm.py"),
    ("core/comm.py", "    if wire.check:\n        compare(line, group)", "", "core/test_check.py"),
    ("core/work.py", "            if wire.check:\n                compare(self.line, self._group)", "", "core/test_check.py"),
    ("core/comm_grad.py", "lambda g: comm.all_reduce(g.clone(), group, tag=tag))", "_same)", "core/test_comm_grad.py"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("file", "old", "new", "tests"), MUTATIONS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MUTATIONS)])
def test_a_mutation_is_noticed(file, old, new, tests, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "minidist", copy / "minidist")
    shutil.copytree(ROOT / "tests", copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy)
    target = copy / "minidist" / file
    text = target.read_text()
    assert old in text, f"{file} no longer holds what this mutation replaces: bring it up to date"
    target.write_text(text.replace(old, new))
    paths = [str(copy / "tests" / name) for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout=60", *paths]
    done = subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True)
    assert done.returncode == 1, f"this mutation survived: {old!r} -> {new!r}\n{done.stdout[-2000:]}"
