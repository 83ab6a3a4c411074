"""Balance loss, z-loss and selection bias: values by hand, gradients, and no dependence on how rows are grouped (C30)."""

from dataclasses import replace

import pytest
import torch

from minidist.model import balance
from minidist.model.balance import Routing
from minidist.model.config import ModelConfig
from minidist.model.loss import IGNORE, loss_sum
from minidist.model.moe import MoE, clear_bias, rebalance
from minidist.model.transformer import Transformer, initialise
from minidist.parallel import recompute
from minidist.parallel.config import Recompute

CFG = ModelConfig(layers=2, width=8, heads=2, kv_heads=1, ffn=12, vocab=31, experts=4, balance_loss=0.3, z_loss=0.2)
LN9 = 2.1972245773362196  # logits 0 and ln 9 are probabilities 0.1 and 0.9


def c30(**changes) -> tuple[MoE, torch.Tensor]:
    """Two experts, top 1: all tokens of row 0 go to expert 0 and all of row 1 to expert 1, each with probability 0.9."""
    settings = {"experts": 2, "top_k": 1, "balance_loss": 1.0, "z_loss": 0.0, **changes}
    layer = MoE(replace(CFG, **settings), 0).double()
    x = torch.zeros(2, 5, 8, dtype=torch.float64)
    x[0, :, 0] = x[1, :, 1] = LN9
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.router.weight[0, 0] = layer.router.weight[1, 1] = 1.0
    return layer, x.requires_grad_()


def run(layer: MoE, x: torch.Tensor, valid: torch.Tensor, pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loads (E+3,) and the router's gradient, the rows cut into `pieces` micro-batches, with no other loss."""
    layer.zero_grad()
    routings = []
    for part, mask in zip(x.chunk(pieces), valid.chunk(pieces), strict=True):
        routing = Routing(mask)
        y = layer(part, routing)
        routing.factor = 1 / int(valid.sum())
        (0.0 * y.sum()).backward()
        routings.append(routing)
    return balance.loads(routings)[0], layer.router.weight.grad.clone()


@pytest.mark.parametrize("pieces", [1, 2])
def test_c30(pieces):
    layer, x = c30()
    loads, _ = run(layer, x, torch.ones(2, 5, dtype=torch.bool), pieces)
    assert loads[:4].tolist() == pytest.approx([5, 5, 0, 18], rel=1e-12)
    assert loads[3] / 10 == pytest.approx(1.8, rel=1e-12)  # the mean over tokens of their rows' losses


def test_a_row_counts_as_often_as_it_has_valid_tokens():
    """Row 0 even (1.0) with one valid token, row 1 all to one expert (1.8) with four: (1 x 1.0 + 4 x 1.8) / 5."""
    layer, x = c30()
    x = x.detach().clone()
    x[0] = 0.0  # both logits equal: probabilities 0.5, and whatever is chosen the loss is 1
    valid = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    loads, _ = run(layer, x.requires_grad_(), valid, 1)
    assert loads[:2].sum() == 5
    assert loads[3] / 5 == pytest.approx((1.0 + 4 * 1.8) / 5, rel=1e-12)
    assert loads[3] / 5 == pytest.approx(1.64, rel=1e-12)


def test_an_empty_micro_batch_counts_nothing():
    layer, x = c30(z_loss=1.0)
    loads, grad = run(layer, x, torch.zeros(2, 5, dtype=torch.bool) | torch.tensor([[True], [False]]), 2)
    assert loads[:4].tolist() == pytest.approx([5, 0, 0, 9])
    routing = Routing(torch.zeros(2, 5, dtype=torch.bool), factor=1.0)
    layer(x, routing).sum().backward()
    assert not routing.loads[0].any()
    assert layer.router.weight.grad.isfinite().all() and torch.allclose(layer.router.weight.grad, grad)  # nothing came on top


def test_z_loss_by_hand():
    """log(1 + 9)^2 for every token that counts."""
    layer, x = c30(z_loss=1.0)
    loads, _ = run(layer, x, torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool), 1)
    assert loads[4] == pytest.approx(4 * 2.302585092994046**2, rel=1e-12)


def test_dropped_choices_are_counted_where_they_count():
    """Room for ceil(0.8 x 5 x 1 / 2) = 2 tokens: the last three of each row are dropped, of which two count in row 1."""
    layer, x = c30(capacity=0.8)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 4] = False
    loads, _ = run(layer, x, valid, 1)
    assert loads[:3].tolist() == [5, 4, 5]


