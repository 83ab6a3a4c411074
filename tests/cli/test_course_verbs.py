"""`lab`, `restore`, `progress` and `grade` hand over to the course with what was asked."""

import json
from pathlib import Path

import pytest

from minidist.course import lab as course_lab
from minidist.course import progress as course_progress

ROOT = Path(__file__).parents[2]


def test_lab_passes_its_options_on(minidist, monkeypatch):
    asked = []
    monkeypatch.setattr(course_lab, "lab", lambda *args, **kwargs: asked.append((args, kwargs)) or 0)
    assert minidist("lab").code == minidist("lab", "--dir", "d", "--no-browser", "--port", "9000").code == 0
    assert asked == [((None,), {"browser": True, "port": None}), (("d",), {"browser": False, "port": 9000})]


@pytest.mark.parametrize("folder, code", [("exercises", 1), ("solutions", 0)])
def test_grade_is_1_below_full_marks_and_0_at_full_marks(minidist, folder, code):
    notebook = ROOT / folder / "00_ranks.ipynb"
    said = minidist("grade", notebook, "--json", "--seed", "3")
    results = json.loads(said.out)
    assert said.code == code, said
    assert all(result["points"] == (result["max"] if code == 0 else 0) and result["seed"] == 3 for result in results)
    if code:  # nothing runs, so it is quick to ask again
        assert "total: 0 of" in minidist("grade", notebook).out


@pytest.fixture
def learner(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_COURSE", str(tmp_path))
    course_lab.copy_course(tmp_path)
    return tmp_path


def test_restore_works_on_the_given_copy_and_refuses_an_unknown_task(minidist, learner, tmp_path):
    assert "nothing to do" in minidist("restore", "00.1").out
    said = minidist("restore", "00.9")
    assert said.code == 2 and "did you mean '00.1'" in said.err and said.out == ""
    assert minidist("restore", "00.1", "--dir", tmp_path / "none").code == 2


def test_progress_in_words_json_and_html_tells_damage_and_exits_0(minidist, learner, monkeypatch):
    for event in (
        {"status": "failed", "points": 6},
        {"status": "passed", "points": 10},
        {"status": "not started", "points": 0},
    ):
        course_progress.record("check", "00.1", max=10, **event)
    course_progress.record("hint", "00.1", number=1)
    course_progress.record("seen", "00.1")
    with (learner / "progress.jsonl").open("a") as file:
        file.write('torn {\n{"time": 1, "event": "check", "key": ["00.1"]}\n')
    said = minidist("progress")
    assert said.code == 0 and "1 of 21 lessons done, 10 of" in said.out and "2 damaged lines" in said.out
    assert "2 checked, 1 hint, solution seen" in said.out
    found = json.loads(minidist("progress", "--json", "--dir", learner).out)
    assert (found["damaged_lines"], found["points"], found["lessons"][0]["state"]) == (2, 10, "done")
    assert found["lessons"][0]["tasks"][0] == {
        **{"title": "Everybody's number, on rank 0", "task": "00.1", "task_version": 1, "status": "done", "points": 10},
        **{"max": 10, "tries": 2, "hints": 1, "solution_seen": True},
    }
    assert found["lessons"][20]["state"] == "open"
    page = learner / "p.html"
    assert minidist("progress", "--html", page).code == 0
    text = page.read_text()
    assert '<th scope="col">Points</th>' in text and "Everybody&#x27;s number, on rank 0" in text and "10 of 10" in text
    assert minidist("progress", "--dir", learner / "none").code == 2
    assert minidist("progress", "--html", learner / "none" / "p.html").code == 2


def test_progress_finds_the_copy_around_it_and_else_the_usual_one(minidist, tmp_path, monkeypatch):
    monkeypatch.delenv("MINIDIST_COURSE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path / "cache"))
    for place in ("home/minidist-course", "around"):
        course_lab.copy_course(tmp_path / place)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert minidist("progress").out.startswith(str(tmp_path / "home/minidist-course"))
    monkeypatch.chdir(tmp_path / "around/lessons")
    assert minidist("progress").out.startswith(str(tmp_path / "around:"))
