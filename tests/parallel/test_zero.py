"""Stage 0 on small models made for one fault each: C01, C02, C08, frozen, tied, tiny and unused parameters, overlap, bytes."""

import pytest
import torch
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.parallel.units import units_of
from minidist.parallel.zero import Zero


def backward(zero, losses):
    """A step over micro-batches given as functions of nothing that return a loss; the gradients by name."""
    zero.start_step()
    for i, loss in enumerate(losses):
        zero.before_backward(last=i == len(losses) - 1)
        loss().backward()
    zero.finish()
    return {name: p.grad.clone() for name, p in zero.model.named_parameters()}


# C01: sums of sums, never means of means


def ragged(mesh, pieces):
    """A loss of 8 on one token and of 1 on seven others, cut into `pieces` of token losses, one or several a rank."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    zero = Zero(model, mesh.group("dp_cp"))
    mine = pieces[mesh.rank :: mesh.world_size]
    tokens = sum(len(piece) for piece in pieces)
    losses = [lambda p=p: model(torch.tensor(p, dtype=torch.float64)[:, None]).sum() / tokens for p in mine]
    return backward(zero, losses)["weight"].item()


@pytest.mark.parametrize("cut", [[[8.0], [1.0] * 7], [[8.0, 1.0], [1.0] * 6], [[8.0] + [1.0] * 3, [1.0] * 4]])
@pytest.mark.parametrize("n", [1, 2])
def test_unequal_pieces_weigh_by_their_tokens(cut, n):
    assert ranks.run(ragged, n, cut) == pytest.approx([15 / 8] * n, abs=1e-10)  # a mean of means gives 4.5 for the first cut


# C02: one reduction a unit and step, whatever the accumulation


def accumulated(mesh, micro):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    zero = Zero(model, mesh.group("dp_cp"))
    mesh.tape.clear()
    found = [
        backward(zero, [lambda: model(torch.tensor([[mesh.rank + 1.0]])).sum()] * micro)["weight"].item() for _ in range(3)
    ]
    return found, mesh.tape.calls(tag="grad")


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_one_reduction_a_step_after_the_last_micro_batch(micro):
    """Inputs 1 and 2: the sum over ranks and micro-batches is 3 x micro, in every window."""
    assert ranks.run(accumulated, 2, micro) == [([3.0 * micro] * 3, 3)] * 2


# C08: branches that some ranks take


class Branches(nn.Module):
    """Two branches and a trunk; which branches run, and how often, is up to the caller."""

    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x, a=0, b=0):
        x = self.trunk(x)
        for _ in range(a):
            x = self.a(x).tanh()
        for _ in range(b):
            x = self.b(x).tanh()
        return x.sum()


def branching(mesh, plan):
    torch.manual_seed(0)
    model = Branches()
    zero = Zero(model, mesh.group("dp_cp"))
    inputs = [torch.full((2, 3), rank + 1.0, dtype=torch.float64) for rank in range(len(plan))]
    mine = range(mesh.rank, len(plan), mesh.world_size)
    return backward(zero, [lambda r=r: model(inputs[r], *plan[r]) for r in mine])


@pytest.mark.parametrize(
    "plan",
    [
        [(1, 1), (1, 0)],  # rank 0 runs b, rank 1 does not
        [(1, 0), (0, 1)],  # each a branch of its own
        [(1, 0), (1, 0)],  # nobody runs b
        [(0, 0), (0, 0)],  # neither
        [(0, 1), (0, 3)],  # once against three times
    ],
)
def test_branches_taken_by_some_ranks(plan):
    one = ranks.run(branching, 1, plan)[0]
    for found in ranks.run(branching, 2, plan):
        for name in one:
            torch.testing.assert_close(found[name], one[name], rtol=0, atol=1e-12)


# Parameters of every awkward kind


class Awkward(nn.Module):
    """A tied weight, a frozen one, a scalar, three elements, none at all, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.inner.weight.requires_grad = False
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)) * self.scale + self.empty.sum()).square().sum()


