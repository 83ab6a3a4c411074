"""The learner's copy: complete, without solutions, and nothing of theirs ever overwritten."""

import json
import os

import pytest

from minidist.course import lab


def add_output(path):
    content = json.loads(path.read_text())
    next(cell for cell in content["cells"] if cell["cell_type"] == "code")["outputs"] = [{"output_type": "stream"}]
    path.write_text(json.dumps(content))


def edit(path, text):
    content = json.loads(path.read_text())
    next(cell for cell in content["cells"] if cell["cell_type"] == "code")["source"] = [text]
    path.write_text(json.dumps(content))


@pytest.fixture
def course(tmp_path):
    assert lab.copy_course(tmp_path / "course") == []
    return tmp_path / "course"


def test_a_fresh_copy_has_lessons_exercises_a_journal_and_no_solutions(course):
    names = sorted(path.relative_to(course).as_posix() for path in course.rglob("*") if path.is_file())
    assert lab.FIRST in names and "exercises/00_ranks.ipynb" in names and "progress.jsonl" in names
    assert not [name for name in names if "solution" in name or name.endswith(".py")]


def test_a_second_start_changes_nothing_not_even_a_run_notebook(course):
    add_output(course / lab.FIRST)
    before = {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}
    assert lab.copy_course(course) == []
    assert {path: path.read_bytes() for path in course.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", [lambda path: edit(path, "mine = 1"), lambda path: path.write_text("half a noteb")])
def test_an_edited_or_damaged_notebook_is_kept_and_ours_lands_beside_it_once(course, damage):
    exercise = course / "exercises/00_ranks.ipynb"
    damage(exercise)
    kept = exercise.read_bytes()
    for _ in range(2):
        said = lab.copy_course(course)
        assert said == ["exercises/00_ranks.ipynb: yours differs from ours and is kept; ours is 00_ranks.new.ipynb"]
    assert exercise.read_bytes() == kept
    assert sorted(path.name for path in exercise.parent.glob("*.ipynb")) == ["00_ranks.ipynb", "00_ranks.new.ipynb"]


def test_work_in_the_new_file_is_not_overwritten_either(course):
    edit(course / "exercises/00_ranks.ipynb", "mine = 1")
    lab.copy_course(course)
    beside = course / "exercises/00_ranks.new.ipynb"
    edit(beside, "also_mine = 1")
    kept = beside.read_bytes()
    lab.copy_course(course)
    assert beside.read_bytes() == kept and (course / "exercises/00_ranks.new2.ipynb").exists()


def test_a_deleted_notebook_comes_back(course):
    (course / lab.FIRST).unlink()
    lab.copy_course(course)
    assert (course / lab.FIRST).exists()


def test_jupyter_listens_on_loopback_and_opens_lesson_0(tmp_path, monkeypatch):
    line = lab.command(tmp_path, browser=False, port=8899)
    assert "--ip=127.0.0.1" in line and "--port=8899" in line and "--no-browser" in line
    assert f"--LabApp.default_url=/lab/tree/{lab.FIRST}" in line and f"--ServerApp.root_dir={tmp_path}" in line
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    assert "--allow-root" in lab.command(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    assert "--allow-root" not in lab.command(tmp_path)


def test_a_folder_that_is_a_file_and_a_port_that_is_none_are_refused_in_one_line(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match=r"--dir .*x: there is a file of that name: give a folder"):
        lab.lab(tmp_path / "x", browser=False)
    with pytest.raises(ValueError, match="--port 99999: give a number from 1 to 65535"):
        lab.lab(tmp_path / "y", browser=False, port=99999)
