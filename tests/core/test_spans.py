"""Work on the tape: kinds told apart, busy and idle time by hand, steps cut out, and the bars of the timeline."""

from itertools import pairwise

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from minidist.core import bars, spans
from minidist.core import timeline as timelines
from minidist.core.tape import Line, Span, Tape
from minidist.core.timeline import read_out, timeline


def tape(rank, *work, lines=()):
    """A tape from ("F0", start, finish), ..."""
    made = Tape(rank)
    made.spans, made.lines = [Span(*one) for one in work], list(lines)
    return made


def line(op, launch, finish, tag="act"):
    return Line(op, "pp", (0, 1), 8, 8, "float32", (2,), tag, 1, launch, finish)


def two_ranks(at=0.0):
    """GPipe on two ranks with two micro-batches, one second a forward and two a backward: 9 seconds, 6 of them work."""
    first = [("F0", 0, 1), ("F1", 1, 2), ("B0", 5, 7), ("B1", 7, 9)]
    second = [("F0", 1, 2), ("F1", 2, 3), ("B0", 3, 5), ("B1", 5, 7)]
    return [tape(r, *((n, at + a, at + b) for n, a, b in row)) for r, row in enumerate([first, second])]


def both_steps():
    """The same twice, framed as steps 4 and 5, of which each begins half a second before its first action."""
    early, late = two_ranks(100.0), two_ranks(120.0)
    for one, two in zip(early, late, strict=True):
        one.spans += [*two.spans, spans.frame(4, 99.5, 110.0), spans.frame(5, 119.5, 130.0)]
    return early


def drawn(figure, colour):
    """(row, left, length) of the bars of a colour."""
    found = []
    for collection in figure.axes[0].collections:
        face = collection.get_facecolor()  # empty for frames around patterns
        if isinstance(collection, PolyCollection) and len(face) and tuple(face[0][:3]) == pytest.approx(to_rgb(colour)):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((round(box.y0 + box.height / 2), box.x0, box.width))
    return sorted(found)


