"""The delay line: what waits how long, one operation after another, inside a server and outside."""

import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.links import Delay, Link


def test_a_link_serialises_what_crosses_it():
    link = Link(latency_s=1.0, bytes_per_s=10.0)
    assert link.book(100.0, 20) == 103.0  # 1 s + 2 s
    assert link.book(101.0, 10) == 105.0  # free at 103
    assert link.book(200.0, 0) == 201.0


def test_outside_is_what_spans_two_servers():
    delay = Delay(inside=Link(1e-6), outside=Link(1e-3), ranks_per_host=4)
    assert delay.link((0, 3)) is delay.inside and delay.link((3, 4)) is delay.outside


@pytest.mark.parametrize(
    "make", [lambda: Link(-1.0), lambda: Link(0.0, 0.0), lambda: Delay(Link(), Link()), lambda: Delay(Link(), None, 4)]
)
def test_refusals(make):
    with pytest.raises(ValueError):
        make()


def delayed(mesh):
    """A broadcast, two overlapping all-reduces and a transfer, over a link of 100 ms and 1 kB/s."""
    mesh.delay = Delay(Link(0.1, 1000.0))
    comm.broadcast(torch.zeros(25), mesh.world)  # 100 B, booked (n-1)/n: 50 ms
    first = comm.all_reduce(torch.zeros(25), mesh.world, async_op=True)  # sends 100 B: 100 ms
    second = comm.all_reduce(torch.zeros(25), mesh.world, async_op=True)
    early = first.is_completed()
    second.wait()
    first.wait()
    comm.exchange([("send", torch.zeros(25), 1 - mesh.rank), ("recv", torch.zeros(25), 1 - mesh.rank)], mesh.world)
    mesh.delay = None
    return early, mesh.tape


def test_operations_take_at_least_what_the_link_takes():
    for early, tape in ranks.run(delayed, 2):
        broadcast, first, second, send, recv = tape
        assert not early
        assert broadcast.finish - broadcast.launch >= 0.15
        assert first.finish - first.launch >= 0.2 and abs(second.finish - first.finish) >= 0.2 - 1e-9  # whichever came first
        assert min(send.delay, recv.delay) >= 0.2 - 1e-9 and abs(send.finish - recv.finish) >= 0.2 - 1e-9
        assert all(line.delay > 0 for line in tape)


def test_off_by_default():
    def program(mesh):
        comm.all_reduce(torch.zeros(25), mesh.world)
        return mesh.delay, mesh.tape[0].delay

    assert ranks.run(program, 2) == [(None, 0.0)] * 2
