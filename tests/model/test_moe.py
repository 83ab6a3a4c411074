"""Mixture of experts against a loop over tokens that knows nothing of sorting, and its two products against each other."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from minidist.core import device
from minidist.core.slices import Slice
from minidist.model import moe
from minidist.model.config import ModelConfig
from minidist.model.moe import MoE, groupable, grouped, looped, within
from minidist.model.transformer import Transformer, initial, initialise

CFG = ModelConfig(layers=2, width=8, heads=2, kv_heads=1, ffn=12, vocab=31, experts=4, top_k=2)
VARIANTS = [
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 4},
    {"shared_ffn": 6},
    {"capacity": 0.5},
    {"capacity": 0.6, "top_k": 3},
    {"bias_rate": 0.25},
]


def layer(cfg: ModelConfig = CFG, seed: int = 0) -> MoE:
    """The second block's layer in float64, its weights large enough for uneven choices."""
    model = Transformer(replace(cfg)).double()
    initialise(model, seed=1)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.blocks[1].ffn.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) / p.shape[-1] ** 0.5)
        if cfg.bias_rate:
            model.blocks[1].ffn.router.bias.copy_(torch.tensor([2, -2, 0, 1]))
    return model.blocks[1].ffn


def hidden(rows: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, CFG.width, generator=draw, dtype=torch.float64, requires_grad=True)


def swiglu(x, gate, up, down):
    return down @ (F.silu(gate @ x) * (up @ x))


def by_tokens(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """The same result (B,S,D), one token and one expert after another."""
    cfg, experts, rows = layer.cfg, layer.experts, []
    for row in x:
        room, tokens = [moe.limit(cfg, len(row)) if cfg.capacity else len(row)] * cfg.experts, []
        for token in row:
            scores = (layer.router.weight @ token).exp()
            probs = scores / scores.sum()
            wish = [
                float(p) + (int(layer.router.bias[e]) * cfg.bias_rate if cfg.bias_rate else 0.0)
                for e, p in enumerate(probs.detach())
            ]
            best = sorted(range(cfg.experts), key=lambda e: -wish[e])[: cfg.top_k]
            total = sum(probs[e] for e in best) if cfg.top_k > 1 else 1.0
            y = token * 0.0
            for e in best:
                if room[e]:
                    room[e] -= 1
                    y = y + probs[e] / total * swiglu(token, experts.gate[e], experts.up[e], experts.down[e])
            if cfg.shared_ffn:
                y = y + swiglu(token, *(getattr(layer.shared, key).weight for key in ("gate", "up", "down")))
            tokens.append(y)
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def gradients(layer: MoE, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {"x": x, **dict(layer.named_parameters())}
    weigh = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return dict(zip(named, torch.autograd.grad((y * weigh).sum(), list(named.values())), strict=True))


def assert_close(a: torch.Tensor, b: torch.Tensor, bound: float = 1e-12) -> None:
    assert (a - b).abs().max() <= bound * b.abs().max()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_like_a_loop_over_tokens(changes):
    """Values and every gradient, float64."""
    moe_layer, x = layer(replace(CFG, **changes)), hidden()
    y, expected = moe_layer(x), by_tokens(moe_layer, x)
    assert_close(y, expected)
    found, right = gradients(moe_layer, x, y), gradients(moe_layer, x, expected)
    for name in right:
        assert_close(found[name], right[name])


def test_one_expert_for_all_tokens():
    """Three of four experts have no token: they get zero gradients, and nothing is NaN."""
    moe_layer, x = layer(replace(CFG, top_k=1)), hidden()
    with torch.no_grad():
        moe_layer.router.weight.zero_()
        moe_layer.router.weight[2] = 100.0 * x.detach().mean((0, 1))
        x.copy_(x.detach().mean((0, 1)).expand_as(x) + 0.01 * x)
    y = moe_layer(x)
    assert_close(y, by_tokens(moe_layer, x))
    for name, grad in gradients(moe_layer, x, y).items():
        assert grad.isfinite().all()
        if name.startswith("experts"):
            assert not grad[[0, 1, 3]].any() and grad[2].any()


# The two kinds of product

SIZES = [[3, 0, 4, 5], [0, 0, 0, 12], [12, 0, 0, 0], [1, 2, 3, 6]]


def pair(sizes, dtype, inner=16, outer=24):
    draw = torch.Generator().manual_seed(3)
    rows, weights, grad = (
        torch.randn(*shape, generator=draw).to(dtype)
        for shape in ((sum(sizes), inner), (len(sizes), outer, inner), (sum(sizes), outer))
    )
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    results = []
    for product in (partial(looped, sizes=sizes), partial(grouped, ends=ends)):
        a, b = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        assert groupable(a, b)
        y = product(a, b)
        y.backward(grad)
        results.append((y.detach(), a.grad, b.grad))
    return results


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)], ids=str)
def test_grouped_like_looped(sizes, dtype, bound):
    """Result and both gradients; experts without rows get zeros."""
    for found, right in zip(*reversed(pair(sizes, dtype)), strict=True):
        assert_close(found.float(), right.float(), bound)


