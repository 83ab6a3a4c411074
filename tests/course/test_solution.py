"""A solution opens after a pass, after three tries or on demand, is noted, and exists with its reasoning for every task."""

import json

import pytest

from minidist.course import answers, exercise, notebook, progress, session, solution, tasks


@pytest.fixture(autouse=True)
def learner(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_COURSE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_STRICT", raising=False)
    monkeypatch.setattr(session, "current", session.Session())


def seen():
    return [event for event in progress.history()[0] if event["event"] == "seen"]


def test_it_stays_shut_before_three_tries_and_says_how_to_open_it(capsys):
    progress.record("check", "00.1", status="not started", points=0, max=10)
    for tries in range(3):
        solution("00.1")
        said = capsys.readouterr().out
        assert f"{tries} of 3 checked tries" in said and "now=True" in said and "def gather_squares" not in said
        progress.record("check", "00.1", status="failed", points=0, max=10)
    assert seen() == []
    solution("00.1")
    assert "def gather_squares" in capsys.readouterr().out
    assert [(event["key"], event["passed"], event["tries"]) for event in seen()] == [("00.1", False, 3)]


def test_tries_of_this_kernel_count_where_no_journal_can_be_kept(capsys):
    session.current.tries["00.1"] = 3
    solution("00.1")
    assert "def gather_squares" in capsys.readouterr().out


def test_a_pass_of_this_task_opens_it_and_one_of_another_does_not(capsys):
    progress.record("check", "00.2", status="passed", points=10, max=10)
    solution("00.1")
    assert "0 of 3" in capsys.readouterr().out
    progress.record("check", "00.1", status="passed", points=10, max=10)
    solution("00.1")
    out = capsys.readouterr().out
    assert "def gather_squares" in out and "**Why.**" in out and "STUB" not in out and "NotImplementedError" not in out


def test_on_demand_it_opens_at_once_and_is_noted(capsys):
    solution("00.1", now=True)
    assert "def gather_squares" in capsys.readouterr().out
    assert len(seen()) == 1


def test_an_unknown_task_is_told_and_an_installation_without_solutions_too(capsys, monkeypatch):
    solution("00.9")
    assert "did you mean '00.1'" in capsys.readouterr().out
    monkeypatch.setenv("MINIDIST_STRICT", "1")
    with pytest.raises(exercise.CheckFailed, match="there is no task"):
        solution("00.9")
    monkeypatch.setattr(notebook, "shipped", lambda kind: progress.folder())
    with pytest.raises(exercise.CheckFailed, match="not in this installation"):
        solution("00.1", now=True)


@pytest.mark.parametrize("task", tasks.every(), ids=lambda task: task.key)
def test_every_task_has_an_answer_and_its_reasoning_and_exercises_give_neither_away(task):
    answer, why = answers.text(task)
    assert all(name in answer for name in task.functions) and "ANSWER" not in answer
    assert len(why.split()) > 30, "the reasoning: a cell named why-NN-k after the answer"
    (path,) = notebook.shipped("exercises").glob(f"{task.lesson}_*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell["id"].startswith("why-") for cell in cells)
    assert "".join(cells[0]["source"]) and answer not in ["".join(cell["source"]) for cell in cells]
