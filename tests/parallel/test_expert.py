"""Experts on other ranks: one layer in float64 against one process, in every layout; its bytes; idle experts (C30-C33)."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from minidist import ranks
from minidist.core import comm, slices
from minidist.core.layout import Layout
from minidist.model import balance
from minidist.model.balance import Routing
from minidist.model.config import ModelConfig
from minidist.model.moe import MoE
from minidist.model.transformer import Transformer, initialise
from minidist.parallel import expert, recompute

CFG = ModelConfig(
    layers=1, width=8, heads=2, kv_heads=1, ffn=12, vocab=31, experts=4, shared_ffn=6, balance_loss=0.3, z_loss=0.2
)
C30 = replace(CFG, experts=2, top_k=1, shared_ffn=0, balance_loss=1.0, z_loss=0.0)
B, S, D = 16, 8, CFG.width
LN9 = 2.1972245773362196

LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2),
    Layout(cp=2),
    Layout(cp=2, ep=2),
    Layout(dp=2, cp=2, ep=2),
    Layout(dp=2, cp=2, ep=4),
    Layout(tp=2),
    Layout(tp=2, dp=2, ep=2),
    Layout(tp=4, dp=2, ep=2),
    Layout(tp=2, cp=2, ep=2),
]
SHARDED = [Layout(tp=2), Layout(tp=4), Layout(tp=2, dp=2, ep=2), Layout(tp=2, cp=2, ep=2), Layout(tp=2, dp=2, cp=2, ep=4)]
CASES = [*((layout, False) for layout in LAYOUTS), *((layout, True) for layout in SHARDED)]


def name(value):
    if isinstance(value, Layout):
        return " ".join(f"{axis}{getattr(value, axis)}" for axis in ("dp", "cp", "tp", "ep") if getattr(value, axis) > 1)
    return {True: "sp", False: "-"}.get(value)


def problem(cfg: ModelConfig):
    """The layer, the hidden states (B,S,D), the weights of the loss's elements and which tokens count: the same everywhere."""
    draw = torch.Generator().manual_seed(0)
    model = Transformer(cfg).double()
    initialise(model, 1)
    x, weigh = torch.randn(2, B, S, D, generator=draw, dtype=torch.float64)
    valid = torch.rand(B, S, generator=draw) < torch.tensor([1.0, 0.9, 0.5, 0.0, 1.0, 0.3, 0.8, 0.6] * 2)[:, None]
    with torch.no_grad():
        for p in model.blocks[0].ffn.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) / p.shape[-1] ** 0.5)
    return model, x, weigh, valid


