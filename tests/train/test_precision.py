"""Number formats: overflow seen by one rank (C17), clip after unscale (C18), masters (C19), wide sums (C20), same roundings."""

from dataclasses import replace

import pytest
import torch
from parity.harness import LR, MODEL, SEQ_LEN, config, step_batch, token_file, whole, worst
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.data.batch import split
from minidist.data.tokens import TokenFile
from minidist.data.windows import Windows
from minidist.model.loss import IGNORE, loss_sum
from minidist.model.transformer import Transformer, initialise
from minidist.parallel.units import Formats
from minidist.parallel.zero import Zero
from minidist.train.build import runtime
from minidist.train.optim import UnitOptimizer
from minidist.train.precision import LossScale
from minidist.train.sections import Optim, Precision
from minidist.train.step import Step

PLAIN = replace(MODEL, dropout=0.0)
EXPERTS = replace(PLAIN, layers=2, ffn=48, experts=4, top_k=2, shared_ffn=48, balance_loss=0.1, z_loss=0.01)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("tokens"))


def model_for(layout):
    return EXPERTS if layout.ep > 1 else PLAIN


def low(precision, layout=None, model=PLAIN, **optim):
    """One sequence a micro-batch, so that a rank's micro-batches are the same ones on any layout."""
    base = config(8, 1, layout, model)
    return replace(base, precision=precision, optim=replace(base.optim, **optim))


def rows_of(mesh, cfg, path):
    windows, group = Windows(TokenFile(path), SEQ_LEN, cfg.run.seed), mesh.group("dp")
    batch = step_batch(windows, 0, cfg.train.global_batch)
    return [batch.rows(p.start, p.stop) for p in split(0, group.rank, group.size, cfg.train.global_batch, 1)]


# C17: one rank overflows, all skip


def overflow_on_rank_2(mesh, cfg, path):
    step, seen = Step(runtime(mesh, cfg), mesh, cfg), []
    finish = step.zero.finish
    for number in range(3):

        def broken(number=number):
            finish()
            if number == 1 and mesh.rank == 2:
                next(unit.total for unit in step.zero.trainable if len(unit.total))[-1] = float("inf")

        step.zero.finish = broken
        before = [tensor.clone() for unit in step.zero.units for tensor in (unit.shard, unit.master)]
        result = step.run(rows_of(mesh, cfg, path))
        after = [tensor for unit in step.zero.units for tensor in (unit.shard, unit.master)]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        seen.append((result.skipped, same, result.loss_scale, step.taken))
    return seen


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp=4, zero=z) for z in (1, 2, 3)),
        Layout(dp=2, tp=2, sp=True, zero=3),
        Layout(cp=2, tp=2, zero=2),
        Layout(dp=4, ep=2, zero=1),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_makes_all_skip_and_halve(layout, tokens):
    results = ranks.run(
        overflow_on_rank_2, 4, low(Precision("float16"), layout, model=model_for(layout)), str(tokens.path), layout=layout
    )
    assert results == [[(False, False, 2.0**16, 1), (True, True, 2.0**16, 1), (False, False, 2.0**15, 2)]] * 4


# C18: clip after unscale; the schedule and Adam count real steps


def clipped(mesh, cfg, path):
    step = Step(runtime(mesh, cfg), mesh, cfg)
    result = step.run(rows_of(mesh, cfg, path))
    return result.grad_norm, step.zero.gradients()


@pytest.mark.parametrize("zero", [0, 2])
def test_the_limit_is_compared_with_the_unscaled_norm(zero, tokens):
    layout = Layout(dp=2, zero=zero)

    def run(scale, clip):
        results = ranks.run(
            clipped, 2, low(Precision("float32", loss_scale=scale), layout, clip=clip), str(tokens.path), layout=layout
        )
        return results[0][0], torch.cat([g.double().flatten() for g in whole(results, 1).values()]).norm().item()

    true, _ = run(1.0, 0.0)
    logged, applied = run(65536.0, true / 2)
    assert logged == pytest.approx(true, rel=1e-6) and applied == pytest.approx(true / 2, rel=1e-6)
    logged, applied = run(65536.0, 0.0)
    assert logged == pytest.approx(true, rel=1e-6) and applied == pytest.approx(true, rel=1e-6)


