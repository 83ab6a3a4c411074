"""C37: bytes held, counted on storages, against the closed forms: 16 and 18 bytes a parameter, cut as the stage says."""

from dataclasses import replace
from itertools import pairwise

import pytest
from parity.harness import MODEL, SEQ_LEN, config

from minidist import ranks
from minidist.core.layout import Layout
from minidist.data.batch import Batch
from minidist.plan.memory import state_bytes
from minidist.train import memory
from minidist.train.build import runtime
from minidist.train.sections import Optim, Precision
from minidist.train.step import Step

# precision -> bytes a parameter of weight, gradient, master, moments
FORMATS = {
    Precision("bfloat16", accumulate="bfloat16"): (2, 2, 4, 8),
    Precision("bfloat16"): (2, 4, 4, 8),
    Precision("float16"): (2, 4, 4, 8),
    Precision("bfloat16", moments="bfloat16"): (2, 4, 4, 4),
    Precision("float32"): (4, 4, 0, 8),
    Precision("float64"): (8, 8, 0, 16),
}


def after_a_step(mesh, cfg):
    """Bytes by kind after a step, most bytes gathered and travelling within it, and the units' sizes."""
    step, seen = Step(runtime(mesh, cfg), mesh, cfg), []
    batch = Batch.empty(1, SEQ_LEN)
    batch.targets[:] = 1
    step.run([batch] * 2)
    kept = memory.held(step)
    for module in step.zero.model.modules():
        module.register_forward_pre_hook(lambda *_: seen.append(memory.held(step)))
        module.register_full_backward_pre_hook(lambda *_: seen.append(memory.held(step)))
    step.run([batch] * 2)
    most = {kind: max(one[kind] for one in seen) for kind in memory.KINDS}
    sites = [sum(unit.padded for unit in site) for site in step.zero.gathers[0].sites] if step.zero.gathers else []
    units = [(unit.numel, unit.padded, unit.own) for unit in step.zero.units]
    return kept, most, units, sites, memory.padding(step)


def run(precision, layout):
    cfg = replace(config(layout=layout, model=replace(MODEL, layers=2)), precision=precision, optim=Optim())
    return ranks.run(after_a_step, layout.world_size, cfg, layout=layout)


@pytest.mark.parametrize("precision", FORMATS, ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_held_between_steps(zero, precision):
    n = 5  # divides no unit
    weight, gradient, master, moments = FORMATS[precision]
    results = run(precision, Layout(dp=n, zero=zero))
    for kept, _, units, _, padding in results:
        padded = sum(size for _, size, _ in units)
        assert padding == padded - sum(numel for numel, _, _ in units) > 0
        expected = state_bytes(padded, n, zero, weight=weight, gradient=gradient, master=master, moments=moments)
        own_padding = sum(max(0, b - max(a, numel)) for numel, _, (a, b) in units)
        expected["moments"] -= moments * own_padding  # padding has no moments
        assert kept == {"gathered": 0, **expected}


def test_bytes_a_parameter():
    for gradient, stages in ((2, (16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8)), (4, (18, 6 + 12 / 8, 2 + 16 / 8, 18 / 8))):
        found = [sum(state_bytes(1, 8, stage, gradient=gradient).values()) for stage in range(4)]
        assert found == pytest.approx(stages, rel=1e-12)
    found = [sum(state_bytes(7.5e9, 64, stage, gradient=2).values()) / 1e9 for stage in range(4)]
    assert found == pytest.approx([120, 31.40625, 16.640625, 1.875], rel=1e-12)
    with pytest.raises(ValueError, match="stage 4 over 2 ranks"):
        state_bytes(1, 2, 4)


def test_stage_3_holds_two_units_at_a_time():
    for _, most, _, sites, _ in run(Precision("bfloat16"), Layout(dp=2, zero=3)):
        assert most["gathered"] == 2 * max(a + b for a, b in pairwise(sites))


@pytest.mark.parametrize("zero", [2, 3])
def test_two_gradient_buffers_travel_at_most(zero):
    for kept, most, units, _, _ in run(Precision("bfloat16"), Layout(dp=2, zero=zero)):
        largest = sorted(padded for _, padded, _ in units)[-2:]
        assert 0 < most["gradients"] - kept["gradients"] <= 4 * sum(largest)


def masters(mesh, cfg):
    step = Step(runtime(mesh, cfg), mesh, cfg)
    return {unit.master.device.type for unit in step.zero.trainable}, all(u.master is not u.shard for u in step.zero.trainable)


def test_offloaded_masters_are_on_the_host():
    cfg = replace(config(layout=Layout(dp=2, zero=1)), optim=Optim(offload=True))
    assert ranks.run(masters, 2, cfg, layout=cfg.layout) == [({"cpu"}, True)] * 2
