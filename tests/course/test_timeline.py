"""The timeline figure: bars where the tape says, words that say the same, and no global state."""

import sys

import pytest

from minidist.core.tape import Line, Tape
from minidist.core.timeline import LINES_IN_WORDS, LOOKS, read_out, timeline


def line(op, launch, finish, tag="act", rank=0):
    return Line(op, "world", (0, 1), 8, 8, "float32", (2,), tag, 1, launch, finish)


def tapes(*rows):
    made = []
    for rank, lines in enumerate(rows):
        tape = Tape(rank)
        tape.lines = list(lines)
        made.append(tape)
    return made


def bars(figure):
    return [(p.get_x(), p.get_width(), round(p.get_y() + p.get_height() / 2)) for p in figure.axes[0].patches]


def test_bars_start_and_end_where_the_tape_says_in_milliseconds_since_the_first_launch():
    figure = timeline(tapes([line("all_reduce", 10.0, 10.5)], [line("all_reduce", 10.2, 10.5)]))
    assert bars(figure) == [(pytest.approx(0), pytest.approx(500), 0), (pytest.approx(200), pytest.approx(300), 1)]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    assert figure.axes[0].get_xlabel() == "ms since the first launch"


def test_operations_under_way_at_once_lie_in_lanes_of_their_own_and_rows_can_have_names():
    run = [line("all_reduce", 0, 2), line("all_reduce", 1, 3), line("all_reduce", 2, 4)]
    figure = timeline(tapes(run, [line("send", 0, 1)]), labels=["overlapped", "not"])
    spans = [(p.get_x(), round(p.get_y(), 2), round(p.get_height(), 2)) for p in figure.axes[0].patches]
    assert spans == [(0, -0.31, 0.31), (1000, 0.0, 0.31), (2000, -0.31, 0.31), (0, 0.69, 0.62)]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["overlapped", "not"]
    assert figure.alt.split("\n")[1].startswith("overlapped: all_reduce from 0.0")


def test_the_words_say_what_the_bars_show():
    figure = timeline(tapes([line("all_reduce", 10.0, 10.5)], [line("send", 10.2, None)]), title="Two ranks")
    assert figure.alt.split("\n") == [
        "Two ranks.",
        "rank 0: all_reduce from 0.0 to 500.0 ms",
        "rank 1: send from 200.0 ms, never finished",
    ]
    shown = figure._repr_html_()
    assert 'alt="Two ranks.' in shown and shown.count("never finished") == 2  # alternative text and visible text


def test_an_operation_that_never_finished_runs_to_the_right_edge():
    figure = timeline(tapes([line("recv", 1.0, None)], [line("barrier", 1.0, 2.0)]))
    (_, open_length, _), (_, closed, _) = bars(figure)
    assert open_length > closed and open_length == pytest.approx(figure.axes[0].get_xlim()[1])


def test_teaching_checks_are_not_traffic_and_empty_tapes_are_refused_with_the_remedy():
    assert read_out(tapes([line("all_reduce", 0, 1, tag="check")])) == "no rank has sent anything"
    with pytest.raises(ValueError, match="run a collective first"):
        timeline(tapes([line("all_reduce", 0, 1, tag="check")], []))


def test_long_tapes_are_summed_up_in_words():
    many = [line("all_gather", i, i + 0.5) for i in range(LINES_IN_WORDS + 1)]
    expected = f"rank 0: {len(many)} x all_gather, {500 * len(many)}.0 ms in all\nrank 1: nothing"
    assert read_out(tapes(many, [])) == expected


def test_each_operation_differs_from_the_others_without_colour():
    hatches = [hatch for _, hatch in LOOKS.values()]
    assert len(set(hatches)) == len(hatches)


def test_drawing_leaves_pyplot_alone():
    before = "matplotlib.pyplot" in sys.modules
    timeline(tapes([line("all_reduce", 0, 1)]))
    assert ("matplotlib.pyplot" in sys.modules) == before