def two_overflows(mesh, cfg, path):
    step, lrs = Step(runtime(mesh, cfg), mesh, cfg), []
    for number in range(5):
        step.scale.value = float("inf") if number in (1, 2) else 1024.0
        lrs.append(step.run(rows_of(mesh, cfg, path)).lr)
    counts = {int(s["step"]) for o in step.optimizers for s in o.optimizer.state_dict()["state"].values()}
    return step.taken, counts, lrs


def test_schedule_and_adam_count_successful_steps(tokens):
    cfg = low(Precision("float16"), name="adamw", warmup=100)
    taken, counts, lrs = ranks.run(two_overflows, 1, cfg, str(tokens.path), layout=cfg.layout)[0]
    assert taken == 3 and counts == {3}
    assert lrs[1] == lrs[2] == lrs[3] and lrs[0] < lrs[1] < lrs[4]


def test_the_scale_moves_in_float16_only_and_has_no_upper_end():
    scale = LossScale(Precision("float16", loss_scale=2.0**30, scale_window=2))
    seen = []
    for overflow in (False, False, True, False, True, False, False):
        scale.step(overflow)
        seen.append(scale.value / 2.0**30)
    assert seen == [1, 2, 1, 1, 0.5, 0.5, 1]
    scale = LossScale(Precision("float16", loss_scale=1.0, scale_window=2))
    seen = []
    for _ in range(6):
        scale.step(False)
        seen.append(scale.value)
    assert seen == [1, 2, 2, 4, 4, 8], "the count starts again when the scale has moved"
    scale = LossScale(Precision("bfloat16"))
    scale.step(True)
    assert scale.value == 1.0


# C19: masters


