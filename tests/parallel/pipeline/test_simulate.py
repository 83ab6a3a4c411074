"""The simulator: spans by hand, closed forms, both bubbles, the Zero Bubble paper's figures, its cost, what it refuses."""

import time
from fractions import Fraction

import pytest

from minidist.parallel.pipeline.actions import Action, Schedule, ScheduleError, loop
from minidist.parallel.pipeline.schedules import NAMES, make
from minidist.parallel.pipeline.simulate import Times, simulate
from minidist.parallel.pipeline.text import loads

CHUNKS = {"interleaved": 2, "bfs": 3, "zb-v": 2, "dualpipe-v": 2}
SHAPES = [(1, 1), (1, 5), (2, 2), (3, 7), (4, 4), (4, 12), (8, 20)]  # p, m with m >= p


def spans(timeline):
    """By rank: (name, start, finish)."""
    return [[(span.name, span.start, span.finish) for span in row] for row in timeline.spans]


def test_spans_of_a_schedule_by_hand():
    """Two ranks, F = 1, I = 2, W = 3, half a second between them; a rank goes on while its result travels."""
    schedule = loads("F0 F1 I0 W0 B1\nF0 B0 F1 B1")
    timeline = simulate(schedule, Times(1, 2, 3), link=0.5)
    assert spans(timeline) == [
        [("F0", 0, 1), ("F1", 1, 2), ("I0", 8, 10), ("W0", 10, 13), ("B1", 14, 19)],
        [("F0", 1.5, 2.5), ("B0", 2.5, 7.5), ("F1", 7.5, 8.5), ("B1", 8.5, 13.5)],
    ]
    assert (timeline.makespan, timeline.ideal, timeline.busy) == (19, 12, (12, 12))
    assert timeline.bubble_of_ideal == 7 / 12
    assert timeline.bubble_of_total == 7 / 19


def test_times_and_links_of_their_own():
    """A slow second stage, and a link that is slow in one direction."""
    schedule = loads("F0 B0\nF0 B0")
    times = Times(F=[1, 4], I=1, W=[0, 2], B=[5, 6])
    timeline = simulate(schedule, times, link=lambda source, target: 10 if source < target else 0)
    assert spans(timeline) == [[("F0", 0, 1), ("B0", 21, 26)], [("F0", 11, 15), ("B0", 15, 21)]]
    assert timeline.busy == (6, 10)
    assert timeline.ideal == 10
    assert timeline.idle == 26 - 8  # the mean over ranks of what they idle
    assert timeline.bubble_of_ideal == 18 / 10
    assert timeline.bubble_of_total == 18 / 26


def test_no_link_between_chunks_of_one_rank():
    timeline = simulate(loads("F0 F0.1 B0.1 B0"), link=100)
    assert timeline.makespan == 6


@pytest.mark.parametrize("p, m", SHAPES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name, p, m):
    times = Times(Fraction(2), Fraction(3), Fraction(7, 3))
    timeline = simulate(make(name, p, m), times)
    assert timeline.bubble_of_ideal == Fraction(p - 1, m)
    assert timeline.bubble_of_total == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize("p, m", SHAPES)
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "bfs"])
def test_bubble_of_several_chunks(name, v, p, m):
    """(p-1)/(v m); ours has it for every m >= p, where the paper asks for a multiple of p."""
    timeline = simulate(make(name, p, m, v), Times(Fraction(2), Fraction(3), Fraction(7, 3)))
    assert timeline.bubble_of_ideal == Fraction(p - 1, v * m)
    assert timeline.bubble_of_total == Fraction(p - 1, v * m + p - 1)


@pytest.mark.parametrize("p, m", SHAPES)
@pytest.mark.parametrize("times", [(1, 1, 1), (5, 4, 3), (7, 9, 2), (4, 4, 4)])
def test_bubble_of_zb_h1(times, p, m):
    """(p-1)(F + I - W), where W is the least of the three; Qi et al. 2023, table 2."""
    f, i, w = times
    assert simulate(make("zb-h1", p, m), Times(*times)).makespan == m * (f + i + w) + (p - 1) * (f + i - w)


@pytest.mark.parametrize("p", range(1, 8))
def test_few_micro_batches(p):
    """Qi et al. 2023, appendix H: with m <= p, 1F1B takes (m+p-1)(F+I+W) and a split backward (m+p-1)(F+I) + W."""
    for m in range(1, p + 1):
        assert simulate(make("1f1b", p, m)).makespan == 3 * (m + p - 1)
        assert simulate(make("zb-h1", p, m)).makespan == 2 * (m + p - 1) + 1


@pytest.mark.parametrize("p", range(1, 9))
def test_zb_v_idles_nowhere(p):
    """With F = I = W no rank waits once it has begun, and each begins a forward of a chunk later: (p-1)/(p-1+6m) (Primus)."""
    for m in (2 * p - 1, 2 * p, 3 * p):
        timeline = simulate(make("zb-v", p, m, 2))
        assert all(row[-1].finish - row[0].start == 6 * m for row in timeline.spans)
        assert timeline.bubble_of_total == (p - 1) / (p - 1 + 6 * m)


@pytest.mark.parametrize("p", range(1, 9))
def test_dualpipe_v_idles_p_minus_one(p):
    """Side by side it is to be (p/2-1)(F&B + B - 3W) over p ranks of half the chunks; one after the other, in units: p-1."""
    for m in (2 * p, 3 * p):
        assert simulate(make("dualpipe-v", p, m, 2)).makespan == 6 * m + p - 1


