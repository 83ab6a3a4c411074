"""Context parallelism trains like one process: float64 and SGD, loss, every gradient, every weight, to 1e-10.

The parity corpus is packed: documents begin and end anywhere, also across the cuts. `one_document` is plain causal attention.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from parity import harness
from parity.conftest import made_once
from parity.harness import MODEL, compare
from parity.test_zero import on_late_ranks

from minidist.core.layout import CP_ATTENTION, Layout
from minidist.data.tokens import TokenFile
from minidist.parallel.config import Recompute
from minidist.parallel.context import ATTENTION

config = partial(harness.config, seq_len=24)  # that 2, 3 and 4 ranks can share in zig-zag
WAYS = pytest.mark.parametrize("how", CP_ATTENTION)
FEW = replace(MODEL, kv_heads=2)
ZERO = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard": False}]
RECOMPUTE = [Recompute("full"), Recompute("selective"), Recompute("full", offload=True)]


@pytest.fixture(scope="session")
def one_document(tmp_path_factory):
    text = np.random.default_rng(7).integers(1, MODEL.vocab, 4000)
    return made_once(TokenFile.build(tmp_path_factory.mktemp("one") / "document", [text], vocab=MODEL.vocab, separator=0))


def test_the_setting_names_what_there_is():
    assert tuple(ATTENTION) == CP_ATTENTION


@WAYS
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_like_one_process(how, cp, reference):
    compare(config(26, 5, Layout(cp=cp, cp_attention=how)), reference)


@WAYS
def test_one_document(how, one_document):
    compare(config(24, 12, Layout(cp=3, cp_attention=how)), one_document)


@pytest.mark.parametrize("zero", ZERO, ids=str)
def test_with_zero(zero, reference):
    compare(config(26, 7, Layout(dp=2, cp=2, **zero)), reference)


@pytest.mark.parametrize("how", CP_ATTENTION[1:])
def test_other_ways_with_zero(how, reference):
    compare(config(26, 7, Layout(dp=2, cp=2, cp_attention=how, zero=3, shard=2)), reference)


@pytest.mark.parametrize("recompute", RECOMPUTE[:2], ids=str)
@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_with_recompute(how, recompute, reference):
    compare(replace(config(24, 12, Layout(cp=2, cp_attention=how)), recompute=recompute), reference)


@WAYS
@pytest.mark.parametrize("sp", [False, True])
def test_with_tensor_parallel(sp, how, reference):
    """Two key heads over two ranks: one each, which ulysses has to send to both of its own."""
    compare(config(24, 12, Layout(cp=2, tp=2, sp=sp, cp_attention=how), FEW), reference)


@WAYS
def test_what_is_not_waited_for_is_not_there(how, reference, monkeypatch):
    monkeypatch.setattr(harness, "on_ranks", on_late_ranks)
    compare(config(24, 12, Layout(cp=3, cp_attention=how)), reference)


@pytest.mark.matrix
@WAYS
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (4, 2), (1, 3), (2, 3), (1, 4), (2, 4)])
@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("text", ["reference", "one_document"])
def test_matrix(text, zero, dp, cp, how, request):
    compare(config(24, 5, Layout(dp=dp, cp=cp, cp_attention=how, **zero)), request.getfixturevalue(text))


@pytest.mark.matrix
@WAYS
@pytest.mark.parametrize(("dp", "cp", "tp"), [(1, 2, 2), (2, 2, 2), (1, 2, 4), (1, 4, 2)])
@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("sp", [False, True])
def test_matrix_with_tensor_parallel(sp, zero, dp, cp, tp, how, reference):
    if how == "ulysses" and 12 % (cp * tp):
        pytest.skip("the heads do not divide: refused, test_context of parallel/ says how")
    compare(config(24, 5, Layout(dp=dp, cp=cp, tp=tp, sp=sp, cp_attention=how, **zero), FEW), reference)


@pytest.mark.matrix
@WAYS
@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_matrix_of_recompute(recompute, zero, how, reference):
    compare(replace(config(24, 5, Layout(dp=2, cp=2, cp_attention=how, **zero)), recompute=recompute), reference)
