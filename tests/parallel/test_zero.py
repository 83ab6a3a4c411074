"""Stages 0-3 on small models made for one fault each: C01-C03, C08, C22, frozen, tied and unused parameters, refusals."""

import pytest
import torch
from parity.harness import whole
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.parallel import units as parallel_units
from minidist.parallel.units import Formats, units_of
from minidist.parallel.zero import Zero

STAGES = [0, 1, 2, 3]


def make(mesh, model, stage, **options):
    """The runtime over all ranks; at stage 3 weights travel on a connection of their own."""
    return Zero(model, mesh.world, stage=stage, gathers=mesh.twin("world") if stage == 3 else None, **options)


def backward(zero, losses):
    """A step over micro-batches given as functions of nothing that return a loss; what this rank holds of the gradients."""
    zero.start_step()
    for i, loss in enumerate(losses):
        zero.before_backward(last=i == len(losses) - 1)
        loss().backward()
        zero.after_backward()
    zero.finish()
    return [(record, local.clone()) for record, local in zero.gradients()]


def joined(results):
    """Whole tensors by name from what each rank holds."""
    return whole([(held,) for held in results], 0)


# C01: sums of sums, never means of means


def ragged(mesh, stage, pieces):
    """A loss of 8 on one token and of 1 on seven others, cut into `pieces` of token losses, one or several a rank."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    zero = make(mesh, model, stage)
    mine = pieces[mesh.rank :: mesh.world_size]
    tokens = sum(len(piece) for piece in pieces)
    losses = [lambda p=p: model(torch.tensor(p, dtype=torch.float64)[:, None]).sum() / tokens for p in mine]
    return backward(zero, losses)


@pytest.mark.parametrize("cut", [[[8.0], [1.0] * 7], [[8.0, 1.0], [1.0] * 6], [[8.0] + [1.0] * 3, [1.0] * 4]])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_unequal_pieces_weigh_by_their_tokens(stage, cut, n):
    found = joined(ranks.run(ragged, n, stage, cut))["weight"].item()
    assert found == pytest.approx(15 / 8, abs=1e-10)  # a mean of means gives 4.5 for the first cut


# C02 and C03: when gradients are reduced, and that all micro-batches are in the sum


def accumulated(mesh, stage, micro):
    """Three steps of micro-batches with inputs 1, 2, ... on rank 0, and ten times that on rank 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    zero, found = make(mesh, model, stage), []
    mesh.tape.clear()
    for _ in range(3):
        inputs = [torch.tensor([[10.0**mesh.rank * (i + 1)]]) for i in range(micro)]
        found.append(backward(zero, [lambda x=x: model(x).sum() for x in inputs]))
    return found, mesh.tape.calls(tag="grad")


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_every_micro_batch_is_in_the_sum_in_every_step(stage, micro):
    """C03: 1 + 2 + 3 + 4 = 10 and not 4 or 1, in all three windows; C02: reduced once a step, or once a backward."""
    results = ranks.run(accumulated, 2, stage, micro)
    for window in range(3):
        total = joined([found[window] for found, _ in results])["weight"].item()
        assert total == 11 * micro * (micro + 1) / 2
    assert [calls for _, calls in results] == [3 if stage < 2 else 3 * micro] * 2


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


def branching(mesh, stage, plan):
    torch.manual_seed(0)
    model = Branches()
    zero = make(mesh, model, stage)
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
@pytest.mark.parametrize("stage", STAGES)
def test_branches_taken_by_some_ranks(stage, plan):
    one, found = joined(ranks.run(branching, 1, 0, plan)), joined(ranks.run(branching, 2, stage, plan))
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


def awkward(mesh, stage, n):
    """Three steps of plain descent; the weights of this rank."""
    torch.manual_seed(mesh.rank)  # replicas that start apart are brought together
    model = Awkward().double()
    zero = make(mesh, model, stage)
    mine = list(range(n))[mesh.rank :: mesh.world_size]
    for _ in range(3):
        backward(zero, [lambda s=s: model(torch.tensor([s % 4, s % 4 + 1])) for s in mine])
        with torch.no_grad():
            for unit in zero.trainable:
                unit.master.sub_(unit.total, alpha=0.01)
                zero.publish(unit)
            zero.settle()
    with zero.gathered():
        assert model.head.weight is model.embedding.weight and model.inner.weight.grad is None
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = [(record, local.clone()) for record, local in zero.weights()]
    return held, seen, [unit.name for unit in zero.units]


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("stage", STAGES)
def test_tied_frozen_scalar_empty_and_unused_parameters(stage, n):
    """C22: smaller than the world, or nothing at all, and still like one process."""
    torch.manual_seed(0)
    model = Awkward().double()
    for _ in range(3):
        model.zero_grad()
        sum(model(torch.tensor([sample % 4, sample % 4 + 1])) for sample in range(n)).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
    results = ranks.run(awkward, n, stage, n)
    held = joined([held for held, _, _ in results])
    for _, seen, units in results:
        assert "tied embedding.weight" in units and "inner (frozen)" in units
        for name, p in model.named_parameters():
            assert seen[name].shape == p.shape
            torch.testing.assert_close(seen[name], p.detach(), rtol=1e-12, atol=1e-12)
            assert torch.equal(seen[name], held[name])


