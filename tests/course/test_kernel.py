"""What a check says about a kernel that has something the graded cells have not."""

from __future__ import annotations

import json

from minidist.course import exercise, kernel, progress, session, tasks
from minidist.course.session import Cell

TASK = tasks.find("00.1")
ANSWER = "import torch\n\ndef gather_squares(mesh, secret):\n    return [offset + len(str(secret)), torch]\n"


def names_of(source: str, **more) -> dict:
    names = dict(more)
    exec(source, names)
    return names


def test_a_variable_that_only_the_kernel_has_is_named():
    warned = kernel.warnings(TASK, [Cell("answer-00-1", ANSWER)], names_of(ANSWER, offset=3))
    assert warned == ["offset exists only in your kernel: no cell that is graded sets it."]
    assert kernel.warnings(TASK, [Cell("a", "offset = 1"), Cell("b", ANSWER)], names_of(ANSWER, offset=3)) == []
    assert kernel.warnings(TASK, [Cell("b", ANSWER)], names_of(ANSWER)) == []  # unknown here too: the error says it


def test_an_answer_redefined_elsewhere_is_told():
    other = ANSWER.replace("len", "sum")
    [warned] = kernel.warnings(TASK, [Cell("a", "offset = 1\n" + ANSWER)], names_of(other))
    assert warned.startswith("Your kernel's gather_squares is not the one in its cell")
    assert kernel.warnings(TASK, [Cell("a", "offset = 1\n\n" + ANSWER)], names_of(ANSWER)) == []


def test_an_answer_of_a_class_is_compared_by_its_methods():
    task = tasks.find("07.1")
    source = "class DDP:\n    x = 1\n    def finish(self):\n        return [i for i in range(3)]\n"
    assert kernel.warnings(task, [Cell("a", source)], names_of(source)) == []
    assert "DDP" in kernel.warnings(task, [Cell("a", source)], names_of(source.replace("3", "4")))[0]


def test_a_cell_changed_and_not_run_is_told(tmp_path, monkeypatch):
    path = tmp_path / "00_ranks.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "id": "answer-00-1", "source": "new"}]}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    assert kernel.warnings(TASK, [Cell("answer-00-1", "old")], {}) == [
        "answer-00-1 has changed since you ran it: what you ran is graded."
    ]
    assert kernel.warnings(TASK, [Cell("answer-00-1", "new")], {}) == []


def test_check_warns_within_its_ten_lines_and_a_lesson_ends_in_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIDIST_COURSE", str(tmp_path))
    monkeypatch.delenv("MINIDIST_STRICT", raising=False)
    cells = [Cell("answer-00-1", ANSWER), Cell("demo", "offset = 3", ("demo",))]
    monkeypatch.setattr(session, "current", session.Session(cells=cells))
    monkeypatch.setattr(exercise, "_cells", lambda task: cells)
    monkeypatch.setattr(kernel, "namespace", lambda: names_of(ANSWER, offset=3))
    exercise.check("00")
    out = capsys.readouterr().out
    verdict, table = out.split("task  ")
    assert "NameError: name 'offset' is not defined" in verdict and "offset exists only in your kernel" in verdict
    assert len(verdict.strip().split("\n")) <= 10 and verdict.strip().endswith("repeats this attempt.")
    assert "00.1  0 of 10  error" in table and table.strip().endswith("total: 0 of 10 points")
    assert [event["key"] for event in progress.history()[0]] == ["00.1"]
