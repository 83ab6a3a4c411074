"""Stage 3's gathers: what runs on each rank changes neither their number nor their order, and what was gathered is freed."""

import pytest
import torch
from parallel.test_zero import backward, joined, make
from parity.harness import SEQ_LEN, config
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.work import Work
from minidist.data.batch import Batch
from minidist.parallel.units import Unit
from minidist.parallel.zero import Zero
from minidist.train.build import runtime
from minidist.train.step import Step


class Path(nn.Module):
    """Five layers; the caller says which run, in which order, and before which one it trips."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(5))

    def forward(self, x, path, trip=None):
        for k in path:
            if k == trip:
                raise OSError("the caller's own fault")
            x = self.blocks[k](x).tanh()
        return x.sum()


def path_model():
    torch.manual_seed(0)
    return Path()


def given(rank, path):
    return torch.arange(3, dtype=torch.float64) + rank + len(path)


def live(zero):
    """Units whose whole weights have memory."""
    return [unit.name for unit in zero.units if unit.live]


# The walk


def walk(mesh, stage, plan, tell=True):
    """Two steps over this rank's paths: the gradients of the last, what was gathered in both, and what is live then."""
    zero = make(mesh, path_model(), stage)
    mine = plan[mesh.rank :: mesh.world_size]
    mesh.tape.clear()
    for _ in range(2):
        if tell:
            found = backward(zero, [lambda p=p: zero.model(given(mesh.rank, p), p) for p in mine])
            continue
        zero.start_step()
        for i, path in enumerate(mine):
            loss = zero.model(given(mesh.rank, path), path)  # nobody has said that the last backward is over
            zero.before_backward(last=i == len(mine) - 1)
            loss.backward()
        zero.finish()
        found = [(record, local.clone()) for record, local in zero.gradients()]
    return found, gathered(mesh), live(zero)


def gathered(mesh):
    """Number and shape of every gather of weights so far."""
    return [(line.seq, line.shape) for line in mesh.tape.lines if line.tag == "weight"]


def expected(plan):
    """The sum over two ranks, by plain autograd."""
    model = path_model()
    for i, path in enumerate(plan):
        model(given(i % 2, path), path).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def check(results, plan):
    """The right sum, the same gathers on both ranks, and nothing left live."""
    found, want = joined([held for held, _, _ in results]), expected(plan)
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=0, atol=1e-12)
    assert results[0][1] == results[1][1] and results[0][2] == results[1][2]