def test_units_of_a_transformer():
    from minidist.model.config import ModelConfig
    from minidist.model.transformer import Transformer

    cfg = {"layers": 2, "width": 8, "heads": 2, "kv_heads": 1, "ffn": 8, "vocab": 8}
    assert list(units_of(Transformer(ModelConfig(**cfg)))) == ["embedding", "blocks.0", "blocks.1", "head"]
    assert units_of(Transformer(ModelConfig(**cfg)))["head"] == ["norm.weight", "head.weight"]
    tied = units_of(Transformer(ModelConfig(**cfg, tied=True)))
    assert list(tied) == ["tied embedding.weight", "blocks.0", "blocks.1", "head"] and tied["head"] == ["norm.weight"]


SIZES = {"embedding": 3, "blocks.0": 4, "blocks.1": 4, "blocks.2": 5, "tied x": 1, "y": 1, "y (frozen)": 1, "head": 3}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, list(SIZES)),
        (7, ["embedding to blocks.0", "blocks.1", "blocks.2", "tied x", "y", "y (frozen)", "head"]),
        (9, ["embedding to blocks.0", "blocks.1 to blocks.2", "tied x", "y", "y (frozen)", "head"]),
        (13, ["embedding", "blocks.0 to blocks.2", "tied x", "y", "y (frozen)", "head"]),
        (16, ["embedding to blocks.2", "tied x", "y", "y (frozen)", "head"]),
        (99, ["embedding to blocks.2", "tied x", "y", "y (frozen)", "head"]),
    ],
)
def test_neighbouring_units_are_joined_from_the_last_one_on(limit, expected):
    names = {unit: [f"{unit} a", f"{unit} b"] for unit in SIZES}
    sizes = {f"{unit} a": size for unit, size in SIZES.items()} | {f"{unit} b": 0 for unit in SIZES}
    found = parallel_units.joined(names, sizes, limit)
    assert list(found) == expected
    assert [n for run in found.values() for n in run] == [n for unit in names.values() for n in unit]


# What a step may leave out, and what memory holds before it is written


def parts(mesh, stage, said):
    """Two backwards that reach the weight of a unit and not its bias; what is said ahead of each, None for nothing."""
    model = nn.Linear(1, 1)
    zero = make(mesh, model, stage)
    for _ in range(2):
        zero.start_step()
        for x, last in zip((2.0, 3.0), said, strict=True):
            if last is not None:
                zero.before_backward(last=last)
            with zero.gathered():
                (torch.tensor([[x + mesh.rank]]) @ model.weight.t()).sum().backward()
        zero.finish()
    return zero.gradients()


