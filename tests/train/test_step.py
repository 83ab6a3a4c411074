"""The end of a step: non-finite gradients (C05), clipping by one norm, counters that follow real steps, AdamW like torch's."""

from dataclasses import replace

import pytest
import torch
from parity.harness import MODEL, SEQ_LEN, config, step_batch, token_file

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.random import DropoutKey
from minidist.data.batch import Batch, split
from minidist.data.tokens import TokenFile
from minidist.data.windows import Windows
from minidist.model.loss import IGNORE, loss_sum
from minidist.model.transformer import Transformer, initialise
from minidist.parallel.parallelize import parallelize
from minidist.train.config import Optim, Precision
from minidist.train.schedule import lr_at
from minidist.train.step import Step, grad_norm


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("tokens"))


def rows_of(mesh, cfg, path, number):
    """This rank's micro-batches of step `number`."""
    windows, size = Windows(TokenFile(path), SEQ_LEN, cfg.run.seed), cfg.train.global_batch
    whole, group = step_batch(windows, number * size, size), mesh.group("dp")
    places = split(number * size, group.rank, group.size, size, cfg.train.micro_batch)
    return [whole.rows(p.start - number * size, p.stop - number * size) if len(p) else Batch.empty(1, SEQ_LEN) for p in places]


def make(mesh, cfg):
    zero = parallelize(cfg.model, mesh, seed=cfg.run.seed, dtype=getattr(torch, cfg.precision.dtype))
    return Step(zero, mesh, cfg)


def poisoned(mesh, cfg, path, value):
    """Three steps; in the second, rank 1 alone sets one gradient element to `value` before the reduction."""
    step, rows, results = make(mesh, cfg), [], []
    for number in range(3):
        rows = rows_of(mesh, cfg, path, number)
        before = [unit.weights.clone() for unit in step.zero.units]
        state = {k: v["exp_avg"].clone() for k, v in step.optimizer.state_dict()["state"].items()}
        if number == 1 and mesh.rank == 1:
            hook = step.zero.model.blocks[3].ffn.up.weight.register_hook(
                lambda g: g.index_put((torch.tensor(0),) * 2, g.new_tensor(value))
            )
        result = step.run(rows)
        if number == 1 and mesh.rank == 1:
            hook.remove()
        after = step.optimizer.state_dict()["state"]
        same = all(torch.equal(a, unit.weights) for a, unit in zip(before, step.zero.units, strict=True))
        same_state = bool(state) and all(torch.equal(state[k], after[k]["exp_avg"]) for k in state)
        results.append((result.skipped, same, same_state, step.taken, result.lr))
    return results


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_non_finite_gradient_on_one_rank_stops_the_update_on_all(value, tokens):
    cfg = replace(config(8, 8, Layout(dp=2)), optim=Optim(lr=1e-3, warmup=10), precision=Precision("float32"))
    for results in ranks.run(poisoned, 2, cfg, str(tokens.path), value):
        assert [skipped for skipped, *_ in results] == [False, True, False]
        assert [same for _, same, _, _, _ in results] == [False, True, False]
        assert results[1][2], "the moments changed"
        assert [taken for _, _, _, taken, _ in results] == [1, 1, 2]
        assert [lr for *_, lr in results] == [lr_at(0, cfg), lr_at(1, cfg), lr_at(1, cfg)], "the schedule counts real steps"


def norms(mesh, cfg, path):
    """The norm before and after clipping, and the norm of the whole gradient computed from the parameters."""
    step = make(mesh, cfg)
    result = step.run(rows_of(mesh, cfg, path, 0))
    by_hand = torch.cat([p.grad.flatten() for p in step.zero.model.parameters()]).norm().item()
    return result.grad_norm, grad_norm(step.zero).item(), by_hand


@pytest.mark.parametrize("n", [1, 2, 3])
def test_clipping_by_the_norm_of_the_whole_gradient(n, tokens):
    def clipped(limit):
        base = config(9, 2, Layout(dp=n))
        return replace(base, optim=replace(base.optim, clip=limit))

    free = ranks.run(norms, n, clipped(0.0), str(tokens.path))
    norm = free[0][0]
    assert norm > 0.1
    for logged, after, by_hand in free:
        assert logged == pytest.approx(norm, rel=1e-12) and after == pytest.approx(by_hand, rel=1e-12) == logged
    for logged, after, by_hand in ranks.run(norms, n, clipped(norm / 3), str(tokens.path)):
        assert logged == pytest.approx(norm, rel=1e-10), "the logged norm is the one before clipping"
        assert after == pytest.approx(norm / 3, rel=1e-10) and by_hand == pytest.approx(norm / 3, rel=1e-10)
    for _, after, _ in ranks.run(norms, n, clipped(norm * 3), str(tokens.path)):
        assert after == pytest.approx(norm, rel=1e-10), "a norm within the limit is left alone"


def adamw_losses(mesh, cfg, path, steps):
    step = make(mesh, cfg)
    return [step.run(rows_of(mesh, cfg, path, number)).loss for number in range(steps)]


def test_twenty_adamw_steps_in_fp32_are_torchs(tokens):
    """DESIGN's promise for fp32: the first 20 steps within 1e-4 of one process, which is here torch's own loop."""
    steps = 20
    base = config(12, 4)
    optim = Optim(lr=3e-3, warmup=5, weight_decay=0.1, clip=1.0)
    base = replace(base, optim=optim, precision=Precision("float32"), train=replace(base.train, steps=steps))
    with torch.device("meta"):
        model = Transformer(MODEL)
    model = model.to_empty(device="cpu")
    initialise(model, base.run.seed)
    groups = [[p for p in model.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False)]
    adamw = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}],
        lr=1.0,
        betas=optim.betas,
        eps=optim.eps,
    )
    windows, expected = Windows(tokens, SEQ_LEN, base.run.seed), []
    for number in range(steps):
        batch = step_batch(windows, number * 12, 12)
        key = DropoutKey(base.run.seed, number, batch.samples, batch.index)
        logits = model(batch.tokens, batch.positions, batch.documents, key)
        loss = loss_sum(logits, batch.targets) / (batch.targets != IGNORE).sum()
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = lr_at(number, base)
        adamw.step()
        expected.append(loss.item())
    for n in (1, 2, 4):
        for losses in ranks.run(adamw_losses, n, replace(base, layout=Layout(dp=n)), str(tokens.path), steps):
            assert losses == pytest.approx(expected, rel=1e-4)


def test_a_batch_without_a_valid_target_changes_nothing_but_the_decay():
    cfg = config(2, 2)
    step = make(Mesh(Layout()), cfg)
    before = [unit.weights.clone() for unit in step.zero.units]
    result = step.run([Batch.empty(2, SEQ_LEN)])
    assert result.loss != result.loss and result.tokens == 0 and result.grad_norm == 0.0 and not result.skipped
    for old, unit in zip(before, step.zero.units, strict=True):
        torch.testing.assert_close(unit.weights, old, rtol=cfg.optim.lr * cfg.optim.weight_decay * 1.01, atol=0)
