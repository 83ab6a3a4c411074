"""The optimizers: torch's textbook formulas over segments, decay on matrices only, blind to how buffers are cut."""

import pytest
import torch

from minidist.core.mesh import Group, Wire
from minidist.core.tape import Tape
from minidist.parallel.units import Formats, Sharing, Unit
from minidist.train import optim
from minidist.train.optim import Segment, UnitOptimizer
from minidist.train.sections import Optim


def segments(cuts, decay=True, seed=0):
    """Segments of one buffer of 12 float64 weights, with gradients, cut at `cuts`."""
    draw = torch.Generator().manual_seed(seed)
    weights, grads = (torch.randn(12, dtype=torch.float64, generator=draw) for _ in range(2))
    parts = []
    for a, b in zip([0, *cuts], [*cuts, 12], strict=True):
        master = weights[a:b]
        master.grad = grads[a:b]
        parts.append(Segment(master, decay))
    return weights, grads, parts


def steps(settings, cuts=(), decay=True, count=3):
    weights, grads, parts = segments(cuts, decay)
    start = weights.clone()
    optimizer = optim.build(settings, parts)
    for k in range(count):
        optim.set_lr(optimizer, 0.1 / (k + 1))
        optimizer.step()
    return start, grads, weights


def test_adamw_is_the_papers_formula():
    settings = Optim(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    w, g, ours = steps(settings)
    m = v = torch.zeros_like(w)
    for k in range(3):
        lr = 0.1 / (k + 1)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        update = (m / (1 - 0.8 ** (k + 1))) / ((v / (1 - 0.9 ** (k + 1))).sqrt() + 1e-3)
        w = w * (1 - lr * 0.2) - lr * update
    torch.testing.assert_close(ours, w, rtol=1e-12, atol=1e-14)


def test_sgd_is_the_textbooks_formula():
    w, g, ours = steps(Optim(name="sgd", momentum=0.7, weight_decay=0.2))
    u = torch.zeros_like(w)
    for k in range(3):
        u = g + 0.2 * w if k == 0 else 0.7 * u + g + 0.2 * w
        w = w - 0.1 / (k + 1) * u
    torch.testing.assert_close(ours, w, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_how_a_buffer_is_cut_changes_no_bit(name):
    settings = Optim(name=name)
    assert torch.equal(steps(settings)[2], steps(settings, cuts=(1, 5, 8))[2])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_segments_of_matrices_decay(name):
    with_decay, without = Optim(name=name, weight_decay=0.5), Optim(name=name, weight_decay=0.0)
    assert torch.equal(steps(with_decay, decay=False)[2], steps(without)[2])
    assert not torch.allclose(steps(with_decay)[2], steps(without)[2])


def test_a_rank_that_owns_nothing_can_still_step():
    for name in ("adamw", "sgd"):
        optim.build(Optim(name=name), []).step()


@pytest.mark.parametrize("shards", [1, 3, 40])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_unit_is_updated_like_its_parameters_one_by_one(name, shards):
    """However its buffer is cut: rate, factor, and decay of the two matrices of 6 and 8 elements, not of vector and scalar."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"norm": (3,), "up": (2, 3), "gain": (), "down": (4, 2)}
    values, grads = ({n: torch.randn(s, dtype=torch.float64, generator=draw) for n, s in shapes.items()} for _ in range(2))
    settings = Optim(name=name, weight_decay=0.3)

    one = {n: torch.nn.Parameter(v.clone()) for n, v in values.items()}
    plain = optim.build(settings, [Segment(p, p.dim() >= 2) for p in one.values()])
    found = {n: torch.full((v.numel(),), torch.nan, dtype=v.dtype) for n, v in values.items()}
    units = []
    for place in range(shards):
        own = {n: torch.nn.Parameter(v.clone()) for n, v in values.items()}
        wire = Wire(place, torch.device("cpu"), Tape(place), None, check=False, timeout_s=1.0)
        sharing = Sharing(Group("dp", tuple(range(shards)), place, wire))
        unit = Unit("unit", own, 1, sharing, Formats(torch.float64).settled(), torch.device("cpu"))
        unit.fill(lambda record: values[record.name].flatten()[record.range[0] : record.range[1]])
        units.append((unit, UnitOptimizer(settings, unit)))
    for step in (1, 2):
        for n, p in one.items():
            p.grad = grads[n] * step / 8
        optim.set_lr(plain, 0.1 / step)
        plain.step()
        for unit, optimizer in units:
            for n, a, b, place in unit.pieces():
                unit.total[place].copy_(grads[n].flatten()[a:b] * step)
            optimizer.step(0.1 / step, 1 / 8)
    for unit, _ in units:
        assert not unit.master[max(0, unit.numel - unit.own[0]) :].any(), "padding is zero and stays zero"
        for n, a, b, place in unit.pieces():
            found[n][a:b] = unit.master[place]
    for n, p in one.items():
        torch.testing.assert_close(found[n].view(p.shape), p.detach(), rtol=1e-14, atol=0)