def c30_problem(cfg: ModelConfig):
    """Half of the rows go to expert 0, the others to expert 1, with probability 0.9. Further experts have probability 0."""
    model, x, weigh, valid = problem(cfg)
    x = torch.zeros_like(x)
    x[: B // 2, :, 0] = x[B // 2 :, :, 1] = LN9
    x[..., 2] = 1.0
    with torch.no_grad():
        router = model.blocks[0].ffn.router.weight
        router.zero_()
        router[0, 0] = router[1, 1] = 1.0
        router[2:, 2] = -800.0
    return model, x, 0.0 * weigh, torch.ones_like(valid)


def train(layer: MoE, x, weigh, valid, count: int, pieces: int):
    """Loads, the result and the gradient of x side by side, gradients of parameters: of rows in `pieces` micro-batches."""
    routings, both = [], []
    for part, w, mask in zip(x.chunk(pieces), weigh.chunk(pieces), valid.chunk(pieces), strict=True):
        part = part.clone().requires_grad_()
        routings.append(Routing(mask))
        y = layer.forward(part, routings[-1])
        routings[-1].factor = 1 / count
        ((y * w).sum() / count).backward()
        both.append(torch.cat((y.detach(), part.grad), -1))
    return balance.loads(routings)[0], torch.cat(both), {n: p.grad for n, p in layer.named_parameters()}


def on_ranks(mesh, make, cfg, sp, pieces, mode="none"):
    """(loads, (this rank's part of x, its y and gradient), replicated gradients, (slice, gradient, owned) of the others)."""
    model, x, weigh, valid = make(cfg)
    expert.apply(model, mesh, sp=sp)
    layer, count = model.blocks[0].ffn, int(valid.sum())
    if mode == "full":
        layer.forward = recompute.partial(recompute.repeated, layer.forward)
    place = []
    for dim, axis in ((0, "dp"), (1, "cp"), *([(1, "tp")] if sp else [])):
        group = mesh.group(axis)
        x, weigh = (part.chunk(group.size, dim)[group.rank] for part in (x, weigh))
        valid = valid if axis == "tp" else valid.chunk(group.size, dim)[group.rank]
        place.append((dim, group.rank, group.size))
    loads, both, grads = train(layer, x, weigh, valid, count, pieces)
    comm.all_reduce(loads, mesh.group("dp_cp"), tag="control")
    whole, parts = {}, []
    for key, grad in grads.items():
        parameter = layer.get_parameter(key)
        comm.all_reduce(grad, mesh.group(getattr(parameter, "over", "dp_cp")), tag="grad")
        if sp and not key.startswith("experts"):
            comm.all_reduce(grad, mesh.group("tp"), tag="grad")
        if hasattr(parameter, "slice"):
            parts.append((parameter.slice, grad, mesh.group(getattr(parameter, "over", "dp_cp")).rank == 0))
        else:
            whole[key] = grad
    return loads, (place, both), whole, parts


def reference(make, cfg):
    model, *rest = make(cfg)
    return train(model.blocks[0].ffn, *rest, int(rest[-1].sum()), 1)


def part_of(x, place):
    for dim, rank, size in place:
        x = x.chunk(size, dim)[rank]
    return x


def check(make, cfg, layout, sp, pieces=1, mode="none", bound=1e-12):
    """Everything that a layer leaves, on the ranks of a layout, against one process."""
    loads, both, grads = reference(make, cfg)
    results = ranks.run(on_ranks, layout.world_size, make, cfg, sp, pieces, mode, layout=layout)
    found = {}
    for found_loads, (place, part), whole, parts in results:
        torch.testing.assert_close(found_loads, loads, rtol=bound, atol=0)
        for found_half, half in zip(part.split(D, -1), both.split(D, -1), strict=True):  # y, and the gradient of x
            assert (found_half - part_of(half, place)).abs().max() <= bound * half.abs().max()
        for key, grad in whole.items():
            assert (grad - grads[key]).abs().max() <= bound * grads[key].abs().max(), key
            assert torch.equal(grad, results[0][2][key]), f"{key} differs between ranks"
        for record, grad, owner in parts:
            key = record.name.removeprefix("blocks.0.ffn.")
            right = slices.extract(record, grads[key]).view(grad.shape)
            assert (grad - right).abs().max() <= bound * grads[key].abs().max(), key
            if owner:
                found.setdefault(key, []).append((record, grad))
    for pieces_of_one in found.values():
        slices.assemble(pieces_of_one)  # refuses what is missing, and what two ranks own
    return loads


@pytest.mark.parametrize(("layout", "sp"), CASES, ids=name)
def test_like_one_process(layout, sp):
    """Values, gradients and loads. The gradients of router and shared expert are equal on all ranks to the bit (C31)."""
    check(problem, CFG, layout, sp)


@pytest.mark.parametrize(
    ("changes", "layout", "sp"),
    [
        ({"top_k": 1}, Layout(dp=2, ep=2), False),
        ({"top_k": 3, "experts": 8}, Layout(tp=2, dp=2, ep=2), True),
        ({"capacity": 0.5}, Layout(dp=2, ep=2), False),
        ({"capacity": 0.5}, Layout(tp=2, dp=2, ep=2), False),
        ({"capacity": 0.5}, Layout(tp=2, dp=2, ep=2), True),
        ({"shared_ffn": 0, "balance_loss": 0.0}, Layout(dp=4, ep=2), False),
    ],
    ids=str,
)
def test_settings(changes, layout, sp):
    loads = check(problem, replace(CFG, **changes), layout, sp)
    assert bool(loads[-3]) == ("capacity" in changes)


@pytest.mark.parametrize(("layout", "sp"), [(Layout(dp=2, ep=2), False), (Layout(tp=2, cp=2, ep=2), True)], ids=name)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_micro_batches_and_recompute(layout, sp, mode):
    check(problem, CFG, layout, sp, pieces=2, mode=mode)


@pytest.mark.parametrize(("layout", "sp"), [(Layout(), False), *CASES], ids=name)
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_c30_in_every_layout(layout, sp, pieces):
    """1.8, the mean over tokens of their rows' losses, and the router's gradient, with nothing else in the loss.

    1.8 is 2 x 0.9; where four ranks need four experts, 4 x 0.9.
    """
    experts = max(2, layout.ep)
    loads = check(c30_problem, replace(C30, experts=experts), layout, sp, pieces)
    assert loads[:2].tolist() == [B * S / 2] * 2 and loads[:experts].sum() == B * S
    assert loads[-2].item() / (B * S) == pytest.approx(0.9 * experts, rel=1e-12)


# C32: gradients of experts, raw


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, ep=2), Layout(dp=4, ep=2), Layout(dp=4, ep=4)], ids=name)
def test_c32_ratio_of_every_expert_is_one(layout):
    """A gradient averaged over the smaller group, or summed over the larger, would be off by the ep size."""
    _, _, grads = reference(problem, CFG)
    results = ranks.run(on_ranks, layout.world_size, problem, CFG, False, 1, layout=layout)
    for key in ("experts.gate", "experts.up", "experts.down"):
        seen = set()
        for _, _, whole, parts in results:
            held = [(0, whole[key])] if layout.ep == 1 else [(r.boxes[0].start[0], g) for r, g, _ in parts if key in r.name]
            for first, grad in held:
                for e, one in enumerate(grad, first):
                    ratio = (one * grads[key][e]).sum() / (grads[key][e] ** 2).sum()
                    assert ratio.item() == pytest.approx(1.0, abs=1e-13)
                    seen.add(e)
        assert seen == set(range(CFG.experts))


