"""The autograd twins against what one process computes: values and gradients, float64."""

import pytest
import torch

from minidist import ranks
from minidist.core import comm_grad

N = 3


def shards(seed):
    """Every rank's input and weight (4 rows, a multiple of neither): the same on all ranks, requiring grad."""
    draw = torch.Generator().manual_seed(seed)
    xs = [torch.randn(N * 2, 4, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(N)]
    ws = [torch.randn(N * N * 2, N * 4, dtype=torch.float64, generator=draw) for _ in range(N)]
    return xs, ws


def weigh(y, w):
    """A scalar that weighs every element differently, by a weight of at least y's shape."""
    return (y.sin() * w[: y.shape[0], : y.shape[1]]).sum()


def sends(i):
    """Rows that rank i sends to each: most to itself, some to the next, none to the third."""
    return [2 + i if to == i else (4 - i if to == (i + 1) % N else 0) for to in range(N)]


def expected(name, xs):
    """What each rank's result is in terms of all ranks' inputs, by torch's own differentiable functions."""
    total = sum(xs)
    return {
        "all_reduce": [total] * N,
        "all_gather": [torch.cat(xs)] * N,
        "all_gather dim 1": [torch.cat(xs, 1)] * N,
        "reduce_scatter": list(total.chunk(N)),
        "all_to_all": [torch.cat([x.chunk(N)[rank] for x in xs]) for rank in range(N)],
        "uneven all_to_all": [torch.cat([x.split(sends(i))[rank] for i, x in enumerate(xs)]) for rank in range(N)],
        "broadcast": [xs[1]] * N,
    }[name]


def summed(mesh, name):
    """This rank's result, loss and gradient under a twin, for losses that add up over ranks."""
    xs, ws = shards(0)
    x, world, rank = xs[mesh.rank], mesh.world, mesh.rank
    send, recv = sends(rank), [sends(i)[rank] for i in range(N)]
    y = {
        "all_reduce": lambda: comm_grad.all_reduce(x, world),
        "all_gather": lambda: comm_grad.all_gather(x, world),
        "all_gather dim 1": lambda: comm_grad.all_gather(x, world, dim=1),
        "reduce_scatter": lambda: comm_grad.reduce_scatter(x, world),
        "all_to_all": lambda: comm_grad.all_to_all(x, world),
        "uneven all_to_all": lambda: comm_grad.all_to_all(x, world, send, recv),
        "broadcast": lambda: comm_grad.broadcast(x, world, src=1),
    }[name]()
    weigh(y, ws[rank]).backward()
    return y.detach(), x.grad


@pytest.mark.parametrize(
    "name",
    ["all_reduce", "all_gather", "all_gather dim 1", "reduce_scatter", "all_to_all", "uneven all_to_all", "broadcast"],
)
def test_twins_whose_losses_add_up(name):
    xs, ws = shards(0)
    ys = expected(name, xs)
    sum(weigh(y, w) for y, w in zip(ys, ws, strict=True)).backward()
    for rank, (y, grad) in enumerate(ranks.run(summed, N, name)):
        torch.testing.assert_close(y, ys[rank].detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(
            grad, xs[rank].grad if xs[rank].grad is not None else torch.zeros_like(grad), rtol=0, atol=1e-12
        )


def replicated(mesh, name):
    """Twins for a loss that every rank computes alike and that counts once: the two ends of a column/row pair."""
    xs, ws = shards(1)
    x, w, rank, world = xs[0], ws[0][:4, :6].clone(), mesh.rank, mesh.world
    if name == "pair":  # relu(x A) B with A cut by columns and B by rows
        a, b = w[:, 2 * rank : 2 * rank + 2].clone().requires_grad_(), w.t()[2 * rank : 2 * rank + 2].clone().requires_grad_()
        y = comm_grad.fan_in(comm_grad.fan_out(x, world).matmul(a).relu() @ b, world)
    else:  # rows of x worked on apart, then whole again
        a = b = w.clone().requires_grad_()
        y = comm_grad.unsplit(comm_grad.split(x, world) @ a, world)
    weigh(y, ws[1]).backward()
    return y.detach(), x.grad, a.grad, b.grad


def test_a_column_row_pair_is_the_whole_product():
    xs, ws = shards(1)
    x, a = xs[0], ws[0][:4, :6].clone().requires_grad_()
    b = ws[0][:4, :6].t().clone().requires_grad_()
    y = x.matmul(a).relu() @ b
    weigh(y, ws[1]).backward()
    for rank, (found, dx, da, db) in enumerate(ranks.run(replicated, N, "pair")):
        torch.testing.assert_close(found, y.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(dx, x.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(da, a.grad[:, 2 * rank : 2 * rank + 2], rtol=0, atol=1e-12)
        torch.testing.assert_close(db, b.grad[2 * rank : 2 * rank + 2], rtol=0, atol=1e-12)


def test_split_and_unsplit_are_the_whole_and_its_parts_add_up():
    xs, ws = shards(1)
    x, a = xs[0], ws[0][:4, :6].clone().requires_grad_()
    y = x @ a
    weigh(y, ws[1]).backward()
    results = ranks.run(replicated, N, "rows")
    for found, dx, _, _ in results:
        torch.testing.assert_close(found, y.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(dx, x.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(da for _, _, da, _ in results), a.grad, rtol=0, atol=1e-12)


def staged(mesh):
    """A two-stage model: rank 0 computes x^3 and sends it, rank 1 the loss; the gradient comes back."""
    x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=True)
    if mesh.rank == 0:
        comm_grad.send(x**3, mesh.world, 1).backward()
        return x.grad
    hidden = comm_grad.recv(torch.empty(3, dtype=torch.float64, requires_grad=True), mesh.world, 0)
    (hidden * 2).sum().backward()
    return hidden.detach()


def test_send_and_recv_carry_the_gradient_back():
    grad, hidden = ranks.run(staged, 2)
    x = torch.arange(1.0, 4.0, dtype=torch.float64)
    torch.testing.assert_close(hidden, x**3)
    torch.testing.assert_close(grad, 6 * x**2)


def backward_bytes(mesh):
    x = torch.ones(N, 4, requires_grad=True)
    comm_grad.all_gather(x, mesh.world, tag="act").sum().backward()
    return mesh.tape


def test_backward_is_on_the_tape_too():
    tape = ranks.run(backward_bytes, N)[0]
    assert [line.op for line in tape] == ["all_gather", "reduce_scatter"]
    assert tape.sent(tag="act") == 2 * (N - 1) * N * 4 * 4
