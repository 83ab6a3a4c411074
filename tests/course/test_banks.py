"""Every bank: honest variants of an answer earn everything, wrong ones fail with the message that names their thought.

A bank entry is the source of the answer's cells. A wrong one says in its docstring which message it must produce.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import pytest

from minidist.course import grading, tasks
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

BANKS = Path(__file__).parents[1] / "banks"
HANG_S = 2.0
ENTRIES = sorted(BANKS.glob("*/*/*.py"))


def attempts(paths: list[Path]) -> list[grading.Result]:
    found = []
    with Nursery() as nursery:
        for path in paths:
            task = tasks.find(f"{path.parts[-3]}.{path.parts[-2]}")
            limit_s = HANG_S if "wrong" in path.name else None
            seed = crc32(path.name.encode()) % 10**6  # one attempt, the same in every run; fresh seeds have tests of their own
            cells = [Cell("bank", path.read_text())]
            found.append(grading.grade(task, cells, seed=seed, limit_s=limit_s, nursery=nursery))
    return found


@pytest.fixture(scope="module")
def results():
    """All attempts, two at a time: each is a fresh process of its own, so order and company cannot matter."""
    halves = ENTRIES[::2], ENTRIES[1::2]
    with ThreadPoolExecutor(2) as pool:
        return {
            path: result
            for paths, found in zip(halves, pool.map(attempts, halves), strict=True)
            for path, result in zip(paths, found, strict=True)
        }


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: "/".join(path.parts[-3:]))
def test_bank(path, results):
    result = results[path]
    assert 0 <= result.points <= result.max and len(result.lines()) <= 10, result.lines()
    named = re.search(r"^message: (.+)$", path.read_text(), re.MULTILINE)
    if path.name.startswith("honest_"):
        assert (result.status, result.points) == ("passed", result.max), result.lines()
    else:
        assert named, f"{path.name} does not say which message it must produce"
        assert result.message_id == named[1], result.lines()
        assert result.points < result.max and result.status != "passed"


def test_every_task_has_a_bank_large_enough():
    for task in tasks.every():
        lesson, number = task.key.split(".")
        names = [path.name for path in ENTRIES if path.parts[-3:-1] == (lesson, number)]
        assert sum(name.startswith("honest_") for name in names) >= 2
        assert sum(name.startswith("wrong_") for name in names) >= 8


def test_only_right_values_with_too_many_bytes_earn_a_part(results):
    mine = {path.stem: result for path, result in results.items() if path.parts[-3] == "00"}
    earned = {name: result.points for name, result in mine.items() if 0 < result.points < result.max}
    assert earned == {"wrong_all_gather": 6, "wrong_twice": 6}