# Zero Bubble Pipeline Parallelism (Qi et al. 2023, arXiv 2401.10241): bubble rates of table 5 from the times of table 9.
PAPER = [  # p, m, chunks under 1F1B-I, (T_F, T_B, T_W, T_comm) in ms, rates of 1F1B, 1F1B-I and ZB-H1
    (8, 24, 3, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585)),
    (8, 64, 3, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674)),
    (8, 32, 4, (29.802, 29.428, 19.53, 0.577), (0.1898, 0.0628, 0.1045)),
    (16, 48, 3, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397)),
    (16, 128, 3, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576)),
    (32, 128, 2, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1164, 0.1106)),
]


@pytest.mark.parametrize("p, m, v, times, rates", PAPER)
def test_bubble_rates_of_the_zero_bubble_paper(p, m, v, times, rates):
    """Share of total time. 1F1B and ZB-H1 to the last digit printed; 1F1B-I (a layer a chunk) to 0.4 points."""
    *work, link = times
    for name, chunks, rate, error in (
        ("1f1b", 1, rates[0], 1e-4),
        ("interleaved", v, rates[1], 4e-3),
        ("zb-h1", 1, rates[2], 1e-4),
    ):
        timeline = simulate(make(name, p, m, chunks), Times(*(seconds / chunks for seconds in work)), link)
        assert timeline.bubble_of_total == pytest.approx(rate, abs=error), name


def alive(timeline):
    """By rank: most activations alive, counted from the spans alone: from F's start to the end of B, or W."""
    peaks = []
    for row in timeline.spans:
        spans = {span.name: span for span in row}
        lives = []
        for name, span in spans.items():
            if name[0] == "F":
                ends = [spans[kind + name[1:]].finish for kind in "BW" if kind + name[1:] in spans]
                lives.append((span.start, *ends))
        peaks.append(max(sum(a <= start < b for a, b in lives) for start, _ in lives))
    return tuple(peaks)


@pytest.mark.parametrize("p, m", [*SHAPES, (4, 1), (5, 3), (8, 7)])
@pytest.mark.parametrize("name", NAMES)
def test_peak_is_what_the_spans_say(name, p, m):
    timeline = simulate(make(name, p, m, CHUNKS.get(name, 1)), Times(2, 3, 1), link=0.25)
    assert timeline.in_flight_peak == alive(timeline)


def test_peaks_of_the_papers():
    p, m = 4, 12
    assert simulate(make("gpipe", p, m)).in_flight_peak == (12, 12, 12, 12)
    assert simulate(make("1f1b", p, m)).in_flight_peak == (4, 3, 2, 1)
    assert simulate(make("zb-h1", p, m)).in_flight_peak == (4, 4, 4, 4)
    assert simulate(make("interleaved", p, m, 2)).in_flight_peak == (11, 9, 7, 5)  # first rank: v p + p - 1 (Korthikanti 2022)
    assert simulate(make("bfs", p, m, 2)).in_flight_peak == (24, 24, 24, 24)
    assert simulate(make("zb-v", p, m, 2)).in_flight_peak == (8, 8, 8, 8)
    assert simulate(make("dualpipe-v", p, m, 2)).in_flight_peak == (9, 9, 9, 9)


def test_peak_in_bytes():
    """Of the rank's own stages: both chunks of one micro-batch at a time, 100 and 1."""
    schedule = loads("stages: 0 1\nF0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1")
    assert simulate(schedule, stage_bytes=[100, 1]).peak_bytes == (101,)
    assert simulate(make("1f1b", 2, 4), stage_bytes=[10, 7]).peak_bytes == (20, 7)
    assert simulate(make("1f1b", 2, 4)).peak_bytes is None
    with pytest.raises(ValueError, match="3 entries for 2 stages"):
        simulate(make("1f1b", 2, 4), stage_bytes=[1, 2, 3])


def test_a_thousand_micro_batches_on_four_ranks():
    """Processor time, well below a second; 15 ms on an idle core."""
    schedule = make("1f1b", 4, 1000)
    before = time.process_time()
    timeline = simulate(schedule)
    assert time.process_time() - before < 0.5
    assert timeline.makespan == 3 * 1003


def test_a_stuck_schedule_names_what_every_rank_waits_for():
    with pytest.raises(ScheduleError) as error:
        simulate(loads("F0 B0 F1 B1\nF0 F1 B0 B1"))
    assert "B0 (number 2 of rank 0's list) waits for B0 or I0 of rank 1" in str(error.value)
    assert "F1 (number 2 of rank 1's list) waits for F1 of rank 0" in str(error.value)


@pytest.mark.parametrize(
    "lists, stages, words",
    [
        ([[Action("X", 0)]], loop(1), "X0 (number 1 of rank 0's list): no action is called 'X'"),
        ([[Action("F", 0), Action("F", 0, 1)]], loop(1), "F0.1 (number 2 of rank 0's list): rank 0 has no chunk 1"),
        ([[Action("F", -1)]], loop(1), "numbered from 0"),
        ([[Action("F", 0)]], ((1,),), "stage 0 is held by no rank"),
        ([[Action("F", 0)], [Action("F", 0)]], ((0,), (0,)), "stage 0 is held by ranks 0, 1"),
        ([[Action("F", 0)]], loop(2), "1 lists for the stages of 2 ranks"),
        ([], (), "give a list a rank"),
    ],
)
def test_what_makes_no_sense_is_refused(lists, stages, words):
    with pytest.raises(ScheduleError) as error:
        simulate(Schedule("bad", tuple(map(tuple, lists)), stages))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "times, words", [(Times([1, 2, 3]), "times.F has 3 entries for 2 stages"), (Times(W=-1), "times.W = -1")]
)
def test_times_that_make_no_sense_are_refused(times, words):
    with pytest.raises(ValueError, match=words):
        simulate(make("1f1b", 2, 2), times)
