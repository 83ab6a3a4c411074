"""Lesson 7: its widget over all its controls, the figures it quotes, and what each kind of DDP earns over the five tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from minidist.core.tape import Line, Tape
from minidist.course import grading, tasks, widgets_07
from minidist.course.nursery import Nursery
from minidist.course.session import Cell
from minidist.plan.time import bucket_timeline

ROOT = Path(__file__).parents[2]
KEYS = [f"07.{number}" for number in range(1, 6)]
GRADIENTS = [(0.01 * (i // 2 + 1), 256 if i % 2 == 0 else 16_384) for i in range(16)]
LIMITS = {"bucket_kB": (0.0, 34.0, 140.0), "latency_ms": (0.0, 4.0, 40.0), "MB_per_s": (0.5, 4.0, 50.0)}


def test_the_widget_draws_at_every_end_of_its_controls_and_says_what_it_draws():
    draw = widgets_07.overlap(GRADIENTS, 0.08, 2)
    middle = {name: limits[1] for name, limits in LIMITS.items()}
    for name, limits in LIMITS.items():
        for value in limits:
            figure, words = draw(middle | {name: value})
            assert words == figure.alt and all(how in words for how in ("naive", "bucketed", "overlapped"))
            bars = len(figure.axes[0].patches)
            plans = widgets_07.plans(GRADIENTS, 0.08, 2, middle | {name: value})
            assert bars == 3 + sum(len(plan.buckets) for plan in plans.values())


def test_the_widgets_model_has_the_best_size_where_the_lesson_says():
    def end(**values):
        return widgets_07.plans(GRADIENTS, 0.08, 2, {"latency_ms": 0.0, "MB_per_s": 50.0} | values)["overlapped"].end_s

    assert end(bucket_kB=0.0) < end(bucket_kB=140.0), "without latency small ones win"
    slow = {"latency_ms": 40.0, "MB_per_s": 50.0}
    assert end(bucket_kB=140.0, **slow) < end(bucket_kB=34.0, **slow) < end(bucket_kB=0.0, **slow)


def test_a_run_is_moved_to_the_beginning_of_its_backward():
    tape = Tape(3)
    head = Line("barrier", "world", (0, 1), 0, 0, "float32", (0,), "control", 1, 9.0, 9.5)
    tape.lines = [head, Line("all_reduce", "world", (0, 1), 8, 8, "float32", (2,), "grad", 2, 10.5, 11.0)]
    moved = widgets_07.since(tape, 1, 10.0, 10.75)
    assert [(line.op, line.launch, line.finish) for line in moved] == [("backward", 0.0, 0.75), ("all_reduce", 0.5, 1.0)]
    assert tape[1].launch == 10.5, "the run's own tape stays"
    assert "1 begun within backward; over at 1000" in widgets_07.figure({"run": moved}, "A run").alt


def test_the_faded_example_comes_out_as_its_comment_says():
    sizes = [40, 8, 40, 8, 120, 8]
    plan = bucket_timeline([(float(ms), size) for ms, size in enumerate(sizes, 1)], 100, lambda kB: 1 + kB / 100)
    assert (round(plan.end_s, 2), round(plan.exposed_s, 2)) == (9.24, 3.24)
    assert "# 9.24 and 3.24 if you did it right" in (ROOT / "lessons/src/07_data_parallel.py").read_text()


@pytest.mark.parametrize(
    ("answer", "points"),
    [
        ("2/honest_buckets_alone", [5, 10, 0, 10, 10]),  # right numbers without hooks: loses what is about overlap
        ("1/honest_hooks_alone", [10, 4, 10, 0, 0]),  # hooks alone: no buckets, no no_sync, no odd case
        ("1/wrong_zeros", [0, 0, 0, 0, 0]),  # replicas that agree on zero
        ("1/wrong_divided", [0, 0, 0, 0, 0]),
    ],
)
def test_the_five_tasks_score_alone_and_final_numbers_are_not_enough(answer, points):
    source = (ROOT / "tests/banks/07" / f"{answer}.py").read_text()
    with Nursery() as nursery:
        found = [grading.grade(tasks.find(key), [Cell("answer-07", source)], limit_s=4.0, nursery=nursery) for key in KEYS]
    assert [result.points for result in found] == points, [result.lines() for result in found]