@pytest.mark.parametrize("said", [(True, None), (False, True), (False, False), (False, None)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_all_is_in_the_sum_however_backwards_are_announced(stage, said):
    """One announced backward in two parts, or two without a last one: as long as nothing was reduced too early."""
    results = ranks.run(parts, 2, stage, said)
    found = whole([(held,) for held in results], 0)
    assert found["weight"].item() == 2 + 3 + 3 + 4 and found["bias"].item() == 0


def unwritten(mesh, stage, plan):
    """`branching` where memory that nobody has written holds NaN; and the padding of the sums."""
    from torch.utils import deterministic

    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(0)
        model = Branches()
        zero = make(mesh, model, stage)
        x = torch.full((2, 3), mesh.rank + 1.0, dtype=torch.float64)
        held = [backward(zero, [lambda: model(x, *plan[mesh.rank])] * 2) for _ in range(2)][-1]
        padding = [unit.total[max(0, unit.numel - unit.own[0]) :].tolist() for unit in zero.trainable]
        return held, [x for one in padding for x in one]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("plan", [[(1, 0)] * 5, [(1, 0), (0, 1), (0, 0), (0, 0), (0, 0)]], ids=["same", "different"])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_summed_that_was_not_written(stage, plan):
    """12 elements a unit over 5 ranks: 3 of padding. What no gradient came for is zero, and so is the padding."""
    results = ranks.run(unwritten, 5, stage, plan)
    found, want = joined([held for held, _ in results]), joined(ranks.run(branching, 1, 0, plan))
    for name in want:
        torch.testing.assert_close(found[name], 2 * want[name], rtol=1e-14, atol=1e-12)
    assert [x for _, padding in results for x in padding] == [0.0] * (9 * (5 if stage == 0 else 1))


# Hybrid sharding: copies of the state


def copies(mesh, stage, formats):
    """The weights that copies start with, and a gradient of 256 in one copy and of 1 in the other."""
    torch.manual_seed(mesh.rank)
    model = nn.Linear(1, 1, bias=False)
    gathers = mesh.twin("shard") if stage == 3 else None
    zero = Zero(model, mesh.group("shard"), stage=stage, replicas=mesh.group("replicate"), gathers=gathers, formats=formats)
    with zero.gathered():
        start = model.weight.item()
    held = backward(zero, [lambda: model(torch.full((1, 1), (256.0, 0.0, 1.0, 0.0)[mesh.rank])).sum()])
    return held, start


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_of_the_state_stay_equal(stage):
    torch.manual_seed(0)
    start = nn.Linear(1, 1, bias=False).weight.item()
    for reduce, total in ((torch.float32, 257.0), (torch.bfloat16, 256.0)):  # bf16 has no 257
        results = ranks.run(copies, 4, stage, Formats(reduce=reduce), layout=Layout(dp=4, shard=2))
        assert [found for _, found in results] == [start] * 4
        assert joined([held for held, _ in results])["weight"].item() == total


def records(mesh, stage, shard):
    replicas = mesh.group("replicate") if shard else None
    zero = Zero(nn.Linear(4, 4), mesh.group("shard"), stage=stage, replicas=replicas)
    return [(record.name, record.range, record.replicated, record.owner) for record, _ in zero.weights()]


def test_records_say_who_else_holds_the_same():
    """Over 2 ranks, 16 weights and 4 biases are cut in the middle."""
    everywhere = [("weight", (0, 16), ("dp", "cp"), 0), ("bias", (0, 4), ("dp", "cp"), 0)]
    assert ranks.run(records, 2, 0, False) == [everywhere] * 2
    halves = [[("weight", (0, 8)), ("bias", (0, 2))], [("weight", (8, 16)), ("bias", (2, 4))]]
    for n, shard, copies in ((2, 0, ()), (4, 2, ("replicate",))):
        expected = [[(*piece, copies, owner) for piece in half] for owner, half in enumerate(halves)]
        assert ranks.run(records, n, 1, n == 4, layout=Layout(dp=n, shard=shard)) == expected * (n // 2)


# Refusals


def two_backwards(mesh, stage):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    zero = make(mesh, model, stage)
    zero.start_step()
    zero.before_backward(last=True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of \d\.(weight|bias) grew after \d had been reduced"):
        model(torch.ones(1, 2)).sum().backward()
    zero.finish()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_comes_after_its_reduction_is_an_error_not_a_wrong_number(stage):
    ranks.run(two_backwards, 2, stage)


def unannounced(mesh, stage):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    zero = make(mesh, model, stage)
    zero.start_step()
    with pytest.raises(RuntimeError, match=r"not announced has reached 1\.(weight|bias): call before_backward\(\)"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_that_was_not_announced_is_refused(stage):
    ranks.run(unannounced, 1, stage)


def part_of_a_model(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    make(mesh, model, 3)
    with pytest.raises(RuntimeError, match=r"0 was called outside a forward of the whole model.*zero.gathered\(\)"):
        model[0](torch.ones(1, 2))


def test_at_stage_3_a_part_of_the_model_cannot_run_alone():
    ranks.run(part_of_a_model, 2)


def test_refusals():
    mesh = Mesh(Layout())
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        Zero(nn.ReLU(), mesh.world)
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="pass fill="):
        Zero(model, mesh.world)
    with pytest.raises(ValueError, match="stage = 4: ZeRO has stages 0, 1, 2 and 3"):
        Zero(nn.Linear(2, 2), mesh.world, stage=4)