def numbers(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_names_are_taken_apart():
    assert spans.part("F3") == ("F", 3, 0) and spans.part("W12.1") == ("W", 12, 1)
    assert spans.part("optimizer") == spans.part("F3x") == spans.part("step 3") == ("", None, 0)


def test_kinds_differ_from_each_other_and_from_operations_with_colours_and_without():
    kinds = [(colour, hatch) for _, colour, hatch in [*spans.LOOKS.values(), spans.OTHER]]
    assert len({colour for colour, _ in kinds}) == len({hatch for _, hatch in kinds}) == len(kinds)
    assert not set(kinds) & {*timelines.LOOKS.values(), timelines.OTHER}
    everyday = {timelines.LOOKS[op][0] for op in ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")}
    assert not everyday & {colour for colour, _ in kinds}
    assert bars.IDLE not in {colour for colour, _ in kinds}


def test_chunks_are_shades_of_their_kind_the_later_the_paler():
    for kind in spans.LOOKS:
        light = [sum(bars.shade(kind, chunk, 4)) for chunk in range(4)]
        assert light == sorted(light) and min(b - a for a, b in pairwise(light)) > 0.2
    assert bars.shade("F", 0, 1) == bars.shade("F", 0, 2) == to_rgb(spans.LOOKS["F"][1])


def test_busy_idle_and_both_bubbles_by_hand():
    found = spans.shares(two_ranks(at=50.0))
    assert found == spans.Shares(total=9.0, ideal=6.0, busy=(6.0, 6.0))
    assert found.bubble_of_ideal == 1 / 2 and found.bubble_of_total == 1 / 3  # (p-1)/m and (p-1)/(m+p-1), p = m = 2
    uneven = [tape(0, ("F0", 0, 4)), tape(1, ("F0", 4, 6))]
    found = spans.shares(uneven)  # mean idle time 3 of 6; the busiest rank works 4
    assert (found.bubble_of_ideal, found.bubble_of_total) == (3 / 4, 3 / 6)
    assert spans.shares([tape(0, lines=[line("send", 0, 1)])]) is None


def test_the_time_between_the_pipelines_of_two_steps_is_no_bubble():
    found = spans.shares(both_steps())
    assert found.total == 18.0 and found.busy == (12.0, 12.0) and found.bubble_of_ideal == 1 / 2


def test_overlapping_work_counts_once():
    assert spans.covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4.0
    assert spans.covered([]) == 0.0


def test_a_step_or_a_time_is_cut_out():
    tapes = both_steps()
    one = spans.cut(tapes, step=5)
    assert [span.start for span in spans.work(one[0])] == [120, 121, 125, 127] and list(spans.steps(one[1])) == [5]
    some = spans.cut(tapes, since=0.5, until=2.5)  # the first moment is the begin of step 4, at 99.5
    assert [span.name for span in some[0].spans] == ["F0", "F1"] and [span.name for span in some[1].spans] == ["F0"]
    with pytest.raises(ValueError, match=r"step 7 is not on the tape of rank 0: it has 4, 5"):
        timeline(tapes, step=7)
    with pytest.raises(ValueError, match="no steps, use since= and until="):
        timeline(two_ranks(), step=1)
    with pytest.raises(ValueError, match="nothing began"):
        timeline(tapes, since=50.0)


def test_the_bars_of_work_lie_where_the_spans_say_on_a_strip_of_idle_time():
    figure = timeline(two_ranks(at=7.0), unit="units")
    assert drawn(figure, spans.LOOKS["F"][1]) == [(0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 2, 1)]
    assert drawn(figure, spans.LOOKS["B"][1]) == [(0, 5, 2), (0, 7, 2), (1, 3, 2), (1, 5, 2)]
    assert drawn(figure, bars.IDLE) == [(0, 0, 9), (1, 0, 9)]
    assert sorted(numbers(figure)) == ["0"] * 4 + ["1"] * 4
    assert figure.axes[0].get_xlabel() == "units since the first start"
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["F forward", "B backward", "idle"]


def test_numbers_stand_only_where_they_fit():
    wide = tape(0, *((f"F{i}", i, i + 1) for i in range(100, 110)))
    assert numbers(timeline([wide])) == [str(i) for i in range(100, 110)]
    narrow = tape(0, *((f"F{i}", i, i + 1) for i in range(100, 400)), ("B0", 400, 500))
    assert numbers(timeline([narrow])) == ["0"]


def test_work_and_operations_share_a_row_and_do_not_overlap():
    tapes = two_ranks()
    tapes[0].lines = [line("send", 1, 1.5), line("recv", 1.2, 5)]
    figure = timeline(tapes)
    work = min(path.get_extents().y0 for c in figure.axes[0].collections for path in c.get_paths())
    low = max(
        path.get_extents().y1 for c in figure.axes[0].collections for path in c.get_paths() if path.get_extents().y1 < 0.5
    )
    first, second = figure.axes[0].patches
    assert work < low < first.get_y() < second.get_y() and second.get_y() + second.get_height() < 0.5
    assert figure.alt.split("\n") == [
        "Who talked when.",
        "rank 0: busy 6000 of 9000 ms (66.7 %) in 4 actions, idle 3000 ms (33.3 %); send from 1000.0 to 1500.0 ms, "
        "recv from 1200.0 to 5000.0 ms",
        "rank 1: busy 6000 of 9000 ms (66.7 %) in 4 actions, idle 3000 ms (33.3 %)",
        "bubble: 50.0 % of the ideal time, which is 33.3 % of the total time",
    ]


def test_the_words_have_the_peak_where_it_is_given_and_the_unit():
    words = read_out(two_ranks(), unit="units", peaks=[2, 1]).split("\n")
    assert words[0] == "rank 0: busy 6 of 9 units (66.7 %) in 4 actions, idle 3 units (33.3 %), at most 2 in flight"
    assert words[1].endswith("at most 1 in flight")


def test_steps_are_marked_and_other_work_has_its_name():
    tapes = both_steps()
    tapes[0].spans.append(Span("optimizer", 109.0, 110.0))
    figure = timeline(tapes)
    assert {" step 4", " step 5"} <= set(numbers(figure))
    assert drawn(figure, spans.OTHER[1]) == [(0, pytest.approx(9500), pytest.approx(1000))]
