"""Pipelines train like one process: every schedule, any number of micro-batches, stages of any size, beside everything else."""

from dataclasses import replace

import pytest
from parity import harness
from parity.harness import MODEL, compare, config
from parity.test_expert import MOE
from parity.test_zero import on_late_ranks

from minidist.core.layout import Layout
from minidist.parallel.config import Recompute

SCHEDULES = ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v"]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, pp, reference):
    compare(config(24, 3, Layout(pp=pp, schedule=schedule)), reference)


@pytest.mark.parametrize("batches", [(24, 24), (24, 12), (24, 8), (8, 3)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_micro_batches_than_stages_and_uneven_ones(schedule, batches, reference):
    """C34: 1, 2 and 3 micro-batches on 4 stages; 8 rows as 3, 3 and 2."""
    compare(config(*batches, Layout(pp=4, schedule=schedule)), reference)


@pytest.mark.parametrize("beside", [{}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(
    "where", [{"pp": 2}, {"pp": 4}, {"pp": 2, "schedule": "zb-v"}, {"pp": 2, "schedule": "zb-h1"}], ids=str
)
def test_a_tied_embedding_on_two_stages(where, beside, reference):
    """C06: the copies are compared bit for bit by the harness, the gradient with that of both uses."""
    if Layout(**where, **beside).world_size <= 8:
        compare(config(24, 6, Layout(**where, **beside), replace(MODEL, tied=True)), reference)


@pytest.mark.parametrize("split", ["even", "cost", "4,1,3"])
def test_stages_of_any_size(split, reference):
    compare(config(24, 6, Layout(pp=3, split=split)), reference)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_zero(schedule, zero, reference):
    compare(config(24, 3, Layout(pp=2, dp=2, zero=zero, schedule=schedule)), reference)


@pytest.mark.parametrize("recompute", [Recompute("full"), Recompute("selective"), Recompute(offload=True)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_with_recompute(schedule, recompute, reference):
    compare(replace(config(24, 3, Layout(pp=2, schedule=schedule)), recompute=recompute), reference)


@pytest.mark.parametrize("beside", [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"tp": 2, "dp": 2, "zero": 1}], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_with_tensor_and_context(schedule, beside, reference):
    compare(config(24, 6, Layout(pp=2, schedule=schedule, **beside)), reference)


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=2, dp=2, ep=2, zero=1), Layout(pp=2, tp=2, schedule="zb-h1")], ids=str
)
def test_with_experts(layout, reference):
    """Each stage attaches the losses of its own routers, and moves its own biases."""
    compare(config(24, 6, layout, replace(MOE, layers=4)), reference)


def test_with_all_axes(reference):
    """5 axes on 8 ranks need two of them to share: pp 2, cp 2, tp 2, with ep 2 on the places of cp."""
    layout = Layout(pp=2, cp=2, tp=2, ep=2, sp=True, zero=2, schedule="interleaved")
    compare(config(24, 6, layout, replace(MOE, layers=4)), reference)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_what_is_not_waited_for_is_not_there(schedule, reference, monkeypatch):
    monkeypatch.setattr(harness, "on_ranks", on_late_ranks)
    compare(config(24, 6, Layout(pp=2, dp=2, zero=1, schedule=schedule)), reference)
