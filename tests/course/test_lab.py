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


def test_an_edited_notebook_is_left_alone_while_ours_is_the_same(course):
    exercise = course / "exercises/00_ranks.ipynb"
    edit(exercise, "mine = 1")
    kept = exercise.read_bytes()
    assert lab.copy_course(course) == []
    assert exercise.read_bytes() == kept and len(list(exercise.parent.glob("00*.ipynb"))) == 1


def no_ids(path):
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        del cell["id"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("damage", [no_ids, lambda path: path.write_text("half a noteb")])
def test_a_damaged_notebook_is_kept_and_ours_lands_beside_it_once(course, damage):
    exercise = course / "exercises/00_ranks.ipynb"
    damage(exercise)
    kept = exercise.read_bytes()
    said = lab.copy_course(course)
    assert said == ["exercises/00_ranks.ipynb: yours cannot be compared cell by cell and is kept; ours is 00_ranks.new.ipynb"]
    assert lab.copy_course(course) == []
    assert exercise.read_bytes() == kept
    assert sorted(path.name for path in exercise.parent.glob("00*.ipynb")) == ["00_ranks.ipynb", "00_ranks.new.ipynb"]


def nb(*cells):
    made = [{"cell_type": "code", "id": i, "metadata": {}, "source": text, "outputs": []} for i, text in cells]
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def shown(path):
    return [(cell["id"], cell["source"]) for cell in json.loads(path.read_text())["cells"]]


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A course of ours, notebook by notebook: release("a 1", "b 2") ships cells a and b."""

    def ship(*cells):
        for kind in lab.KINDS:
            (tmp_path / "ours" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "ours/lessons/00_x.ipynb").write_text(json.dumps(nb(*(cell.split() for cell in cells))))
        return lab.copy_course(tmp_path / "learner")

    monkeypatch.setattr(lab.notebook, "shipped", lambda kind: tmp_path / "ours" / kind)
    return ship


@pytest.fixture
def theirs(tmp_path):
    return tmp_path / "learner/lessons/00_x.ipynb"


def change(path, **cells):
    """Edit cells by id, or drop them with None."""
    content = json.loads(path.read_text())
    content["cells"] = [c for c in content["cells"] if cells.get(c["id"], "") is not None]
    for cell in content["cells"]:
        cell["source"] = cells.get(cell["id"], cell["source"])
        if cell["cell_type"] == "code":
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": f"out of {cell['id']}"}]
    path.write_text(json.dumps(content))


def test_untouched_cells_are_refreshed_theirs_kept_and_new_ones_added_in_place(release, theirs):
    assert release("a 1", "b 1", "c 1", "d 1") == []
    change(theirs, b="mine", d=None)
    said = release("a 2", "b 1", "n 1", "c 1", "d 1")
    assert shown(theirs) == [("a", "2"), ("b", "mine"), ("n", "1"), ("c", "1")]
    assert said == ["lessons/00_x.ipynb: cells brought up to date: a, n"]
    outputs = {cell["id"]: cell["outputs"] for cell in json.loads(theirs.read_text())["cells"]}
    assert outputs["a"] == [] and outputs["b"][0]["text"] == "out of b" and outputs["c"][0]["text"] == "out of c"
    assert release("a 2", "b 1", "n 1", "c 1", "d 1") == [] and not theirs.with_suffix(".new.ipynb").exists()


def test_where_both_changed_theirs_stays_ours_lies_beside_and_it_is_said_once(release, theirs):
    release("a 1", "b 1", "c 1")
    change(theirs, b="mine")
    said = release("a 2", "b 2", "c 1")
    assert said == [
        "lessons/00_x.ipynb: cells brought up to date: a; you and we both changed b: yours is kept; ours is 00_x.new.ipynb"
    ]
    assert shown(theirs) == [("a", "2"), ("b", "mine"), ("c", "1")]
    assert shown(theirs.with_suffix(".new.ipynb")) == [("a", "2"), ("b", "2"), ("c", "1")]
    assert release("a 2", "b 2", "c 1") == []
    change(theirs.with_suffix(".new.ipynb"), a="worked here")  # what they did in ours is theirs too
    assert "ours is 00_x.new2.ipynb" in release("a 2", "b 3", "c 1")[0]
    assert shown(theirs.with_suffix(".new.ipynb"))[0] == ("a", "worked here")


def test_a_cell_that_both_changed_alike_is_no_conflict(release, theirs):
    release("a 1")
    change(theirs, a="2")
    assert release("a 2") == [] and shown(theirs) == [("a", "2")]


def test_a_cell_we_took_away_goes_if_untouched_and_stays_if_theirs(release, theirs):
    release("a 1", "b 1", "c 1")
    change(theirs, c="mine")
    assert release("a 1")[0].startswith("lessons/00_x.ipynb: cells brought up to date: b; you and we both changed c")
    assert shown(theirs) == [("a", "1"), ("c", "mine")]


def test_their_own_cells_stay_where_they_put_them_and_our_new_order_is_taken(release, theirs):
    release("a 1", "b 1", "c 1")
    content = json.loads(theirs.read_text())
    content["cells"][2:2] = nb(("x", "own"), ("y", "own"))["cells"]
    theirs.write_text(json.dumps(content))
    assert release("a 1", "c 1", "b 1", "z 1") == ["lessons/00_x.ipynb: cells brought up to date: z"]
    assert [name for name, _ in shown(theirs)] == ["a", "c", "b", "x", "y", "z"]


def test_an_order_of_theirs_is_kept(release, theirs):
    release("a 1", "b 1", "c 1")
    content = json.loads(theirs.read_text())
    content["cells"].reverse()
    theirs.write_text(json.dumps(content))
    release("a 2", "n 1", "b 1", "c 1")
    assert shown(theirs) == [("c", "1"), ("b", "1"), ("a", "2"), ("n", "1")]


def test_a_copy_of_unknown_age_is_touched_in_no_cell(release, theirs):
    release("a 1", "b 1")
    change(theirs, b="mine")
    (theirs.parents[1] / ".minidist/base.json").write_text("torn")
    assert release("a 2", "b 1") == ["lessons/00_x.ipynb: you and we both changed a, b: yours is kept; ours is 00_x.new.ipynb"]
    assert shown(theirs) == [("a", "1"), ("b", "mine")]


def test_a_notebook_saved_during_the_update_wins(release, theirs, monkeypatch):
    release("a 1", "b 1")
    before = lab.update.merge

    def slow(*args):
        change(theirs, b="just typed")
        return before(*args)

    monkeypatch.setattr(lab.update, "merge", slow)
    assert release("a 2", "b 1") == [f"lessons/00_x.ipynb: {lab.SAVED_MEANWHILE}"]
    assert shown(theirs) == [("a", "1"), ("b", "just typed")]


def test_restore_brings_a_missing_cell_back_to_its_place(course):
    path = course / "exercises/00_ranks.ipynb"
    before = [name for name, _ in shown(path)]
    change(path, **{"answer-00-1": None})
    assert "the cell answer-00-1 is back" in lab.restore("00.1", course)
    assert [name for name, _ in shown(path)] == before
    assert "nothing to do" in lab.restore("00.1", course)


def test_restore_keeps_an_edited_answer_above_the_fresh_one(course):
    path = course / "exercises/00_ranks.ipynb"
    for n, text in enumerate(["first try", "second try"]):
        change(path, **{"answer-00-1": text})
        said = lab.restore("00.1", course)
        assert "what you had stands above it" in said
        cells = json.loads(path.read_text())["cells"]
        at = next(i for i, cell in enumerate(cells) if cell["id"] == "answer-00-1")
        assert "NotImplementedError" in "".join(cells[at]["source"])
        assert (cells[at - 1]["source"], cells[at - 1]["cell_type"]) == (text, "raw")
        assert cells[at - 1]["id"] == f"answer-00-1-old{n or ''}"
    import nbformat

    nbformat.validate(nbformat.read(path, 4))


def test_restore_brings_a_whole_notebook_back_and_refuses_what_it_cannot_read(course, tmp_path):
    path = course / "exercises/00_ranks.ipynb"
    path.unlink()
    assert "whole notebook is back" in lab.restore("00.1", course) and path.exists()
    path.write_text("half a noteb")
    with pytest.raises(ValueError, match="not a notebook"):
        lab.restore("00.1", course)
    assert path.read_text() == "half a noteb"
    with pytest.raises(ValueError, match="there is no course: make it with minidist lab"):
        lab.restore("00.1", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"did you mean '00\.1'"):
        lab.restore("00.7", course)


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
