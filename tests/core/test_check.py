"""Teaching mode: whoever calls something else is named, on every rank, with operation, shape, dtype and place (C48)."""

import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.work import CommMismatch, CommTimeout


def differing(mesh, kind):
    """Ranks 0 and 1 call what does not fit. Returns what each was told."""
    world, first = mesh.world, mesh.rank == 0
    calls = {
        "shape": lambda: comm.all_reduce(torch.ones(4 if first else 3), world),
        "dtype": lambda: comm.all_reduce(torch.ones(4, dtype=torch.float32 if first else torch.float64), world),
        "operation": lambda: (comm.all_reduce if first else comm.broadcast)(torch.ones(4), world),
        "root": lambda: comm.broadcast(torch.ones(4), world, src=mesh.rank),
        "reduction": lambda: comm.all_reduce(torch.ones(4), world, "sum" if first else "max"),
        "splits": lambda: comm.all_to_all(torch.ones(2), world, [1, 1], [1, 1] if first else [2, 1]),
        "gathered shape": lambda: comm.all_gather(torch.ones(4 if first else 3), world),
        "scattered dtype": lambda: comm.reduce_scatter(torch.ones(4, dtype=torch.int32 if first else torch.int64), world),
        "transfer": lambda: comm.send(torch.ones(4), world, 1) if first else comm.recv(torch.ones(3), world, 0),
    }
    try:
        calls[kind]()
    except CommMismatch as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", ["differ in shape in call #1 of world", "rank 0: all_reduce [4] float32", "rank 1: all_reduce [3] float32"]),
        ("dtype", ["differ in dtype", "rank 0: all_reduce [4] float32", "rank 1: all_reduce [4] float64"]),
        ("operation", ["differ in operation", "rank 0: all_reduce [4] float32", "rank 1: broadcast root 0 [4] float32"]),
        ("root", ["differ in root", "rank 0: broadcast root 0", "rank 1: broadcast root 1"]),
        ("reduction", ["differ in reduction", "float32 sum", "float32 max"]),
        ("splits", ["differ in splits", "'recv': [2, 1]"]),
        ("gathered shape", ["differ in shape", "rank 1: all_gather [3]"]),
        ("scattered dtype", ["differ in dtype", "rank 0: reduce_scatter [4] int32"]),
        ("transfer", ["differ in shape in call #1 of world 0->1", "rank 0: send [4]", "rank 1: recv [3]"]),
    ],
)
def test_both_ranks_are_told_what_differs_and_where(kind, said):
    for message in ranks.run(differing, 2, kind, fresh=True):
        assert message is not None, "a rank was told nothing"
        for words in said:
            assert words in message
        assert message.count("test_check.py:") == 2


def one_of_four(mesh):
    try:
        comm.all_reduce(torch.ones(8 if mesh.rank == 2 else 4), mesh.world)
    except CommMismatch as error:
        return str(error)


def test_all_four_ranks_hear_of_the_one():
    messages = ranks.run(one_of_four, 4, fresh=True)
    assert all("rank 2: all_reduce [8]" in message for message in messages)


def three_kinds(mesh):
    """Every rank calls something else, the odd ones late."""
    import time

    time.sleep(0.1 * (mesh.rank % 2))
    try:
        (comm.broadcast if mesh.rank == 3 else comm.all_reduce)(torch.ones(4 if mesh.rank == 2 else 3), mesh.world)
    except CommMismatch as error:
        return str(error)


def test_all_say_the_same_of_the_same_calls_whenever_they_came():  # case C55
    told = ranks.run(three_kinds, 4, fresh=True)
    assert set(told) == {told[0]} and "differ in shape and operation" in told[0]
    assert all(f"rank {rank}: " in told[0] for rank in range(4))


def fitting(mesh):
    """Different calls in different groups, transfers of many sizes, async in flight: none of it is a mismatch."""
    tp, dp = mesh.group("tp"), mesh.group("dp")
    comm.all_reduce(torch.ones(3 + tp.ranks[0]), tp)
    comm.all_gather(torch.ones(2 + dp.ranks[0]), dp)
    works = [comm.all_reduce(torch.ones(i + 1), mesh.world, async_op=True) for i in range(8)]
    peer = (mesh.rank + 1) % 4
    back = (mesh.rank - 1) % 4
    for size in (1, 5, 2):
        comm.exchange([("send", torch.ones(size), peer), ("recv", torch.ones(size), back)], mesh.world)
    for work in works:
        work.wait()
    comm.all_to_all(torch.ones(mesh.rank), mesh.world, [mesh.rank, 0, 0, 0], [0, 1, 2, 3] if mesh.rank == 0 else [0, 0, 0, 0])
    return mesh.tape.calls()


def test_what_fits_is_left_alone():
    assert ranks.run(fitting, 4, layout=Layout(dp=2, tp=2)) == [17] * 4


def unchecked(mesh):
    assert not mesh.wire.check
    return comm.all_reduce(torch.ones(2), mesh.world).tolist()


def test_checking_can_be_off():
    assert ranks.run(unchecked, 2, check=False) == [[2.0, 2.0]] * 2


def test_check_needs_a_board():
    with pytest.raises(ValueError, match="check=True compares ranks through shared memory"):
        Mesh(Layout(), check=True)


def trading(mesh):
    """Both ranks send 60 numbers and make room for 20."""
    peer = 1 - mesh.rank
    comm.exchange([("send", torch.ones(60), peer), ("recv", torch.ones(20), peer)], mesh.world)


def test_no_transfer_of_a_batch_is_launched_before_all_are_checked():
    """gloo ends the process that receives more than it made room for."""
    for _ in range(10):
        with pytest.raises(ranks.RankError) as caught:
            ranks.run(trading, 2, fresh=True)
        assert caught.value.kind == "CommMismatch" and "ranks differ in shape" in str(caught.value)


def alone_in_a_collective(mesh):
    """Rank 1 never comes; the others give up at the mesh's own deadline, and say what they waited for."""
    import time

    mesh.wire.timeout_s = 0.3
    if mesh.rank == 1:
        time.sleep(1.0)
        return None
    try:
        comm.all_reduce(torch.ones(5), mesh.world)
    except CommTimeout as error:
        return str(error)


def alone_in_a_transfer(mesh):
    import time

    mesh.wire.timeout_s = 0.3
    if mesh.rank == 1:
        time.sleep(1.0)
        return None
    try:
        comm.recv(torch.ones(5), mesh.world, 1)
    except CommTimeout as error:
        return str(error)


@pytest.mark.parametrize(("program", "call"), [(alone_in_a_collective, "all_reduce"), (alone_in_a_transfer, "recv")])
def test_a_wait_past_its_deadline_says_which_and_where(program, call):
    told = ranks.run(program, 2, fresh=True)[0]
    assert f"rank 0 waited 0 s in {call} #1 of world" in told and "[5] float32" in told
    assert "test_check.py:" in told and "look at the other ranks first" in told
