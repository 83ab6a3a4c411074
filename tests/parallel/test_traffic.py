"""What ZeRO sends, to the byte, and when: the tape of a step against its closed form, and the order of overlap."""

from dataclasses import replace

import pytest
import torch
from parity.harness import MODEL, SEQ_LEN, config
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.data.batch import Batch
from minidist.parallel.config import Recompute
from minidist.parallel.zero import Zero
from minidist.train.build import runtime
from minidist.train.sections import Precision
from minidist.train.step import Step

W, G = 2, 4  # bytes of a bf16 weight, and of its gradient reduced in fp32


def sent(mesh, cfg, micro):
    """Bytes of one step by tag, padded elements of all units, and of the last site's."""
    zero = runtime(mesh, cfg)
    step = Step(zero, mesh, cfg)
    batch = Batch.empty(2, SEQ_LEN)
    batch.targets[:] = 1
    step.run([batch] * micro)
    mesh.tape.clear()
    step.run([batch] * micro)
    last = sum(unit.padded for unit in zero.gathers[-1].sites[-1]) if zero.gathers else 0
    return {tag: mesh.tape.sent(tag=tag) for tag in ("grad", "weight")}, sum(unit.padded for unit in zero.units), last


def run(layout, micro, **changes):
    cfg = replace(config(layout=layout), precision=Precision("bfloat16"), **changes)
    found = ranks.run(sent, layout.world_size, cfg, micro, layout=layout)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_bytes_of_a_step(n, m):
    """(n-1)/n P times: stage 0 2g; stage 1 g + w; stage 2 m g + w; stage 3 m (g + 2w), less m w for what is kept."""
    for zero in range(4):
        got, padded, last = run(Layout(dp=n, zero=zero), m)
        grad = {0: 2, 1: 1, 2: m, 3: m}[zero] * G * padded
        weight = {0: 0, 1: W * padded, 2: W * padded, 3: m * W * (2 * padded - last)}[zero]
        assert got["grad"] * n == grad * (n - 1) and got["weight"] * n == weight * (n - 1)
    got, padded, _ = run(Layout(dp=n, zero=3, reshard=False), m)
    assert got["grad"] * n == m * G * padded * (n - 1) and got["weight"] * n == m * W * padded * (n - 1)


def reductions(mesh, cfg):
    """Of one step: elements of each reduction of gradients."""
    step = Step(runtime(mesh, cfg), mesh, cfg)
    step.run([Batch.empty(1, SEQ_LEN)])
    return [line.shape[0] for line in mesh.tape if line.tag == "grad"]


def test_gradients_travel_in_buckets():
    sizes = {}
    for bucket in (0, 1, 25):
        cfg = config(layout=Layout(dp=2, bucket=bucket))
        sizes[bucket] = ranks.run(reductions, 2, cfg, layout=cfg.layout)[0]
    assert len(sizes[0]) == MODEL.layers + 2 and len(sizes[25]) == 1
    assert 1 < len(sizes[1]) < len(sizes[0]) and all(size * 8 <= 2**20 for size in sizes[1])
    assert sizes[1][0] * 8 + max(sizes[0]) * 8 > 2**20, "a block more would have fitted"
    assert sum(sizes[0]) == sum(sizes[1]) == sum(sizes[25])


def test_full_recompute_adds_no_gather():
    plain, again = (run(Layout(dp=2, zero=3), 2, recompute=Recompute(mode)) for mode in ("none", "full"))
    assert plain == again


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_of_hybrid_sharding(zero):
    """Over s ranks that share and r copies: the form of the stage at n = s, and 2 (r-1)/r g P/s once a step."""
    m, s, r = 3, 2, 2
    got, padded, last = run(Layout(dp=4, zero=zero, shard=s), m)
    within = {1: 1, 2: m, 3: m}[zero] * G * padded * (s - 1) // s
    assert got["grad"] == within + 2 * (r - 1) * G * (padded // s) // r
    weight = {1: W * padded, 2: W * padded, 3: m * W * (2 * padded - last)}[zero]
    assert got["weight"] == weight * (s - 1) // s


# Overlap


class Deep(nn.Module):
    """Eight layers of 40 x 40."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def deep(mesh, stage):
    """What had been launched, by tag, when each layer's forward began and when its gradient was there."""
    model = Deep()
    zero = Zero(model, mesh.world, stage=stage, gathers=mesh.twin("world") if stage == 3 else None)
    ahead, seen, live = [], [], []
    for i, layer in enumerate(model.blocks):
        layer.register_forward_pre_hook(lambda *_: ahead.append(mesh.tape.calls(tag="weight")))
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: seen.append((i, mesh.tape.calls(tag="grad"))))
        layer.register_forward_pre_hook(lambda *_: live.append(sum(unit.live for unit in zero.units)))
        layer.weight.register_post_accumulate_grad_hook(lambda *_: live.append(sum(unit.live for unit in zero.units)))
    mesh.tape.clear()
    zero.start_step()
    zero.before_backward(last=True)
    loss = model(torch.ones(1, 40))
    between = sum(unit.live for unit in zero.units)
    loss.backward()
    zero.after_backward()
    reduced = mesh.tape.calls(tag="grad")
    zero.finish()
    return seen, reduced, ahead, live, between, sum(unit.live for unit in zero.units)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reductions_start_while_backward_runs(stage, n):
    for seen, reduced, *_ in ranks.run(deep, n, stage):
        assert [i for i, _ in seen] == list(range(7, -1, -1))
        begun = range(1, 9) if stage < 3 else range(8)  # at stage 3 when the walk has gone on to the layer before it
        assert [calls for _, calls in seen] == list(begun), "a layer's reduction starts when its gradient is there"
        assert reduced == 8


def test_gathers_run_one_unit_ahead_and_two_are_live():
    for _, _, ahead, live, between, after in ranks.run(deep, 2, 3):
        assert ahead == [2, 3, 4, 5, 6, 7, 8, 8], "each layer begins with the next one's gather launched"
        assert max(live) == 2 and between == 1 and after == 0
