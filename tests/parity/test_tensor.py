"""Tensor and sequence parallelism train like one process: float64 and SGD, loss, every gradient, every weight, to 1e-10."""

from dataclasses import replace

import pytest
from parity import harness
from parity.harness import MODEL, compare, config
from parity.test_zero import on_late_ranks

from minidist.core.layout import Layout
from minidist.parallel.config import Recompute

SEQUENCE = [{}, {"sp": True}, {"sp": True, "sp_regather": False}]
UNEVEN = replace(MODEL, vocab=49, kv_heads=2)  # at tp = 4: 13, 13, 13 and 10 rows of the vocabulary; two ranks to a kv head
ZERO = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard": False}]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", SEQUENCE, ids=str)
def test_like_one_process(tp, sequence, reference):
    compare(config(26, 5, Layout(tp=tp, **sequence)), reference)


@pytest.mark.parametrize("sequence", SEQUENCE[:2], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_uneven_vocabulary_and_few_kv_heads(tied, sequence, reference):
    compare(config(24, 5, Layout(tp=4, **sequence), replace(UNEVEN, tied=tied)), reference)


@pytest.mark.parametrize("sequence", SEQUENCE[:2], ids=str)
@pytest.mark.parametrize("zero", ZERO, ids=str)
def test_with_zero(zero, sequence, reference):
    compare(config(24, 5, Layout(dp=2, tp=2, **sequence, **zero), UNEVEN), reference)


@pytest.mark.parametrize("recompute", [Recompute("full"), Recompute("selective")], ids=str)
@pytest.mark.parametrize("sequence", SEQUENCE[:2], ids=str)
def test_with_recompute(sequence, recompute, reference):
    compare(replace(config(24, 5, Layout(tp=2, **sequence)), recompute=recompute), reference)


@pytest.mark.parametrize("sequence", SEQUENCE, ids=str)
def test_what_is_not_waited_for_is_not_there(sequence, reference, monkeypatch):
    monkeypatch.setattr(harness, "on_ranks", on_late_ranks)
    compare(config(24, 12, Layout(tp=2, **sequence)), reference)


@pytest.mark.matrix
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", SEQUENCE, ids=str)
@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("model", [MODEL, replace(UNEVEN, tied=True)], ids=["even", "uneven, tied"])
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full")], ids=str)
def test_matrix(recompute, model, zero, sequence, tp, dp, reference):
    if dp * tp <= 8:
        compare(replace(config(24, 5, Layout(dp=dp, tp=tp, **sequence, **zero), model), recompute=recompute), reference)