def descend(dtype, moments=None):
    """A weight at 1, gradient 1, 100 steps of AdamW at 6e-4; the weight that forward sees, and the state."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    mesh = Mesh(Layout())
    zero = Zero(model, mesh.world, formats=Formats(dtype))
    optimizer = UnitOptimizer(Optim(weight_decay=0.0), zero.units[0], moments)
    for _ in range(100):
        zero.start_step()
        zero.before_backward(last=True)
        zero.model(torch.ones(1, 1, dtype=dtype)).sum().backward()
        zero.finish()
        optimizer.step(6e-4, 1.0)
        zero.publish(zero.units[0])
    state = next(iter(optimizer.optimizer.state.values()))
    return zero.model.weight.item(), zero.units[0].master.item(), state["exp_avg"].dtype


def test_bf16_weights_move_because_their_master_does():
    seen, master, moments = descend(torch.bfloat16)
    assert seen == 0.94140625 and master == pytest.approx(0.94, abs=1e-5) and moments == torch.float32
    assert descend(torch.float32)[0] == pytest.approx(0.94, abs=1e-5)


def test_moments_are_kept_as_the_setting_says():
    _, master, moments = descend(torch.float32, torch.bfloat16)
    assert moments == torch.bfloat16 and master == pytest.approx(0.94, abs=2e-3) and master != descend(torch.float32)[1]


def test_wide_training_stores_no_second_master():
    for dtype in (torch.float32, torch.float64):
        unit = Zero(nn.Linear(2, 2), Mesh(Layout()).world, formats=Formats(dtype)).units[0]
        assert unit.master is unit.shard and unit.master.dtype == dtype


# C20: sums in fp32


def sums(mesh, stage, formats, value, times):
    model = nn.Linear(1, 1, bias=False)
    zero = Zero(model, mesh.world, stage=stage, formats=formats)
    zero.start_step()
    for i in range(times):
        zero.before_backward(last=i == times - 1)
        model(torch.full((1, 1), value, dtype=formats.weights)).sum().backward()
        zero.after_backward()
    zero.finish()
    return zero.gradients()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_summed_in_fp32_unless_asked_otherwise(stage):
    half, brain = torch.float16, torch.bfloat16

    def total(n, *what):
        return whole([(held,) for held in ranks.run(sums, n, stage, *what)], 0)["weight"].item()

    assert total(2, Formats(half), 60000.0, 1) == 120000.0
    assert total(2, Formats(half, reduce=half), 60000.0, 1) == float("inf")
    assert total(1, Formats(brain), 1.0, 1000) == 1000.0
    assert total(1, Formats(brain, grads=brain), 1.0, 1000) == 256.0


# The same roundings as one process


def one_process(cfg, path, dtype, scale):
    """One step of SGD on masters in fp32, micro-batches of one sequence run in `dtype`, gradients summed in fp32."""
    with torch.device("meta"):
        model = Transformer(PLAIN)
    model = model.to_empty(device="cpu")
    initialise(model, cfg.run.seed)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = model.to(dtype)
    batch = step_batch(Windows(TokenFile(path), SEQ_LEN, cfg.run.seed), 0, cfg.train.global_batch)
    count, loss = (batch.targets != IGNORE).sum(), 0.0
    grads = {name: torch.zeros_like(p) for name, p in masters.items()}
    for i in range(cfg.train.global_batch):
        row = batch.rows(i, i + 1)
        part = loss_sum(model(row.tokens, row.positions, row.documents), row.targets) / count
        loss += part.item()
        model.zero_grad()
        (part * scale).backward()
        for name, p in model.named_parameters():
            grads[name] += p.grad.float() / scale
    for name, p in masters.items():
        p -= LR * (grads[name] + (cfg.optim.weight_decay * p if p.dim() >= 2 else 0.0))
    return loss, grads, masters


def one_step(mesh, cfg, path):
    step = Step(runtime(mesh, cfg), mesh, cfg)
    loss = step.run(rows_of(mesh, cfg, path)).loss
    return loss, step.zero.gradients(), step.zero.weights()


@pytest.mark.parametrize("layout", [Layout(), *(Layout(dp=2, zero=z) for z in range(4)), Layout(dp=4, zero=3)], ids=str)
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 2.0**16)])
def test_like_one_process_with_the_same_roundings(dtype, scale, layout, tokens):
    cfg = low(Precision(dtype), layout)
    loss, grads, weights = one_process(cfg, str(tokens.path), getattr(torch, dtype), scale)
    results = ranks.run(one_step, layout.world_size, cfg, str(tokens.path), layout=layout)
    assert [result[0] for result in results] == pytest.approx([loss] * len(results), rel=1e-12)
    # The sum of 8 fp32 numbers in two orders: at most 2 x 7 roundings of 2^-24, relative to the largest partial sum.
    assert worst(whole(results, 1), grads) < 1e-5 and worst(whole(results, 2), weights) < 1e-6


# Where a sum of partial products is rounded that one process does not cut


def one_step_of(cfg, path):
    results = ranks.run(one_step, cfg.layout.world_size, cfg, path, layout=cfg.layout)
    return results[0][0], whole(results, 1)


def errors(found, exact):
    """|found - exact| / |exact| of the loss, and of the gradient of each kind of parameter."""
    kinds = {}
    for name, grad in exact[1].items():
        kinds.setdefault(name.split(".", 2)[-1], []).append((found[1][name].double() - grad, grad))
    of_kind = {
        kind: sum(d.square().sum() for d, _ in pairs) / sum(g.square().sum() for _, g in pairs) for kind, pairs in kinds.items()
    }
    return {"loss": abs(found[0] / exact[0] - 1), **{kind: square.sqrt().item() for kind, square in of_kind.items()}}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4),
        Layout(tp=2, sp=True),
        Layout(cp=2),
        Layout(cp=2, cp_attention="gather"),
        Layout(cp=2, cp_attention="ulysses"),
        Layout(dp=2, tp=2, cp=2, sp=True, zero=3),
        Layout(dp=2, ep=2),
        Layout(dp=2, tp=2, ep=2, sp=True, zero=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cut_products_are_no_further_from_exact_than_whole_ones(dtype, layout, tokens):
    """A factor is an error of order 1, a missing wide sum one of order n: roundings of one process are about 1e-2 and 1e-3."""
    path, model = str(tokens.path), model_for(layout)
    exact = one_step_of(low(Precision("float64"), model=model), path)
    alone = errors(one_step_of(low(Precision(dtype), model=model), path), exact)
    cut = errors(one_step_of(low(Precision(dtype), layout, model), path), exact)
    assert {kind: (cut[kind], alone[kind]) for kind in cut if cut[kind] > 2 * alone[kind] + 1e-4} == {}