def whole_loss(layer: MoE, x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Both router losses of the batch from their definitions, row by row, divided once."""
    total = 0.0
    for row, mask in zip(x, valid, strict=True):
        logits = row[mask] @ layer.router.weight.T
        probs, n = logits.softmax(-1), len(logits)
        if n:
            share = torch.zeros(layer.cfg.experts, dtype=x.dtype)
            for best in probs.detach().topk(layer.cfg.top_k).indices:
                share[best] += 1 / (n * layer.cfg.top_k)
            total = total + n * layer.cfg.balance_loss * layer.cfg.experts * (share * probs.mean(0)).sum()
            total = total + layer.cfg.z_loss * (logits.exp().sum(-1).log() ** 2).sum()
    return total / int(valid.sum())


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_gradient_is_that_of_the_definition(top_k, pieces):
    """Attached layer by layer and micro-batch by micro-batch, the router's gradient is that of one loss of the whole batch."""
    draw = torch.Generator().manual_seed(0)
    layer = MoE(replace(CFG, top_k=top_k), 0).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype))
    x = torch.randn(4, 6, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    valid = torch.rand(4, 6, generator=draw) < torch.tensor([1.0, 0.7, 0.3, 0.0])[:, None]
    _, found = run(layer, x, valid, pieces)
    found_x = x.grad
    right, right_x = torch.autograd.grad(whole_loss(layer, x, valid), (layer.router.weight, x))
    assert (found - right).abs().max() < 1e-13 * right.abs().max()
    assert (found_x - right_x).abs().max() < 1e-13 * right_x.abs().max()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(31, (4, 10), generator=torch.Generator().manual_seed(4))
    targets = ids[:, 1:].clone()
    targets[1, :5] = targets[3, 2:] = IGNORE
    return ids[:, :-1], targets


def model(cfg: ModelConfig = CFG) -> Transformer:
    made = Transformer(cfg).double()
    initialise(made, 1)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(8.0)
    return made


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_whole_model_in_pieces(pieces, mode):
    """Gradients and loads of a step do not depend on micro-batches; with recompute, nothing is counted in a re-run."""
    tokens, targets = batch()
    count = int((targets != IGNORE).sum())

    def step(made, pieces):
        routings = []
        for ids, wanted in zip(tokens.chunk(pieces), targets.chunk(pieces), strict=True):
            routings.append(Routing(wanted != IGNORE))
            loss = loss_sum(made(ids, routing=routings[-1]), wanted)
            routings[-1].factor = 2.0 / count  # 2.0: a loss scale
            (loss / count * 2.0).backward()
        return balance.loads(routings), {name: p.grad for name, p in made.named_parameters()}

    plain, again = model(), model()
    recompute.apply(again, Recompute(mode))
    (loads, grads), (found, found_grads) = step(plain, 1), step(again, pieces)
    assert loads[:, :4].sum(1).tolist() == [count * 2.0] * 2
    torch.testing.assert_close(found, loads, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        assert (found_grads[name] - grad).abs().max() < 1e-12 * grad.abs().max(), name


def test_without_routing_there_is_no_loss_and_no_count():
    """Evaluation: the same values, and the gradient of nothing but the loss."""
    tokens, targets = batch()
    made = model()
    routing = Routing(targets != IGNORE, factor=0.0)
    with torch.no_grad():
        assert torch.equal(made(tokens), made(tokens, routing=routing))
    weight = made.blocks[0].ffn.router.weight
    plain = torch.autograd.grad(loss_sum(made(tokens), targets), weight)[0]
    routing.factor = 1.0
    attached = torch.autograd.grad(loss_sum(made(tokens, routing=routing), targets), weight)[0]
    assert not torch.allclose(plain, attached)
    made.cfg = replace(CFG, balance_loss=0.0, z_loss=0.0)
    bare = model(made.cfg)
    without = torch.autograd.grad(loss_sum(bare(tokens, routing=routing), targets), bare.blocks[0].ffn.router.weight)[0]
    assert torch.equal(plain, without)


# The selection bias


def test_bias_moves_against_the_load_and_only_there():
    """10, 2, 6, 6 of 24 choices: the first falls, the second rises, those with their share stay."""
    made = Transformer(replace(CFG, bias_rate=0.1))
    initialise(made, 1)
    loads = torch.tensor([[10.0, 2, 6, 6, 0, 0, 0], [6, 6, 6, 6, 0, 0, 0]], dtype=torch.float64)
    for _ in range(300):
        rebalance(made, loads)
    made.to(torch.bfloat16)  # in which 300 tenths could not be said
    assert made.blocks[0].ffn.router.bias.tolist() == [-300, 300, 0, 0]
    assert made.blocks[1].ffn.router.bias.tolist() == [0] * 4
    clear_bias(made)
    assert made.blocks[0].ffn.router.bias.tolist() == [0] * 4


def test_bias_chooses_and_weighs_nothing():
    """Where it changes no choice, it changes nothing; where it does, weights are still those of the probabilities."""
    layer, x = c30(bias_rate=0.1)
    layer.router.bias[1] = 7
    chosen = layer.router(x)[2]
    assert chosen[0].unique().tolist() == [0]  # 0.9 against 0.1 + 0.7
    layer.router.bias[1] = 9
    _, probs, chosen, weights = layer.router(x)
    assert chosen.unique().tolist() == [1]
    assert torch.equal(weights, probs[..., 1:]) and weights[0, 0, 0].item() == pytest.approx(0.1)


def test_bias_evens_out_a_skewed_router():
    """A router that sends nine tokens of ten to one expert is at an even load after some hundred steps."""
    draw = torch.Generator().manual_seed(0)
    layer = MoE(replace(CFG, experts=4, top_k=1, bias_rate=0.01), 0)
    host = torch.nn.ModuleList([layer])
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
        layer.router.weight[0] = 0.0
        layer.router.weight[0, 0] = 2.0
    x = torch.randn(8, 64, 8, generator=draw)
    x[..., 0] += 1.5
    shares = []
    for _ in range(150):
        routing = Routing(torch.ones(8, 64, dtype=torch.bool))
        with torch.no_grad():
            layer(x, routing)
        loads = balance.loads([routing])
        shares.append((loads[0, :4].max() * 4 / 512).item())
        rebalance(host, loads)
    assert shares[0] > 1.8 and max(shares[-10:]) < 1.3