def test_what_torchs_grouped_product_does_not_take_is_looped():
    rows, weights = torch.zeros(6, 16), torch.zeros(2, 24, 16)
    assert groupable(rows, weights)
    assert not groupable(rows.double(), weights.double())
    assert not groupable(torch.zeros(6, 6), torch.zeros(2, 24, 6))  # 24 bytes a row
    assert not groupable(rows, torch.zeros(2, 6, 16))
    assert not groupable(rows, torch.zeros(2 * 24 * 16 + 1)[1:].view(2, 24, 16))  # begins at byte 4
    assert not groupable(rows[:0], weights)
    assert not groupable(rows.to("meta"), weights)


def test_a_layer_uses_the_grouped_product_and_says_the_same(monkeypatch):
    cfg = replace(CFG, width=16, ffn=24)
    experts, calls = moe.Experts(cfg), []
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    monkeypatch.setattr(moe, "grouped", lambda *args, grouped=grouped, **kw: calls.append(1) or grouped(*args, **kw))
    rows, counts = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([4, 0, 2, 3])
    found = experts(rows, counts)
    assert len(calls) == 3
    monkeypatch.setattr(moe, "groupable", lambda *_: False)
    assert_close(found, experts(rows, counts), 1e-6)
    assert len(calls) == 3


# Capacity


def test_known_drops():
    """Room for two tokens a row and expert: the third of row 0 that asks for expert 0 is dropped, rows count apart."""
    chosen = torch.tensor([[[0, 1], [0, 2], [2, 0], [1, 2]], [[0, 1], [1, 0], [3, 2], [3, 2]]])
    kept = torch.tensor([[[0, 1], [0, 2], [2, 4], [1, 4]], [[0, 1], [1, 0], [3, 2], [3, 2]]])
    assert torch.equal(within(chosen, 4, 2), kept)
    assert (within(chosen, 4, 1) == 4).sum() == 9  # of 8 choices in each row, 3 and 4 find room
    assert torch.equal(within(chosen, 4, 3), chosen)


@pytest.mark.parametrize(("capacity", "room"), [(1.0, 4), (0.5, 2), (0.26, 2), (1.25, 5), (4.0, 16)])
def test_room_of_an_expert(capacity, room):
    """8 tokens x 2 choices over 4 experts: 4 each where they are even; rounded up."""
    assert moe.limit(replace(CFG, capacity=capacity), 8) == room


def test_nothing_is_dropped_where_there_is_room_for_all():
    x = hidden()
    assert torch.equal(layer(replace(CFG, capacity=2.0))(x), layer()(x))


# The whole model


