"""The course map is walkable, and widgets can be used, read and trusted without looking at them."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from minidist.core.tape import Line, Tape
from minidist.course import map as course
from minidist.course import progress, session, widgets
from minidist.course.map import LESSONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def learner(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDIST_COURSE", str(tmp_path))
    monkeypatch.setattr(session, "current", session.Session())


def test_no_essential_lesson_stands_on_one_that_is_not():
    assert [lesson.number for lesson in LESSONS] == list(range(21))
    assert {lesson.number for lesson in LESSONS if lesson.essential} == {0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 14, 16, 17, 19, 20}
    for lesson in LESSONS:
        assert all(need < lesson.number for need in lesson.needs)
        assert not lesson.essential or all(LESSONS[need].essential for need in lesson.needs)


def test_arrows_leave_out_only_what_other_arrows_imply():
    assert [lesson.number for lesson in course.direct(LESSONS[20])] == [16, 17, 19]
    for lesson in LESSONS:
        drawn = course.direct(lesson)
        assert set(lesson.needs) <= {d.number for d in drawn}.union(*(course.implied(d) for d in drawn))
    assert len({lesson.place for lesson in LESSONS}) == len(LESSONS)


def test_no_arrow_runs_behind_a_box_and_seems_to_come_from_there():
    for head in LESSONS:
        for tail in course.direct(head):
            for (x0, y0), (x1, y1) in pairwise(course.path(tail, head)):
                line = [(x0 + (x1 - x0) * t / 50, y0 + (y1 - y0) * t / 50) for t in range(51)]
                for other in set(LESSONS) - {tail, head}:
                    x, y = other.place
                    assert not any(abs(u - x) < 0.43 and abs(v - y) < 0.3 for u, v in line), (tail, head, other)


def test_lessons_that_are_here_are_told_from_those_that_are_not(monkeypatch, tmp_path):
    written = {int(path.name[:2]) for path in (ROOT / "lessons").glob("[0-9]*.ipynb")}
    assert course.here() == written >= {0, 1, 5, 7}
    figure = course.course_map()
    assert f"lessons in this version: {', '.join(map(str, sorted(written)))}." in figure.alt
    frames = [patch for patch in figure.axes[0].patches if patch.get_label() != "arrow" and hasattr(patch, "get_boxstyle")]
    solid = {number for number, frame in enumerate(frames) if frame.get_linestyle() == "-"}
    assert len(frames) == len(LESSONS) and solid == written
    monkeypatch.setattr(course.notebook, "shipped", lambda kind: tmp_path)
    assert course.here() == set() and "lessons in this version: none." in course.course_map().alt


def test_the_map_shows_the_learners_own_progress_in_words_too(capsys):
    progress.record("check", "00.1", points=10, max=10)
    progress.record("predict", "05.x")
    with (progress.folder() / progress.NAME).open("a") as file:
        file.write("torn\n")
    figure = course.course_map()
    lines = figure.alt.split("\n")
    assert lines[0].startswith("Course map: 1 of 21 lessons done")
    assert lines[2].startswith("●  0*") and lines[7].startswith("◐  5*") and lines[3].startswith("○  1*")
    assert len(lines) == 23 and "1 damaged line" in capsys.readouterr().out
    assert {text.get_text().split(".")[0] for text in figure.axes[0].texts} >= {str(n) for n in range(21)}


def tapes(waits):
    made = []
    for rank, (launch, finish) in enumerate(waits):
        tape = Tape(rank)
        tape.lines = [Line("barrier", "world", (0, 1), 0, 0, "float32", (0,), "control", 1, launch, finish)]
        made.append(tape)
    return made


def test_the_rank_strip_says_who_waits_in_what_and_since_when():
    strip = tapes([(5.0, 5.3), (5.2, 5.3), (5.1, None)])
    assert widgets.rank_strip(strip, 150)[1].split("\n") == [
        "At 150 ms after the first launch:",
        "rank 0: waiting, last collective barrier #1 of world, waiting for 150 ms",
        "rank 1: running, last collective none yet, waiting not at all",
        "rank 2: waiting, last collective barrier #1 of world, waiting for 50 ms",
    ]
    late = widgets.rank_strip(strip, 400)[1]
    assert "rank 0: done" in late and "rank 2: waiting, last collective barrier #1 of world, waiting for 300 ms" in late
    with pytest.raises(ValueError, match="run a collective first"):
        widgets.rank_strip([Tape(0)], 0)


@pytest.fixture
def shown(monkeypatch):
    pytest.importorskip("ipywidgets")
    import IPython.display

    found = []
    monkeypatch.setattr(IPython.display, "display", lambda *things: found.extend(things))
    return found


def draw(values):
    from minidist.core.timeline import AltFigure

    if values["a_b"] == 3:
        raise OSError("no three")
    return AltFigure(figsize=(1, 1)), f"a b is {values['a_b']}"


def test_a_widget_stands_without_a_click_and_follows_slider_and_number_box(shown):
    widgets.widget(draw, a_b=(0, 5, 1, 2))
    still, _, live = shown
    assert 'alt="a b is 2"' in still.data and still.data.count("a b is 2") == 2
    controls, picture = live.children
    slider, box = controls.children
    assert [w.description for w in (slider, box)] == ["a b", "a b (type)"]
    assert picture.value == "" and not slider.continuous_update
    for value in (0, 1, 2, 4, 5):  # the sweep
        slider.value = value
        if value != 2:
            assert box.value == value and f'alt="a b is {value}"' in picture.value
    box.value = 1
    assert slider.value == 1 and "a b is 1" in picture.value
    assert session.current.errors == []


def test_without_ipywidgets_the_figure_and_its_words_are_still_there(shown, monkeypatch):  # case C56
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    widgets.widget(draw, a_b=(0, 5, 1, 2))
    assert len(shown) == 1 and shown[0].data.count("a b is 2") == 2


def test_an_error_while_drawing_is_shown_in_place_and_recorded(shown):
    widgets.widget(draw, a_b=(0, 5, 1, 2))
    controls, picture = shown[2].children
    controls.children[0].value = 3
    assert "OSError: no three" in picture.value
    assert session.current.errors == ["a widget's drawing at {'a_b': 3} ended with OSError: no three"]
    controls.children[0].value = 4
    assert re.search('alt="a b is 4"', picture.value)
