"""Saved at one layout, loaded at any other: the same state bit for bit, and the same next step (C21, C22, C23).

A chain of layouts: each loads what the one before saved, saves it again, and takes the next step. What each saves is the state
that the first one had, and the steps are one process's.
"""

import random
from dataclasses import replace

import pytest
import torch
from parity import harness, layouts
from parity.harness import micro_batches, worst

from minidist import checkpoint, ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice
from minidist.data.tokens import TokenFile
from minidist.data.windows import Windows
from minidist.model.config import ModelConfig
from minidist.train import state
from minidist.train.build import runtime
from minidist.train.config import check
from minidist.train.sections import Optim
from minidist.train.step import Step

ADAMW = Optim(lr=0.01, warmup=2, weight_decay=0.1, clip=1.0)
BEFORE = 2  # steps that the first layout takes


def hop(mesh, cfg, tokens, source, out):
    """The program of a rank: take the state from `source`, or train for it, save it, take one more step and save that."""
    step, windows = Step(runtime(mesh, cfg), mesh, cfg), Windows(TokenFile(tokens), cfg.train.seq_len, cfg.run.seed)
    if source is None:
        for number in range(BEFORE):
            step.run(micro_batches(mesh, cfg, windows, number))
    else:
        with checkpoint.Reader(source) as reader:
            state.restore(step, reader)
    for number in (BEFORE, BEFORE + 1):
        head = {"config": {}, "data": {}, "samples": 0, "state": state.counters(step)}
        checkpoint.save(out, number, state.pieces(step), mesh, **head)
        if number == BEFORE:
            step.run(micro_batches(mesh, cfg, windows, number))


def tensors(folder):
    with checkpoint.Reader(folder) as reader:
        entries = reader.manifest.tensors
        return {
            name: reader.read(Slice.whole(name, e.shape)).view(e.shape) for name, e in entries.items()
        }, reader.manifest.state


def chain(configs, tokens, folder):
    """Hop along the configurations, after one process; the number of pairs."""
    first = replace(configs[0], layout=Layout(), train=replace(configs[0].train, micro_batch=configs[0].train.global_batch))
    source, expected = None, None
    for number, cfg in enumerate([first, *configs]):
        out = folder / str(number)
        work = (cfg, tokens, source, out)
        if cfg.layout.world_size > 1:
            ranks.run(hop, cfg.layout.world_size, *work, layout=cfg.layout, timeout_s=240)
        else:
            hop(Mesh(cfg.layout), *work)
        source = out / f"step-{BEFORE:06d}"
        (now, counted), (after, later) = tensors(source), tensors(out / f"step-{BEFORE + 1:06d}")
        if expected is None:
            expected = now, counted, after, later
            assert any(name.startswith("moments/exp_avg_sq/") for name in now)
        else:
            assert now.keys() == expected[0].keys() and counted == expected[1] and later == expected[3]
            for name, tensor in now.items():
                assert torch.equal(tensor, expected[0][name]), f"{layouts_of(configs, number)}: {name}"
            whole = {name: x for name, x in after.items() if x.is_floating_point()}
            error = worst(whole, {name: expected[2][name] for name in whole})
            assert error < 1e-10, f"{layouts_of(configs, number)}: {error:.1e}"
            assert all(torch.equal(x, expected[2][name]) for name, x in after.items() if name not in whole)
    return len(configs)


def layouts_of(configs, number):
    return f"hop {number}, to {configs[number - 1].layout}"


def of(model, *chosen, seq_len=48):
    found = [replace(harness.config(24, 12, layout, model, seq_len), optim=ADAMW) for layout in chosen]
    for cfg in found:
        check(cfg, cfg.layout.world_size)
    return found


DENSE, TIED, EXPERTS = layouts.MODELS.values()
ODD = ModelConfig(layers=2, width=12, heads=2, kv_heads=1, ffn=18, vocab=53)
CHAINS = {
    "dense": of(
        DENSE,
        Layout(tp=4, dp=2, zero=1),
        Layout(pp=2, dp=2, cp=2, zero=3),
        Layout(tp=2, dp=3, sp=True),
        Layout(pp=4, schedule="zb-v"),
        Layout(dp=8, zero=2, shard=2),
    ),
    "tied": of(
        TIED,
        Layout(pp=2, tp=2, dp=2, zero=2),
        Layout(tp=4, sp=True),
        Layout(dp=5, zero=3),
        Layout(pp=3, cp=2),
    ),
    "experts": of(
        EXPERTS,
        Layout(dp=4, ep=4, zero=1),
        Layout(dp=2, tp=2, ep=2, sp=True),
        Layout(pp=2, dp=2, ep=2, zero=3),
        Layout(tp=2, cp=2),
    ),
    "more ranks than elements": of(  # C21, C22: a norm of 12 over 7 ranks, and another padding at each count
        ODD, Layout(dp=2, zero=1), Layout(dp=3, zero=1), Layout(dp=7, zero=3), Layout(dp=4, zero=2), seq_len=16
    ),
}


@pytest.fixture(scope="module")
def tokens(reference):
    return str(reference(harness.config(model=ODD))[0].path)


@pytest.mark.parametrize("name", CHAINS)
def test_from_any_layout_to_any_other(name, tokens, tmp_path):
    chain(CHAINS[name], tokens, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", layouts.MODELS)
def test_over_all_axes(model, tokens, tmp_path):
    """Layouts of the matrix, drawn in another order: at least 60 pairs over the three models."""
    found = [layouts.configuration(case) for case in layouts.cover()]
    found = [replace(cfg, optim=ADAMW) for cfg in found if cfg.model == layouts.MODELS[model]]
    chosen = random.Random(7).sample(found, 24)
    for axis, used in layouts.AXIS.items():
        assert any(map(used, chosen)) or axis in ("ep", "tied"), axis
    assert chain(chosen, tokens, tmp_path) >= 24
