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

from minidist.course import crossing, exercise, graded, grading, progress, session, tasks
from minidist.course.grading import Case, Fault, Outcome, Result
from minidist.course.nursery import Nursery
from minidist.course.pytest_plugin import leftovers
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
    assert crossing.encode(value) == encoded
    json.dumps(encoded)


def test_a_tensor_crosses_with_its_dtype_and_shape():
    torch = pytest.importorskip("torch")
    for x in (torch.ones(1, 2), torch.zeros(0, 3), torch.tensor(7), torch.rand(3, 2).T.bfloat16()):
        crossed = json.loads(json.dumps(crossing.encode(x)))
        assert crossing.unpack(crossed).equal(x) and crossing.decode(crossing.pack_input([{"x": x}]))[0]["x"].equal(x)
        assert crossing.readable(crossed) == {"tensor": x.tolist(), "dtype": str(x.dtype)[6:], "shape": list(x.shape)}


def test_magics_shell_and_help_lines_are_no_code():
    source = "x = 7 % 4\n  %timeit x\n!ls\nx?\nprint?? \n'what?'"
    assert graded.without_magics(source) == "x = 7 % 4\n  pass\npass\npass\nprint?? \n'what?'"


def test_cells_run_in_order_and_the_first_error_is_named_without_stopping_the_rest():
    namespace = {}
    note = graded.run_cells(
        [["a", "x = 1"], ["b", "%%ranks 4\nboom"], ["", "1 / 0"], ["c", "raise OSError"], ["d", "y = x"]], namespace
    )
    assert namespace["y"] == 1
    assert note == "Cell number 3 at line 1, run from a fresh start, raised ZeroDivisionError: division by zero"


def test_the_same_seed_repeats_an_attempt_and_another_draws_other_inputs():
    assert TASK.cases(1) == TASK.cases(1) != TASK.cases(2)
    assert [case.world_size for case in TASK.cases(1)] == [1, 2, 3, 4]


def test_a_cell_that_never_ends_is_ended_with_everything_it_started(monkeypatch):
    monkeypatch.setattr(grading, "START_S", 2.0)
    monkeypatch.setenv("MINIDIST_NOTEBOOK", "never-ends")
    result = grading.grade(TASK, [Cell("", "def gather_squares(m, s): pass\nimport time\ntime.sleep(99)")], limit_s=0.1)
    assert (result.status, result.points) == ("error", 0) and "ran past their time" in result.message
    assert leftovers("never-ends", grace_s=1.0) == []


def test_a_judge_that_is_killed_takes_the_sandbox_and_its_ranks_along():
    program = (
        "from minidist.course import grading, tasks\n"
        "from minidist.course.session import Cell\n"
        "source = 'def gather_squares(mesh, secret):\\n    import time\\n    time.sleep(99)'\n"
        "grading.grade(tasks.find('00.1'), [Cell('', source)], limit_s=60)"
    )
    env = {**os.environ, "MINIDIST_NOTEBOOK": "killed-judge"}
    judge = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=env)
    wait_until(lambda: len(leftovers("killed-judge", grace_s=0)) == 5, 60)  # judge, nursery, sandbox, zygote, rank
    judge.kill()
    judge.wait()
    assert leftovers("killed-judge", grace_s=10) == []


def wait_until(true, seconds):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_attempts_through_one_nursery_know_nothing_of_each_other():
    leave = "import os, sys\nos.environ['LEFT'] = sys.left = 'x'\ngather_squares = 1\nopen('left', 'w')"
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
    assert "00.1: missing, 0 of 10 points" in out and "restore it with `minidist restore 00.1`" in out
    assert "there is no task '00.9': did you mean '00.1'?" in out and "there is no task 7: did you mean '07." in out


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
