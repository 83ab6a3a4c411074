"""The grading path: zero is zero, the submission never judges itself, and a learner never sees an exception of ours."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidist.course import exercise, grading, progress, sandbox, session, tasks
from minidist.course.grading import Case, Fault, Outcome, Result
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

ROOT = Path(__file__).parents[2]
TASK = tasks.find("00.1")
RIGHT = (ROOT / "tests/banks/00/1/honest_gather.py").read_text()


def answers(*outcomes, note=""):
    """A task run without any process: what the sandbox would have written."""
    return {"cases": [dataclasses.asdict(outcome) for outcome in outcomes], "note": note}


def scored(task, *outcomes, note=""):
    cases = [Case(1, [[]]) for _ in range(2)]
    return grading._score(task, cases, answers(*outcomes, note=note))


def task_with(judge):
    return dataclasses.replace(TASK, parts={"a": 6, "b": 4}, judge=judge)


FINE = Outcome([1], [[]])


@pytest.mark.parametrize(
    ("judge", "points", "id"),
    [
        (lambda case, outcome: None, 10, None),
        (lambda case, outcome: Fault("a", "x", "m"), 0, "x"),
        (lambda case, outcome: Fault("b", "x", "m"), 6, "x"),
        (lambda case, outcome: 0, 0, "grader"),
        (lambda case, outcome: False, 0, "grader"),
        (lambda case, outcome: -1, 0, "grader"),
        (lambda case, outcome: 1000, 0, "grader"),
        (lambda case, outcome: Fault("nowhere", "x", "m"), 0, "grader"),
        (lambda case, outcome: 1 / 0, 0, "grader"),
    ],
)
def test_a_judge_pays_by_parts_and_one_that_fails_pays_nothing(judge, points, id):  # case C57
    got, fault, _ = scored(task_with(judge), FINE, FINE)
    assert got == points and (fault and fault.id) == id


def test_the_worst_fault_of_all_cases_counts_not_the_first():
    faults = iter([Fault("b", "late", "m"), Fault("a", "early", "m")])
    points, fault, _ = scored(task_with(lambda case, outcome: next(faults)), FINE, FINE)
    assert points == 0 and fault.id == "early"


def test_cases_that_never_came_back_pay_nothing():
    points, fault, _ = scored(task_with(lambda case, outcome: None), FINE, note="gone")
    assert (points, fault.id, fault.message) == (0, "error", "gone")


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, None),
        ([1, 2.5, "x", True], [1, 2.5, "x", True]),
        ((1,), {"tuple": [1]}),
        (type("Sly", (int,), {"__eq__": lambda *_: True, "__hash__": int.__hash__})(3), {"object": "Sly"}),
        ({1: 2}, {"object": "dict"}),
    ],
)
def test_what_crosses_is_plain_json(value, encoded):
    assert sandbox.encode(value) == encoded
    json.dumps(encoded)


def test_a_tensor_crosses_with_its_dtype_and_shape():
    torch = pytest.importorskip("torch")
    assert sandbox.encode(torch.ones(1, 2)) == {"tensor": [[1.0, 1.0]], "dtype": "float32", "shape": [1, 2]}


def test_magics_shell_and_help_lines_are_no_code():
    source = "x = 7 % 4\n  %timeit x\n!ls\nx?\nprint?? \n'what?'"
    assert sandbox.without_magics(source) == "x = 7 % 4\n  pass\npass\npass\nprint?? \n'what?'"


def test_cells_run_in_order_and_the_first_error_is_named_without_stopping_the_rest():
    namespace = {}
    note = sandbox.run_cells(
        [["a", "x = 1"], ["b", "%%ranks 4\nboom"], ["", "1 / 0"], ["c", "raise OSError"], ["d", "y = x"]], namespace
    )
    assert namespace["y"] == 1
    assert note == "Cell number 3 at line 1, run from a fresh start, raised ZeroDivisionError: division by zero"


def test_the_same_seed_repeats_an_attempt_and_another_draws_other_inputs():
    assert TASK.cases(1) == TASK.cases(1) != TASK.cases(2)
    assert [case.world_size for case in TASK.cases(1)] == [1, 2, 3, 4]


def test_a_cell_that_never_ends_is_ended_with_everything_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(grading, "START_S", 1.0)
    marker = tmp_path / "pid"
    source = (
        f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ndef gather_squares(m, s): pass\ntime.sleep(99)"
    )
    result = grading.grade(TASK, [Cell("", source)], limit_s=0.1)
    assert (result.status, result.points) == ("error", 0) and "ran past its time" in result.message
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_a_judge_that_is_killed_takes_the_sandbox_and_its_ranks_along(tmp_path):
    marker = tmp_path / "pids"
    source = (
        "import os, time\n"
        "def gather_squares(mesh, secret):\n"
        f"    open({str(marker)!r}, 'a').write(f'{{os.getpid()}} {{os.getppid()}}\\n')\n"
        "    time.sleep(99)"
    )
    program = (
        "from minidist.course import grading, tasks\n"
        "from minidist.course.session import Cell\n"
        f"grading.grade(tasks.find('00.1'), [Cell('', {source!r})], limit_s=60)"
    )
    judge = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    wait_until(lambda: marker.exists() and marker.read_text().endswith("\n"), 60)
    judge.kill()
    judge.wait()
    pids = [int(pid) for pid in marker.read_text().split()]  # the rank and the zygote that forked it
    assert len(pids) == 2
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), 10)


def wait_until(true, seconds):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_attempts_through_one_nursery_know_nothing_of_each_other():
    leave = "import os, sys\nos.environ['LEFT'] = sys.left = 'x'\nopen('left', 'w')\ngather_squares = 1"
    look = "import os, sys\ngather_squares = str([hasattr(sys, 'left'), 'LEFT' in os.environ, os.listdir('.')])"
    with Nursery() as nursery:
        assert "not a function but 1" in grading.grade(TASK, [Cell("", leave)], nursery=nursery).message
        same = nursery._process.pid
        found = grading.grade(TASK, [Cell("", look)], nursery=nursery).message
        assert nursery._process.pid == same
    assert found == "gather_squares is not a function but '[False, False, []]'"


def test_a_nursery_that_was_killed_is_replaced():
    with Nursery() as nursery:
        grading.grade(TASK, [Cell("", "gather_squares = 1")], nursery=nursery)
        nursery._process.kill()
        nursery._process.wait()
        assert "not a function but 2" in grading.grade(TASK, [Cell("", "gather_squares = 2")], nursery=nursery).message


@pytest.fixture
def learner(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_COURSE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_STRICT", raising=False)
    monkeypatch.setattr(session, "current", session.Session())
    return tmp_path


def test_check_grades_the_cells_as_last_executed_and_keeps_the_score(learner, capsys):
    session.current.cells = [Cell("setup", "import torch"), Cell("answer-00-1", RIGHT)]
    exercise.check("00.1", seed=5)
    assert "00.1: passed, 10 of 10 points" in capsys.readouterr().out
    events, _ = progress.history()
    assert [(e["event"], e["points"], e["max"], e["seed"]) for e in events] == [("check", 10, 10, 5)]


def test_check_before_anything_was_run_and_of_an_unknown_task(learner, capsys):
    exercise.check("00.1")
    exercise.check("00.9")
    exercise.check(7)
    out = capsys.readouterr().out
    assert "00.1: missing, 0 of 10 points" in out and "bring back the cell named answer-00-1" in out
    assert out.count("did you mean '00.1'?") == 2


@pytest.mark.parametrize(
    ("mode", "status", "points", "raises"),
    [
        ("1", "passed", 10, False),
        ("1", "partial", 6, True),
        ("1", "not started", 0, True),
        ("unsolved", "not started", 0, False),
        ("unsolved", "failed", 0, True),
        ("unsolved", "passed", 10, True),
    ],
)
def test_in_tests_a_check_raises_unless_it_comes_out_as_the_notebook_promises(
    monkeypatch, learner, mode, status, points, raises
):
    result = Result("00", "00.1", 1, points, 10, status, "id", "message")
    monkeypatch.setattr(grading, "grade", lambda *args, **kwargs: result)
    monkeypatch.setenv("MINIDIST_STRICT", mode)
    if raises:
        with pytest.raises(exercise.CheckFailed):
            exercise.check("00.1")
    else:
        exercise.check("00.1")


def test_three_hints_then_the_last_again(learner, capsys):
    for _ in range(4):
        exercise.hint("00.1")
    out = capsys.readouterr().out
    assert [f"Hint {k} of 3" in out for k in (1, 2, 3)] == [True] * 3 and out.count("Hint 3 of 3") == 2
    assert "gather(" not in TASK.hints[0]


def test_notebooks_are_graded_by_the_same_path(tmp_path, capsys):
    [unsolved] = grading.grade_notebook(ROOT / "exercises/00_ranks.ipynb")
    assert (unsolved.status, unsolved.points, unsolved.max) == ("not started", 0, 10)
    [solved] = grading.grade_notebook(ROOT / "solutions/00_ranks.ipynb", seed=3)
    assert (solved.status, solved.points, solved.seed) == ("passed", 10, 3)
    assert grading.table([solved, unsolved]).endswith("total: 10 of 20 points")
    assert set(solved.to_json()) >= {
        "lesson",
        "task",
        "task_version",
        "points",
        "max",
        "status",
        "message_id",
        "seed",
        "seconds",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("00_x.ipynb", None, "no such file"),
        ("00_x.ipynb", "", "not a notebook"),
        ("00_x.ipynb", "[]", "not a notebook"),
        ("homework.ipynb", '{"cells": []}', "no lesson has exercises under that name"),
    ],
)
def test_what_is_no_notebook_of_ours_is_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        grading.grade_notebook(path)


def test_an_empty_notebook_is_missing_its_answer(tmp_path):
    path = tmp_path / "00_mine.ipynb"
    path.write_text('{"cells": []}')
    assert [result.status for result in grading.grade_notebook(path)] == ["missing"]
