"""Every collective and transfer: values on 1 to 4 ranks, strided tensors, async handles, bytes on the tape, refusals."""

import subprocess
import sys

import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh

SIZES = pytest.mark.parametrize("n", [1, 2, 3, 4])


def every_operation(mesh):
    """Runs each operation once and asserts its value; returns the tape."""
    world, rank, n = mesh.world, mesh.rank, mesh.world_size
    total = n * (n + 1) / 2
    mine = torch.full((2, 3), rank + 1.0)

    x = mine.clone()
    assert comm.all_reduce(x, world, tag="grad") is x and (x == total).all()
    assert (comm.all_reduce(mine.clone(), world, "max") == n).all() and (comm.all_reduce(mine.clone(), world, "min") == 1).all()

    rows = comm.all_gather(mine, world, tag="weight")
    assert rows.shape == (2 * n, 3) and rows[::2, 0].tolist() == [i + 1.0 for i in range(n)]
    columns = comm.all_gather(mine, world, dim=1)
    assert columns.shape == (2, 3 * n) and columns[0, ::3].tolist() == [i + 1.0 for i in range(n)]
    for dim, out in ((0, torch.empty(2 * n, 3)), (1, torch.empty(3 * n, 2).t())):
        assert comm.all_gather(mine, world, out, dim) is out
        assert torch.equal(out, rows if dim == 0 else columns)

    whole = torch.arange(2.0 * n * 3).reshape(2 * n, 3)
    part = comm.reduce_scatter(whole, world)
    assert torch.equal(part, n * whole[2 * rank : 2 * rank + 2])
    part = comm.reduce_scatter(whole.t(), world, dim=1)
    assert torch.equal(part, n * whole.t()[:, 2 * rank : 2 * rank + 2])
    out = torch.empty(2, 3)
    assert comm.reduce_scatter(whole, world, out) is out and torch.equal(out, n * whole[2 * rank : 2 * rank + 2])

    even = comm.all_to_all(torch.full((n, 2), float(rank)), world)
    assert even[:, 0].tolist() == [float(i) for i in range(n)]
    send, recv = [i if rank else 0 for i in range(n)], [rank if i else 0 for i in range(n)]  # rank 0 sends nothing at all
    uneven = comm.all_to_all(torch.full((sum(send), 2), float(rank)), world, send, recv)
    assert uneven[:, 0].tolist() == [float(i) for i in range(1, n) for _ in range(rank)]

    assert comm.broadcast(torch.full((4,), float(rank)), world, src=n - 1).tolist() == [n - 1.0] * 4
    got = comm.gather(torch.tensor([rank]), world, dst=n - 1)
    assert got is None if rank != n - 1 else [g.item() for g in got] == list(range(n))
    comm.barrier(world)
    return mesh.tape


@SIZES
def test_values(n):
    ranks.run(every_operation, n)


def ring(mesh):
    """Everyone sends to the right and receives from the left, at once and with handles."""
    world, rank, n = mesh.world, mesh.rank, mesh.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    came = torch.empty(5)
    comm.exchange([("send", torch.full((5,), float(rank)), right), ("recv", came, left)], world)
    works = [comm.recv(torch.empty(5), world, left, async_op=True) for _ in range(3)]
    for k in range(3):
        comm.send(torch.full((5,), 10.0 * rank + k), world, right, async_op=True)
    return came[0].item(), [work.wait()[0].item() for work in works], all(work.is_completed() for work in works)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_transfers_arrive_in_order(n):
    for rank, (first, others, done) in enumerate(ranks.run(ring, n)):
        left = (rank - 1) % n
        assert first == left and others == [10.0 * left + k for k in range(3)] and done


