"""ZeRO 0-3 train like one process: float64 and SGD, loss, every gradient and every weight, to 1e-10."""

from dataclasses import replace

import pytest
from parity import harness
from parity.harness import MODEL, compare, config, on_ranks

from minidist.core.layout import Layout
from minidist.core.links import Delay, Link
from minidist.parallel.config import Recompute

RECOMPUTE = [Recompute("full"), Recompute("selective"), Recompute("selective", "blocks", 3), Recompute("full", offload=True)]
TIED = replace(MODEL, tied=True)
SETTINGS = [{"zero": 0}, {"bucket": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "reshard": False}]
LATE = [*(Layout(dp=2, **setting) for setting in SETTINGS), *(Layout(dp=4, zero=z, shard=2) for z in (1, 2, 3))]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("batches", [(24, 24), (26, 5)], ids=["accumulation 1", "ragged"])
def test_like_one_process(zero, n, batches, reference):
    compare(config(*batches, Layout(dp=n, zero=zero)), reference)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding(zero, reference):
    compare(config(24, 3, Layout(dp=4, zero=zero, shard=2)), reference)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_tied_embeddings(zero, reference):
    compare(config(24, 4, Layout(dp=3, zero=zero), TIED), reference)


def test_weights_kept_between_forward_and_backward(reference):
    compare(config(24, 4, Layout(dp=3, zero=3, reshard=False)), reference)


def test_masters_on_the_host(reference):
    cfg = config(24, 4, Layout(dp=2, zero=3))
    compare(replace(cfg, optim=replace(cfg.optim, offload=True)), reference)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_recompute(recompute, zero, reference):
    compare(replace(config(24, 4, Layout(dp=2, zero=zero)), recompute=recompute), reference)


def on_late_ranks(mesh, cfg, path):
    """Every rank's program, on links that take no time but bring nothing home before it is waited for."""
    mesh.delay = Delay(Link())
    return on_ranks(mesh, cfg, path)


@pytest.mark.parametrize("layout", LATE, ids=str)
def test_what_is_not_waited_for_is_not_there(layout, reference, monkeypatch):
    """No wait is missing: on links without delay, a result may be there in time by luck."""
    monkeypatch.setattr(harness, "on_ranks", on_late_ranks)
    compare(config(24, 4, layout), reference)


@pytest.mark.matrix
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("zero", SETTINGS, ids=str)
@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("recompute", [Recompute(), *RECOMPUTE], ids=str)
def test_matrix(n, accumulation, zero, model, recompute, reference):
    def at(layout):
        micro_batch = -(-24 // n // accumulation)
        return replace(config(24, micro_batch, layout, model), recompute=recompute)

    compare(at(Layout(dp=n, **zero)), reference)
    if n > 2 and n % 2 == 0 and zero.get("zero"):
        compare(at(Layout(dp=n, shard=2, **zero)), reference)