NEAR = [  # paths of rank 0 and rank 1 in turn
    [(0, 1, 2, 3, 4), (0, 1, 3, 4)],
    [(0, 1, 2, 3, 4), (2, 3, 4)],
    [(2, 3, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (2, 3, 4)],
    [(0, 0, 1, 2, 3, 4), (1, 2, 2, 2, 3, 4)],
]
FAR = [[(0, 1, 2, 3, 4), (4,)], [(4,), (0,)], [(0,), (4,), (4,), (0,)], [(1, 3), (2,), (2,), (0, 4)], [(0, 0, 2), (2, 2, 2)]]


@pytest.mark.parametrize("plan", NEAR, ids=str)
def test_paths_that_differ_by_rank(plan):
    """C08 with stretches of the model skipped: 5 gathers in forward, 4 in backward, for the last stays live in between."""
    results = ranks.run(walk, 2, 3, plan)
    check(results, plan)
    assert results[0][2] == [] and len(results[0][1]) == 2 * len(plan) // 2 * 9


@pytest.mark.parametrize("plan", [[(2, 3, 4)] * 4, [(0, 1, 2, 3, 4), (0, 1, 3, 4)] * 2, NEAR[2]], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_backward_may_be_left_out(stage, plan):
    results = ranks.run(walk, 2, stage, plan, False)
    check(results, plan)
    if stage == 3:
        assert results[0][2] == [] and len(results[0][1]) == 2 * len(plan) // 2 * 9


@pytest.mark.parametrize("plan", FAR, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_paths_that_have_little_in_common(stage, plan):
    check(ranks.run(walk, 2, stage, plan), plan)


def forward_only(mesh, plan):
    zero = make(mesh, path_model(), 3)
    mesh.tape.clear()
    with torch.no_grad():
        found = [zero.model(given(mesh.rank, path), path).item() for path in plan[mesh.rank :: 2]]
    return found, gathered(mesh), live(zero)


@pytest.mark.parametrize("plan", [*NEAR, *FAR], ids=str)
def test_any_path_on_any_rank_without_gradients(plan):
    results, model = ranks.run(forward_only, 2, plan), path_model()
    for rank, (found, lines, left) in enumerate(results):
        assert found == [model(given(rank, path), path).item() for path in plan[rank::2]]
        assert lines == results[0][1] and len(lines) == 5 * len(found) and left == []


def nothing_to_do(mesh, stage):
    """Rank 1 runs forward and has no loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    zero = make(mesh, model, stage)
    for _ in range(2):
        zero.start_step()
        zero.before_backward(last=True)
        out = zero.model(torch.ones(1, 1, dtype=torch.float64))
        if mesh.rank == 0:
            out.sum().backward()
        zero.after_backward()
        zero.finish()
    return zero.gradients(), gathered(mesh), live(zero)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_without_a_backward(stage):
    results = ranks.run(nothing_to_do, 2, stage)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    found = joined([held for held, _, _ in results])
    assert all(found[name].item() == p.grad.item() for name, p in model.named_parameters())
    assert results[0][1] == results[1][1] and results[0][2] == results[1][2]


@pytest.mark.parametrize("path", [(3, 0, 3), (4, 2, 0), (0, 4, 0, 4)], ids=str)
def test_a_module_called_again_after_the_walk_has_gone_on(path):
    results = ranks.run(walk, 2, 3, [path, path])
    check(results, [path, path])
    assert results[0][2] == []


def channels(mesh, cfg):
    step = Step(runtime(mesh, cfg), mesh, cfg)
    mesh.tape.clear()
    step.run([Batch.empty(1, SEQ_LEN)])
    return [{line.group for line in mesh.tape.lines if line.tag == tag} for tag in ("weight", "grad")]


def test_no_gather_queues_behind_a_reduction():
    """A backend runs the operations of one group in turn, so weights travel in a group of their own."""
    layout = Layout(dp=2, zero=3)
    for weight, grad in ranks.run(channels, 2, config(layout=layout), layout=layout):
        assert len(weight) == len(grad) == 1 and weight != grad


# What is freed, and when


def alone(**options):
    mesh = Mesh(Layout())
    return Zero(path_model(), mesh.world, stage=3, **options)


EVERY = (0, 1, 2, 3, 4)


@pytest.mark.parametrize("keep", [False, True])
def test_a_pass_without_backward_frees_everything(keep):
    zero = alone(keep=keep)
    with torch.no_grad():
        zero.model(given(0, EVERY), EVERY)
    assert live(zero) == [] and all(p.numel() == 0 for p in zero.model.parameters())
    with pytest.raises(ZeroDivisionError), zero.gathered():
        assert len(live(zero)) == 5
        raise ZeroDivisionError
    assert live(zero) == []


def test_kept_weights_are_freed_as_backward_passes_them():
    zero, seen = alone(keep=True), []
    for layer in zero.model.blocks:
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(live(zero))))
    backward(zero, [lambda: zero.model(given(0, EVERY), EVERY)])
    assert seen == [5, 4, 3, 2, 1] and live(zero) == [], (
        "the site that backward stands on, the next, and what it has yet to use"
    )


@pytest.mark.parametrize("keep", [False, True])
def test_new_weights_are_gathered_after_a_forward_that_no_backward_followed(keep):
    """What forward left live holds the old values: `settle` frees it."""
    zero = alone(keep=keep)
    old = zero.model(given(0, EVERY), EVERY).item()
    for unit in zero.trainable:
        unit.master.mul_(0.5)
        zero.publish(unit)
    zero.settle()
    assert live(zero) == []
    model = path_model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    new = model(given(0, EVERY), EVERY).item()
    assert zero.model(given(0, EVERY), EVERY).item() == new != old


def test_a_forward_that_fails_leaves_nothing_behind(monkeypatch):
    """Its gathers are waited for before their memory goes, and the next step is right and frees all."""
    zero, waited, wait, free = alone(), set(), Work.wait, Unit.free
    monkeypatch.setattr(Work, "wait", lambda work: (waited.add(id(work)), wait(work))[1])
    launched = {}

    def launch(unit):
        before = set(zero.gathers[0]._live)
        original(unit)
        if unit.name not in before:
            launched[unit.name] = zero.gathers[0]._live[unit.name][1]

    def checked(unit):
        assert id(launched[unit.name]) in waited, f"{unit.name} was freed while it was on its way"
        free(unit)

    original = zero.gathers[0]._launch
    monkeypatch.setattr(zero.gathers[0], "_launch", launch)
    monkeypatch.setattr(Unit, "free", checked)
    with pytest.raises(OSError, match="the caller's own fault"):
        zero.model(given(0, EVERY), EVERY, trip=3)
    found = joined([backward(zero, [lambda: zero.model(given(0, (0,)), (0,))])])
    want = path_model()
    want(given(0, (0,)), (0,)).backward()
    torch.testing.assert_close(found["blocks.0.weight"], want.blocks[0].weight.grad, rtol=0, atol=1e-12)
    assert live(zero) == []


class Both(nn.Module):
    """A block that hands out what lies in its middle, too: the gradient of that comes when backward is half through it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        middle = self.first(x)
        return self.second(middle), middle


def test_the_first_gradient_that_comes_to_a_block_brings_its_weights():
    torch.manual_seed(0)
    model = nn.Sequential(Both())
    want = nn.Sequential(Both())
    want.load_state_dict(model.state_dict())
    zero = Zero(nn.ModuleDict({"blocks": model, "last": nn.Linear(1, 1)}), Mesh(Layout()).world, stage=3)
    zero.model.forward = lambda x: sum(out.square().sum() for out in model(x))
    x = torch.ones(3, dtype=torch.float64)
    found = joined([backward(zero, [lambda: zero.model(x)])])
    sum(out.square().sum() for out in want(x)).backward()
    for name, p in want.named_parameters():
        assert torch.equal(found[f"blocks.{name}"], p.grad)
