"""Experts on other ranks train like one process: float64 and SGD, loss, every gradient and every weight, to 1e-10.

Balance and z-loss act, and a selection bias that moves fast enough to change choices from one step to the next; every replica,
the router's on the ranks of tp among them (C31), is equal to its owner to the bit.
"""

from dataclasses import replace

import pytest
from parity import harness
from parity.harness import MODEL, compare, config
from parity.test_zero import on_late_ranks

from minidist.core.layout import Layout
from minidist.parallel.config import Recompute

MOE = replace(
    MODEL, layers=2, ffn=24, experts=12, top_k=2, shared_ffn=24, balance_loss=0.1, z_loss=0.01, bias_rate=0.02, dropout=0.1
)
ZERO = [{"zero": 0}, {"bucket": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard": False}]
PAIRS = [
    Layout(cp=2, ep=2),
    Layout(dp=2, cp=2, ep=4),
    Layout(dp=2, cp=2, ep=2, zero=3),
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(dp=2, tp=2, ep=2),
    Layout(dp=2, tp=2, ep=2, sp=True, zero=3),
    Layout(cp=2, tp=2, ep=2, sp=True, zero=1),
]


@pytest.mark.parametrize("ep", [1, 2, 3, 4])
@pytest.mark.parametrize("batches", [(24, 24), (26, 5)], ids=["accumulation 1", "ragged"])
def test_like_one_process(ep, batches, reference):
    compare(config(*batches, Layout(dp=ep, ep=ep), MOE), reference)


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("zero", ZERO, ids=str)
def test_with_zero(zero, ep, reference):
    """Two replicas of each expert at ep 2, and state that is shared by them."""
    compare(config(24, 5, Layout(dp=2 * ep, ep=ep, **zero), MOE), reference)


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_with_other_parallelisms(layout, reference):
    compare(config(24, 7, layout, MOE), reference)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("zero", [0, 3])
def test_with_recompute(mode, zero, reference):
    """Nothing is counted in a re-run: the bias would move otherwise."""
    compare(replace(config(24, 5, Layout(dp=2, ep=2, zero=zero), MOE), recompute=Recompute(mode)), reference)


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"capacity": 0.75}, {"shared_ffn": 0, "bias_rate": 0.0}], ids=str)
@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2), Layout(dp=2, tp=2, ep=2, sp=True)], ids=str)
def test_settings(changes, layout, reference):
    compare(config(24, 5, layout, replace(MOE, **changes)), reference)


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=2, sp=True)], ids=str)
def test_what_is_not_waited_for_is_not_there(layout, reference, monkeypatch):
    monkeypatch.setattr(harness, "on_ranks", on_late_ranks)
    compare(config(24, 12, layout, MOE), reference)


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full")], ids=str)
@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_matrix(ep, dp, cp, tp, sp, zero, recompute, reference):
    if dp * cp * tp <= 8 and dp * cp % ep == 0:
        model = replace(MOE, experts=8)
        layout = Layout(dp=dp, cp=cp, tp=tp, ep=ep, sp=sp, **zero)
        compare(replace(config(24, 5, layout, model), recompute=recompute), reference)
