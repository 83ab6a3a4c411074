"""Lesson 5: its stage over all its controls, the wire that holds results back, and parts that score alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.links import Delay, Link
from minidist.course import grading, session, tasks, widgets, widgets_05
from minidist.course.nursery import Nursery
from minidist.course.session import Cell

BANK = Path(__file__).parents[1] / "banks/05"
SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def runs():
    found = {n: ranks.run(widgets_05.perform, n) for n in SIZES}
    yield found
    ranks.stop()


@pytest.mark.parametrize("collective", widgets_05.COLLECTIVES)
@pytest.mark.parametrize("n", SIZES)
def test_the_stage_ends_with_what_the_run_left(runs, collective, n):
    for step in range(7):
        figure, words = widgets_05.stage(runs, collective, n, step)
        assert figure.alt == words and words.startswith(f"{collective} on {n} rank")
        assert words.count("rank ") >= n
    brought = [row[collective][0] for row in runs[n]]
    held = widgets_05.play(collective, brought, widgets_05.last_round(collective, n))
    assert [[held[r][i].value for i in sorted(held[r])] for r in range(n)] == [row[collective][1] for row in runs[n]]


def test_the_stage_does_not_draw_what_the_run_did_not_do(runs):
    wrong = {4: [dict(row) for row in runs[4]]}
    brought, left = wrong[4][2]["all_reduce"]
    wrong[4][2]["all_reduce"] = (brought, [*left[:-1], left[-1] + 1])
    widgets_05.stage(wrong, "all_reduce", 4, 5)
    with pytest.raises(ValueError, match="on rank 2, the run left"):
        widgets_05.stage(wrong, "all_reduce", 4, 6)


def test_no_number_travels_twice_on_the_stage():
    for n in SIZES:
        for collective in ("reduce_scatter", "all_gather", "all_to_all"):
            messages = [m for step in widgets_05.rounds(collective, n) for m in step]
            assert len(messages) == len({(m.source, m.target) for m in messages}) == n * (n - 1)


def test_a_choice_is_a_list_that_redraws(monkeypatch, runs):
    pytest.importorskip("ipywidgets")
    import IPython.display

    shown = []
    monkeypatch.setattr(session, "current", session.Session())
    monkeypatch.setattr(IPython.display, "display", lambda *things: shown.extend(things))
    widgets.widget(
        lambda v: widgets_05.stage(runs, v["collective"], v["ranks"], v["round"]),
        collective=widgets_05.COLLECTIVES,
        ranks=(2, 4, 1, 4),
        round=(0, 6, 1, 2),
    )
    still, live = shown[0], session.current.widgets[-1]
    assert "all_reduce on 4 ranks, results so far, after round 2 of 6" in still.data
    menu, count, step, picture = live.children
    assert menu.description == "collective" and list(menu.options) == widgets_05.COLLECTIVES
    menu.value = "all_to_all"
    assert "all_to_all on 4 ranks" in picture.value
    for control in (count, step):
        slider = control.children[0]
        for value in range(slider.min, slider.max + 1):
            slider.value = value
            assert f"on {count.children[0].value} ranks" in picture.value
    assert session.current.errors == []


def _read_early(mesh, kind):
    mesh.delay = Delay(Link(latency_s=0.05))
    x, out = torch.tensor([1.0 + mesh.rank, 5.0]), torch.zeros(4)
    if kind == "gather":
        work, seen = comm.all_gather(x, mesh.world, out=out, async_op=True), out
    elif kind == "broadcast":
        work, seen = comm.broadcast(x, mesh.world, src=1, async_op=True), x
    else:
        work, seen = comm.all_reduce(x, mesh.world, async_op=True), x
    early = seen.tolist()
    mesh.delay = None  # whoever takes the wire away meanwhile still gets the result
    return early, work.is_completed(), work.wait() is seen, seen.tolist()


@pytest.mark.parametrize(
    ("kind", "early", "late"),
    [("reduce", [1, 5], [3, 10]), ("broadcast", [1, 5], [2, 5]), ("gather", [0, 0, 0, 0], [1, 5, 2, 5])],
)
def test_a_delay_line_holds_results_back_until_somebody_waits(kind, early, late):
    assert ranks.run(_read_early, 2, kind)[0] == (early, False, True, late)


def test_parts_score_alone():
    """Three functions that are right keep their points beside one that is wrong, one that hangs or one that is not there."""
    right = (BANK / "1/honest_rounds.py").read_text()
    task = tasks.find("05.1")
    spoilt = {
        "own-part": (BANK / "1/wrong_own_part_missing.py").read_text(),
        "rendezvous": (BANK / "1/wrong_ring_of_sends.py").read_text(),
        "not started": 'def all_gather(mesh, x):\n    raise NotImplementedError("05.1")\n',
    }
    with Nursery() as nursery:
        for message_id, source in spoilt.items():
            cells = [Cell("a", right), Cell("b", source)]
            result = grading.grade(task, cells, seed=5, limit_s=4.0, nursery=nursery)
            assert (result.points, result.status, result.message_id) == (15, "partial", message_id), result.lines()
            assert "Right: broadcast, reduce_scatter, all_to_all." in result.message
            assert len(result.lines()) <= 10


def test_a_part_that_is_right_pays_before_the_others_are_written():
    source = (BANK / "2/honest_flags_and_sizes.py").read_text()
    only = source[: source.index("def sum_grads")]
    result = grading.grade(tasks.find("05.2"), [Cell("a", only)], seed=5)
    assert (result.points, result.status) == (4, "partial"), result.lines()
    assert "Right: mean_loss." in result.message and "normalise" in result.message