def test_parameters_and_what_they_start_from():
    cfg = replace(CFG, shared_ffn=6, bias_rate=0.1)
    with torch.device("meta"):
        model = Transformer(cfg)
    shapes = {n.removeprefix("blocks.1.ffn."): tuple(p.shape) for n, p in model.named_parameters() if "1.ffn." in n}
    assert shapes == {
        "router.weight": (4, 8),
        "experts.gate": (4, 12, 8),
        "experts.up": (4, 12, 8),
        "experts.down": (4, 8, 12),
        "shared.gate.weight": (6, 8),
        "shared.up.weight": (6, 8),
        "shared.down.weight": (8, 6),
    }
    for name in shapes:
        assert initial(f"blocks.1.ffn.{name}", cfg) == pytest.approx(0.01 if "down" in name else 0.02)  # sqrt(2 x 2 layers)
    model = model.to_empty(device="cpu")
    initialise(model, 5)
    again = Transformer(replace(cfg, layers=2, bias_rate=0.0))
    initialise(again, 5)
    for name, p in again.named_parameters():  # names alone decide
        assert torch.equal(p, model.get_parameter(name))
        assert p.any()
    assert [name for name, _ in model.named_buffers()] == [f"blocks.{i}.ffn.router.bias" for i in range(2)]
    assert not any(b.any() for b in model.buffers()) and not list(again.buffers())


def test_a_model_learns_and_its_experts_share_the_work():
    """The loss of a fixed batch falls, and every expert has a gradient."""
    model = Transformer(replace(CFG, shared_ffn=6)).double()
    initialise(model, 2)
    tokens = torch.randint(31, (4, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 2.0 * p.grad
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    assert all(model.blocks[0].ffn.experts.down.grad.abs().amax((1, 2)) > 0)


def test_a_dry_run_spreads_tokens_evenly(monkeypatch):
    """On tensors without values, 2 x 7 tokens x 2 choices are 28 rows: 7 for each of the 4 experts, and none is dropped."""
    seen = []
    monkeypatch.setattr(moe, "host", lambda x, expect: seen.append(expect) or device.host(x, expect=expect))
    with FakeTensorMode():
        model = Transformer(replace(CFG, capacity=1.0))
        model(torch.zeros(2, 7, dtype=torch.int64)).sum().backward()
        assert model.blocks[0].ffn.experts.gate.grad.shape == (4, 12, 8)
    assert seen == [0, [7] * 4] * 2
    assert moe.even(11, 4) == [3, 3, 3, 2]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts": 4, "top_k": 5}, r"top_k=5.*experts=4"),
        ({"experts": 4, "top_k": 0}, r"top_k=0.*experts=4"),
        ({"experts": -1}, r"experts=-1.*at least 0"),
        ({"experts": 0, "top_k": 3}, r"top_k=3 with experts=0.*leave it out"),
        ({"experts": 0, "shared_ffn": 8}, r"shared_ffn=8 with experts=0"),
        ({"experts": 0, "capacity": 1.5}, r"capacity=1.5 with experts=0"),
        ({"experts": 0, "balance_loss": 0.1}, r"balance_loss=0.1 with experts=0"),
        ({"experts": 0, "z_loss": 0.1}, r"z_loss=0.1 with experts=0"),
        ({"experts": 0, "bias_rate": 0.1}, r"bias_rate=0.1 with experts=0"),
        ({"capacity": -1.0}, r"capacity=-1.0.*at least 0"),
        ({"z_loss": float("nan")}, r"z_loss=nan.*finite"),
        ({"balance_loss": float("inf")}, r"balance_loss=inf.*finite"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(changes, says):
    settings = {key: value for key, value in vars(CFG).items() if key not in ("experts", "top_k")}
    with pytest.raises(ValueError, match=says):
        ModelConfig(**{**settings, "experts": 4, **changes})


def test_slices_of_experts_are_drawn_alike():
    """Any cut of a stacked parameter starts from the same numbers: expert 2's box alone."""
    from minidist.core.slices import Box
    from minidist.parallel.parallelize import draw

    model = Transformer(CFG)
    initialise(model, 7)
    name, whole = "blocks.0.ffn.experts.gate", model.blocks[0].ffn.experts.gate
    box = Slice(name, tuple(whole.shape), (Box((2, 4, 0), (3, 12, 8)),))
    assert torch.equal(draw(box, CFG, 7).view(1, 8, 8), whole[2:3, 4:12])
