"""Parallelisms together train like one process: float64 and SGD, loss, every gradient and every weight, to 1e-10.

Each with ZeRO is in its own file; here are tensor and context, with data and experts, clipping and accumulation.
"""

from dataclasses import replace

import pytest
from parity.harness import MODEL, compare, config
from parity.test_expert import MOE

from minidist.core.layout import CP_ATTENTION, Layout
from minidist.parallel.config import Recompute

FEW = replace(MODEL, kv_heads=2, vocab=49)
ALL = [  # up to 8 ranks
    Layout(tp=2, cp=4, sp=True),
    Layout(tp=4, cp=2, cp_attention="gather"),
    Layout(dp=2, tp=2, cp=2, sp=True, zero=3),
    Layout(dp=2, tp=2, cp=2, sp=True, sp_regather=False, zero=2, shard=2, cp_attention="gather"),
]


@pytest.mark.parametrize("how", CP_ATTENTION)
@pytest.mark.parametrize("sequence", [{}, {"sp": True}], ids=str)
def test_tensor_and_context(sequence, how, reference):
    compare(config(24, 7, Layout(tp=2, cp=2, cp_attention=how, **sequence), FEW), reference)


@pytest.mark.parametrize("layout", ALL[2:3], ids=str)
def test_with_data(layout, reference):
    compare(config(26, 5, layout, FEW), reference)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sp=True), Layout(cp=2), Layout(dp=2, ep=2), Layout(dp=2, tp=2, zero=3)], ids=str
)
def test_clipping(layout, reference):
    """Every element is in the norm once, however many ranks hold it."""
    model = MOE if layout.ep > 1 else FEW
    cfg = config(24, 5, layout, model)
    compare(replace(cfg, optim=replace(cfg.optim, clip=0.01)), reference)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ALL, ids=str)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("model", [FEW, replace(FEW, tied=True), replace(MOE, capacity=0.0)], ids=["dense", "tied", "experts"])
def test_matrix(model, mode, layout, reference):
    layouts = [layout, replace(layout, ep=2)] if model.experts else [layout]
    for one in layouts:
        compare(replace(config(24, 5, one, model), recompute=Recompute(mode)), reference)