def strided(mesh):
    """Case C50: a column of a 2x2 buffer, on 8 ranks."""
    world, found = mesh.world, {}
    for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "ring"):
        buffer = torch.tensor([[mesh.rank + 1.0, 7.0]] * 2)
        column = buffer[:, 0]
        if name == "all_reduce":
            comm.all_reduce(column, world)
        elif name == "broadcast":
            comm.broadcast(column, world, src=3)
        elif name == "ring":
            to, came = (mesh.rank + 1) % 8, (mesh.rank - 1) % 8
            comm.exchange([("send", buffer[:, 0].clone(), to), ("recv", column, came)], world)
        else:
            wide = torch.stack([torch.arange(8.0), torch.full((8,), 7.0)], 1)
            x = column if name in ("all_gather", "gather") else wide[:, 0]
            value = getattr(comm, name)(x, world)
            found[name] = None if value is None else (torch.cat(value) if name == "gather" else value).tolist()
            assert wide[:, 1].eq(7).all() and wide[:, 0].tolist() == list(range(8))
            continue
        found[name] = buffer.tolist()
    return found


def test_strided_tensors_are_reduced_as_views_not_as_storage():
    results = ranks.run(strided, 8)
    for rank, found in enumerate(results):
        left = (rank - 1) % 8 + 1.0
        assert found["all_reduce"] == [[36.0, 7.0], [36.0, 7.0]]
        assert found["broadcast"] == [[4.0, 7.0], [4.0, 7.0]]
        assert found["ring"] == [[left, 7.0], [left, 7.0]]
        assert found["all_gather"] == [i + 1.0 for i in range(8) for _ in range(2)]
        assert found["reduce_scatter"] == [8.0 * rank]
        assert found["all_to_all"] == [float(rank)] * 8
        assert found["gather"] == ([i + 1.0 for i in range(8) for _ in range(2)] if rank == 0 else None)


def asynchronous(mesh):
    """Several launched before any is waited for; results only on wait, in any order of waiting."""
    xs = [torch.full((3,), float(i + mesh.rank)) for i in range(4)]
    works = [comm.all_reduce(x, mesh.world, async_op=True) for x in xs]
    shards = comm.all_gather(xs[0].new_full((2,), mesh.rank), mesh.world, async_op=True)
    parts = comm.reduce_scatter(torch.ones(mesh.world_size), mesh.world, async_op=True)
    assert parts.wait().tolist() == [float(mesh.world_size)]
    sums = [work.wait()[0].item() for work in reversed(works)][::-1]
    assert all(work.wait() is work.wait() for work in works)  # waiting twice is fine
    return sums, shards.wait().tolist(), [line.finish is not None for line in mesh.tape]


def test_async_handles():
    for sums, shards, finished in ranks.run(asynchronous, 3):
        assert sums == [3.0, 6.0, 9.0, 12.0] and shards == [0, 0, 1, 1, 2, 2] and all(finished)


@SIZES
def test_bytes_on_the_tape(n):
    """Booked to the byte, from the shapes in `every_operation` (float32; gather of int64)."""
    for rank, tape in enumerate(ranks.run(every_operation, n)):
        x, whole = 2 * 3 * 4, 2 * n * 3 * 4
        assert tape.sent(op="all_reduce") == pytest.approx(3 * 2 * (n - 1) / n * x)
        assert tape.sent(tag="grad") == pytest.approx(2 * (n - 1) / n * x)
        assert tape.sent(op="all_gather") == 4 * (n - 1) * x and tape.payload(op="all_gather") == 4 * n * x
        assert tape.sent(op="reduce_scatter") == 3 * (n - 1) * x and tape.payload(op="reduce_scatter") == 3 * whole
        uneven = sum(i for i in range(n) if i != rank) * 2 * 4 if rank else 0
        assert tape.sent(op="all_to_all") == (n - 1) * 2 * 4 + uneven
        assert tape.sent(op="broadcast") == pytest.approx((n - 1) / n * 16)
        assert tape.sent(op="gather") == (0 if rank == n - 1 else 8) and tape.payload(op="gather") == 8 * n
        assert tape.sent(op="barrier") == 0 and tape.calls() == 15
        assert [line.seq for line in tape] == list(range(1, 16))
        assert all(line.finish >= line.launch for line in tape) and all("test_comm.py:" in line.where for line in tape)