# C33: experts and ranks without tokens


def all_to_first(mesh, cfg, pieces):
    """Every token goes to expert 0; what torch allocates without filling it is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        model, x, weigh, valid = problem(cfg)
        expert.apply(model, mesh)
        layer, group = model.blocks[0].ffn, mesh.group("dp")
        layer.router.bias[0] = 100
        x, weigh, mine = (part.chunk(group.size)[group.rank] for part in (x, weigh, valid))
        mesh.tape.clear()
        loads, both, grads = train(layer, x, weigh, mine, int(valid.sum()), pieces)
        sends = [line.shape[0] for line in mesh.tape.select(tag="expert")]
        return loads, both, grads, sends
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("pieces", [1, 2])
def test_c33_all_tokens_to_one_expert(n, pieces):
    cfg = replace(CFG, top_k=1, bias_rate=0.1)
    (one,) = ranks.run(all_to_first, 1, cfg, 1)
    results = ranks.run(all_to_first, n, cfg, pieces, layout=Layout(dp=n, ep=n))
    torch.testing.assert_close(torch.cat([both for _, both, *_ in results]), one[1], rtol=1e-12, atol=1e-18)
    torch.testing.assert_close(sum(loads for loads, *_ in results), one[0], rtol=1e-12, atol=0)
    assert one[0][1 : CFG.experts].tolist() == [0, 0, 0]
    for key in ("gate", "up", "down"):
        held = torch.cat([grads[f"experts.{key}"] for _, _, grads, _ in results])
        torch.testing.assert_close(held, one[2][f"experts.{key}"], rtol=1e-12, atol=1e-18)
        assert held.isfinite().all() and not held[1:].any() and held[0].any()
    rows = (
        B * S // n // pieces
    )  # that a rank sends; rank 0 gets all, the others nothing: rows out, results back, both gradients
    for rank, (*_, sends) in enumerate(results):
        back = rows * n if rank == 0 else 0
        assert sorted(sends) == sorted([rows, back, rows, back] * pieces)


# Bytes


def traffic(mesh, cfg, sp):
    """Bytes sent by tag in forward and backward of one micro-batch, and where this rank's rows go."""
    model, x, _, valid = problem(cfg)
    expert.apply(model, mesh, sp=sp)
    layer = model.blocks[0].ffn
    for dim, axis in ((0, "dp"), (1, "cp")):
        group = mesh.group(axis)
        x, valid = (part.chunk(group.size, dim)[group.rank] for part in (x, valid))
    chosen = layer.router(x)[2]
    tp = mesh.group("tp")
    x = (x.chunk(tp.size, 1)[tp.rank] if sp else x).clone().requires_grad_()
    mesh.tape.clear()
    layer(x, Routing(valid, factor=1.0)).sum().backward()
    each = mesh.group("ep").size
    to = [int((chosen // (cfg.experts // each) == place).sum()) for place in range(each)]
    return {tag: mesh.tape.sent(tag=tag) for tag in ("expert", "control", "act")}, to


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=4, ep=4), Layout(dp=2, cp=2, ep=4)], ids=name)
def test_bytes_of_the_routing(layout):
    """2 D e sum (n_ij + n_ji), to the byte; beside it one count for each expert, and the statistics of rows over cp."""
    results = ranks.run(traffic, layout.world_size, CFG, False, layout=layout)
    n, rows = layout.ep, B // layout.dp
    to = [sent for _, sent in results]
    assert len({tuple(sent) for sent in to}) > 1  # the routing is uneven, and not the same everywhere
    for i, (sent, _) in enumerate(results):
        others = [j for j in range(n) if j != i]
        assert sent["expert"] == 2 * D * 8 * sum(to[i][j] + to[j][i] for j in others)
        counts = (n - 1) * CFG.experts // n * 8
        statistics = layout.cp > 1 and 2 * (layout.cp - 1) / layout.cp * rows * (2 * CFG.experts + 3) * 8
        assert sent["control"] == counts + statistics
        assert sent["act"] == 0