def awkward(mesh, n):
    torch.manual_seed(mesh.rank)  # replicas that start apart are brought together
    model = Awkward().double()
    zero = Zero(model, mesh.group("dp_cp"))
    frozen = model.inner.weight.clone()
    mine = list(range(n))[mesh.rank :: mesh.world_size]
    zero.start_step()
    for i, sample in enumerate(mine):
        zero.before_backward(last=i == len(mine) - 1)
        model(torch.tensor([sample, sample + 1])).backward()
    zero.finish()
    assert model.head.weight is model.embedding.weight and model.inner.weight.grad is None
    assert torch.equal(frozen, model.inner.weight)
    return {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}, [unit.name for unit in zero.units]


@pytest.mark.parametrize("n", [2, 4])
def test_tied_frozen_scalar_empty_and_unused_parameters(n):
    torch.manual_seed(0)
    model = Awkward().double()
    sum(model(torch.tensor([sample, sample + 1])) for sample in range(n)).backward()
    for found, units in ranks.run(awkward, n, n):
        assert "tied embedding.weight" in units and "inner (frozen)" in units
        for name, p in model.named_parameters():
            weight, grad = found[name]
            assert torch.equal(weight, p.detach()), name
            if p.requires_grad:
                expected = p.grad if p.grad is not None else torch.zeros_like(p)
                torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_units_of_a_transformer():
    from minidist.model.config import ModelConfig
    from minidist.model.transformer import Transformer

    cfg = {"layers": 2, "width": 8, "heads": 2, "kv_heads": 1, "ffn": 8, "vocab": 8}
    assert list(units_of(Transformer(ModelConfig(**cfg)))) == ["embedding", "blocks.0", "blocks.1", "head"]
    assert units_of(Transformer(ModelConfig(**cfg)))["head"] == ["norm.weight", "head.weight"]
    tied = units_of(Transformer(ModelConfig(**cfg, tied=True)))
    assert list(tied) == ["tied embedding.weight", "blocks.0", "blocks.1", "head"] and tied["head"] == ["norm.weight"]


# Overlap and bytes


def deep(mesh):
    """Eight layers of 40 x 40: which gradient was there when each reduction was launched?"""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(8))})
    zero = Zero(model, mesh.group("dp_cp"))
    seen = []
    for i, layer in enumerate(model["blocks"]):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: seen.append((i, mesh.tape.calls(tag="grad"))))
    mesh.tape.clear()
    zero.start_step()
    zero.before_backward(last=True)
    x = torch.ones(1, 40)
    for layer in model["blocks"]:
        x = layer(x)
    x.sum().backward()
    before_finish = mesh.tape.calls(tag="grad")
    zero.finish()
    return seen, before_finish, mesh.tape


@pytest.mark.parametrize("n", [2, 3, 4])
def test_reductions_start_while_backward_runs_and_send_what_the_ring_sends(n):
    for seen, before_finish, tape in ranks.run(deep, n):
        assert [i for i, _ in seen] == list(range(7, -1, -1))
        assert [calls for _, calls in seen] == list(range(1, 9)), "a layer's reduction starts when its gradient is there"
        assert before_finish == 8
        padded = -(-1600 // n) * n  # elements of a layer, up to a multiple of n
        assert tape.sent(tag="grad") == 8 * 2 * (n - 1) * padded * 4 // n


# Refusals


def two_backwards(mesh):
    model = nn.Linear(2, 2)
    zero = Zero(model, mesh.group("dp_cp"))
    zero.start_step()
    zero.before_backward(last=True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of (weight|bias) grew after (weight|bias) had been reduced"):
        model(torch.ones(1, 2)).sum().backward()
    zero.finish()


def test_a_gradient_that_comes_after_its_reduction_is_an_error_not_a_wrong_number():
    ranks.run(two_backwards, 2)


def test_refusals():
    mesh = Mesh(Layout())
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        Zero(nn.ReLU(), mesh.world)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="pass fill="):
        Zero(model, mesh.world)
    zero = Zero(nn.Linear(2, 2), mesh.world)
    zero.model.zero_grad()
    zero.before_backward(last=True)
    with pytest.raises(RuntimeError, match=r"zero gradients by start_step\(\)"):
        zero.model(torch.ones(1, 2)).sum().backward()