def test_check_lines_are_in_no_total():
    mesh = Mesh(Layout())
    comm.all_reduce(torch.ones(4), mesh.world, tag="check")
    comm.all_reduce(torch.ones(4), mesh.world, tag="grad")
    assert mesh.tape.payload() == 16 and mesh.tape.calls() == 1 and mesh.tape.payload(tag="check") == 16
    assert len(mesh.tape) == 2 and "all_reduce [4] float32 check" in str(mesh.tape)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: comm.all_reduce(torch.ones(1), g, "avg"), "use sum, max or min. For a mean, sum and divide once"),
        (lambda g: comm.all_reduce(torch.ones(1), g, tag="gradient"), "tag = 'gradient': use one of grad, weight"),
        (lambda g: comm.all_reduce(torch.ones(1, requires_grad=True), g), "use its twin in core.comm_grad"),
        (lambda g: comm.all_gather(torch.tensor(1.0), g), "a scalar needs view(1)"),
        (lambda g: comm.all_gather(torch.ones(2), g, torch.ones(3)), "out has shape [3], the result has [2]"),
        (lambda g: comm.reduce_scatter(torch.ones(2), g, torch.ones(1)), "out has shape [1], the result has [2]"),
        (lambda g: comm.all_to_all(torch.ones(2), g, [3], [3]), "send=[3], recv=[3] need 1 items"),
        (lambda g: comm.broadcast(torch.ones(2), g, src=1), "src = 1: world has places 0 to 0"),
        (lambda g: comm.send(torch.ones(2), g, 0), "send to myself"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError) as refusal:
        call(Mesh(Layout()).world)
    assert words in str(refusal.value)


def uneven_scatter(mesh):
    with pytest.raises(ValueError, match=r"dim 0 does not divide; pad it to a multiple of 2"):
        comm.reduce_scatter(torch.ones(3), mesh.world)
    with pytest.raises(ValueError, match=r"they do not divide; pass send= and recv="):
        comm.all_to_all(torch.ones(3), mesh.world)


def test_refusals_of_two_ranks():
    ranks.run(uneven_scatter, 2)


FAKE = """
import torch
from minidist.core import comm
from minidist.core.fake import connect_fake
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from torch._subclasses.fake_tensor import FakeTensorMode

connect_fake(5, 64)
mesh = Mesh(Layout(pp=2, dp=4, cp=2, tp=4), rank=5)
with FakeTensorMode():
    x, tp = torch.empty(8, 3, dtype=torch.bfloat16), mesh.group("tp")
    comm.all_reduce(x.t(), tp, async_op=True).wait()
    assert comm.all_gather(x, tp, dim=1).shape == (8, 12)
    assert comm.reduce_scatter(x, tp).shape == (2, 3)
    assert comm.all_to_all(x, tp).shape == (8, 3)
    comm.broadcast(x, mesh.group("dp"), src=1)
    comm.exchange([("send", x, 1), ("recv", x, 1)], mesh.group("pp"))
    assert comm.gather(x, tp, dst=1) and comm.gather(x, tp) is None
    comm.barrier(mesh.world)
print(mesh.tape.sent(), mesh.tape.calls(), mesh.group("pp").ranks)
"""


def test_the_fake_backend_runs_and_books_every_operation():
    done = subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", FAKE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    x = 8 * 3 * 2
    sent = 2 * 3 / 4 * x + 3 * x + 3 / 4 * x + 3 / 4 * x + 3 / 4 * x + x + 0 + x
    assert done.stdout.split(maxsplit=2) == [f"{sent:g}", "10", "(5, 37)\n"]


def staged(mesh):
    """A GPU tensor over gloo goes through host memory. No GPU here: the test calls every tensor in float16 a GPU's."""
    from unittest import mock

    from minidist.core import device

    with mock.patch.object(device, "is_gpu", lambda x: x.dtype == torch.float16):
        x = torch.full((3,), mesh.rank + 1.0, dtype=torch.float16)
        comm.all_reduce(x, mesh.world)
        assert not comm._fits(x, mesh.world)
        return x.tolist(), comm.all_gather(x[:1], mesh.world).tolist()


def test_gpu_tensors_over_gloo_are_staged():
    assert ranks.run(staged, 2) == [([3.0] * 3, [3.0, 3.0])] * 2
