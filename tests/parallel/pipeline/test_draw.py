"""Schedules as pictures: from the list and from the simulator, with words that agree with the simulator's numbers."""

import pytest

from minidist.core import trace
from minidist.parallel.pipeline.actions import Action, Schedule, loop
from minidist.parallel.pipeline.draw import draw, tapes
from minidist.parallel.pipeline.simulate import Times, simulate

ORDERS = ["F0 F1 B0 B1", "F0 B0 F1 B1"]


def schedule():
    lists = tuple(tuple(Action.parse(word) for word in order.split()) for order in ORDERS)
    return Schedule("by hand", lists, loop(2))


def test_a_list_is_drawn_in_units():
    figure = draw(schedule())
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]
    assert figure.alt.split("\n") == [
        "Schedule by hand.",
        "rank 0: busy 6 of 9 units (66.7 %) in 4 actions, idle 3 units (33.3 %), at most 2 in flight",
        "rank 1: busy 6 of 9 units (66.7 %) in 4 actions, idle 3 units (33.3 %), at most 1 in flight",
        "bubble: 50.0 % of the ideal time, which is 33.3 % of the total time",
    ]


def test_the_simulators_times_are_drawn_and_its_bubble_said():
    found = simulate(schedule(), Times(F=[0.010, 0.020], I=0.015, W=0.005), link=0.002)
    figure = draw(found, title="Slow second stage", unit="ms")
    assert figure.axes[0].get_xlim()[1] == pytest.approx(found.makespan * 1e3)
    ideal, total = (f"{share * 100:.1f} %" for share in (found.bubble_of_ideal, found.bubble_of_total))
    assert figure.alt.endswith(f"bubble: {ideal} of the ideal time, which is {total} of the total time")
    assert figure.alt.startswith("Slow second stage.") and figure.axes[0].get_xlabel() == "ms since the first start"


def test_a_simulated_pipeline_can_be_written_as_a_trace(tmp_path):
    made = tapes(simulate(schedule()))
    trace.write(tmp_path / "plan.json", made)
    assert [tape.spans for tape in trace.load(tmp_path / "plan.json").tapes] == [tape.spans for tape in made]
