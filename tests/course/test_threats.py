"""Every threat in tests/banks/threats: none scores above what honest work of its kind earns, nor stops the grader.

A threat says in its docstring which task it attacks, what honest work of that kind earns there, and, where it is to be
caught by name, the message. What the walls do not stop is stated in course/guard.py and course/sandbox.py.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minidist.course import crossing, grading, ledger, tasks
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

BANK = Path(__file__).parents[1] / "banks" / "threats"
THREATS = sorted(BANK.glob("*.py"))
HANG_S = 3.0
HONEST = BANK.parent / "00/1/honest_gather.py"


def said(path: Path, what: str) -> str:
    found = re.search(rf"^{what}: (.+)$", path.read_text(), re.MULTILINE)
    return found[1] if found else ""


def attempts(paths: list[Path]) -> list[grading.Result]:
    """One nursery for all: a threat that spoils it spoils the honest attempt at the end."""
    with Nursery() as nursery:
        found = [
            grading.grade(tasks.find(said(p, "task")), [Cell("bank", p.read_text())], limit_s=HANG_S, nursery=nursery)
            for p in paths
        ]
        honest = grading.grade(tasks.find("00.1"), [Cell("bank", HONEST.read_text())], nursery=nursery)
        assert honest.points == honest.max, honest.lines()
    return found


@pytest.fixture(scope="module")
def results():
    halves = THREATS[::2], THREATS[1::2]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(attempts, halves)
        return {p: r for paths, rs in zip(halves, found, strict=True) for p, r in zip(paths, rs, strict=True)}


@pytest.mark.parametrize("path", THREATS, ids=lambda path: path.stem)
def test_threat(path, results):
    result, earns = results[path], int(said(path, "earns"))
    assert 0 <= result.points <= earns < result.max, result.lines()
    assert result.message_id == (said(path, "message") or result.message_id), result.lines()
    assert result.message_id != "missing", "the threat was never run"
    assert len(result.lines()) <= 10


def test_there_are_threats_of_every_kind():
    assert len(THREATS) >= 20


def test_an_empty_channel_between_judge_and_rank_carries_no_code():
    import pickle

    assert crossing.plain(pickle.dumps(("result", 1, b"x", {("sent", 0, 1): 2}))) == ("result", 1, b"x", {("sent", 0, 1): 2})
    for evil in (print, Path("x"), pickle.Pickler, ValueError("x"), 1j):
        with pytest.raises(EOFError):
            crossing.plain(pickle.dumps(evil))


LINE = {"op": "all_reduce", "payload": 8, "sent": 8, "peer": None, "ranks": [0, 1], "tag": "act", "where": "<cell a>:1"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"sent": 0}, "all_reduce of 8 bytes"),
        ({"payload": 4}, "all_reduce of 8 bytes"),
        ({"op": "barrier"}, "barrier of 8 bytes"),
        ({"ranks": [0]}, "sent and not on it"),
    ],
)
def test_a_tape_that_differs_from_its_ledger_is_seen(change, word):
    assert word in ledger.altered([[LINE | change]], [[LINE]]) if word else ledger.altered([[LINE]], [[LINE]]) == ""


def test_tapes_that_tell_different_stories_are_seen():
    send, recv = LINE | {"op": "send", "peer": 1, "payload": 8}, LINE | {"op": "recv", "peer": 0, "payload": 8}
    assert ledger.differ([[send], [recv]]) == "" == ledger.differ([[LINE], [LINE]])
    assert "rank 0 sent to rank 1" in ledger.differ([[send], [recv | {"payload": 4}]])
    assert "rank 0 sent to rank 1" in ledger.differ([[send], []])
    assert "[0, 1]" in ledger.differ([[LINE, LINE], [LINE]])
    assert "[0, 1]" in ledger.differ([[LINE], [LINE | {"payload": 4}]])
    uneven = LINE | {"op": "all_to_all"}
    assert ledger.differ([[uneven], [uneven | {"payload": 4}]]) == ""


def test_an_answers_check_tag_counts_and_the_graders_own_does_not():
    assert ledger.counted(LINE | {"tag": "check"})["tag"] == "act"
    assert ledger.counted(LINE | {"tag": "check", "where": "tasks/drive_07.py:3"})["tag"] == "check"