@pytest.mark.parametrize("sp", [False, True], ids=name)
@pytest.mark.parametrize("n", [2, 4])
def test_bytes_over_tp(n, sp):
    """Of x and the weights, (n-1)/n each way: 2 for an all-reduce, 1 for a gather and 1 for a scatter. Choices are integers."""
    for sent, _ in ranks.run(traffic, n, replace(CFG, shared_ffn=0), sp, layout=Layout(tp=n)):
        x, weights, chosen = B * S * D * 8, B * S * CFG.top_k * 8, B * S * CFG.top_k * 8
        assert sent["act"] * n == (n - 1) * (2 * (2 * x + weights) + (chosen if sp else 0))
        assert sent["expert"] == 0


DRY = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from minidist.core.fake import connect_fake
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.model.balance import Routing
from minidist.model.config import ModelConfig
from minidist.model.transformer import Transformer
from minidist.parallel import expert

connect_fake(5, 64)
mesh = Mesh(Layout(dp=8, cp=2, tp=4, ep=8), rank=5)
cfg = ModelConfig(layers=1, width=8, heads=2, kv_heads=1, ffn=12, vocab=31, experts=16, balance_loss=0.1, bias_rate=0.1)
for shards in (1, 4):
    with FakeTensorMode():
        model = Transformer(cfg)
        expert.apply(model, mesh, sp=shards > 1)
        x = torch.empty(2, 16 // shards, 8, requires_grad=True)
        model.blocks[0].ffn(x, Routing(torch.ones(2, 16, dtype=torch.bool), factor=1.0)).sum().backward()
    assert x.grad.shape == x.shape and model.blocks[0].ffn.experts.gate.grad.shape == (2, 3, 8)
print(mesh.tape.sent(tag="expert"))
"""


def test_a_dry_run_spreads_tokens_evenly():
    """Rank 5 of 64 on tensors without values: 4 N D e (n - 1) / n, for N = 2 x 16 x 2 rows in fp32, twice."""
    done = subprocess.run([sys.executable, "-c", DRY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (4 * 64 * 8 * 4 * 7 // 8)


# Refusals


def refused(mesh, cfg):
    with pytest.raises(ValueError, match=r"capacity = 1.0 with layout.cp = 2.*whole rows"):
        expert.apply(Transformer(cfg), mesh)
    return True


def test_capacity_is_refused_with_context_parallelism():
    assert all(ranks.run(refused, 2, replace(CFG, capacity=1.0), layout=Layout(cp=2)))


def meta(mesh, cfg):
    """On the meta device: parameters stay there, the bias does not; each rank's slice is its own."""
    with torch.device("meta"):
        model = Transformer(cfg)
    expert.apply(model, mesh)
    layer = model.blocks[0].ffn
    assert layer.experts.down.is_meta and layer.experts.down.shape == (2, 8, 6)
    assert layer.experts.down.over == "expert_dp" and not hasattr(layer.router.weight, "over")
    assert layer.router.bias.tolist() == [0] * 4
    box = layer.experts.down.slice.boxes[0]
    return layer.experts.down.slice.name, box.start, box.stop


def test_slices_on_the_meta_device():
    layout = Layout(tp=2, dp=4, ep=2)
    found = ranks.run(meta, 8, replace(CFG, bias_rate=0.1), layout=layout)
    for rank, record in enumerate(found):
        e, f = layout.group_of("ep", rank).index(rank) * 2, rank % 2 * 6
        assert record == ("blocks.0.ffn.experts.down", (e, 0, f), (e + 2, 8, f + 6))
