"""Rings that relay to the neighbour, a binomial tree, and a barrier that does nothing for anybody."""

import torch

from minidist.core import comm


def ring_step(mesh, out, like):
    n, me = mesh.world_size, mesh.rank
    came = torch.empty_like(like)
    comm.exchange([("send", out, (me + 1) % n), ("recv", came, (me - 1) % n)], mesh.world)
    return came


def broadcast(mesh, x, src):
    n = mesh.world_size
    place, reach = (mesh.rank - src) % n, 1
    x = x.clone()
    while reach < n:
        if place < reach and place + reach < n:
            comm.send(x, mesh.world, dst=(mesh.rank + reach) % n)
        elif reach <= place < 2 * reach:
            comm.recv(x, mesh.world, src=(mesh.rank - reach) % n)
        reach *= 2
    comm.barrier(mesh.world)
    return x


def reduce_scatter(mesh, x):
    n, me = mesh.world_size, mesh.rank
    parts = x.reshape(n, -1, *x.shape[1:])
    moving = parts[(me - 1) % n].clone()
    for k in range(2, n + 1):
        moving = ring_step(mesh, moving, moving) + parts[(me - k) % n]
    return moving


def all_gather(mesh, x):
    n, me = mesh.world_size, mesh.rank
    found = {me: x}
    for k in range(1, n):
        found[(me - k) % n] = ring_step(mesh, found[(me - k + 1) % n], x)
    return torch.cat([found[r] for r in range(n)])


def all_to_all(mesh, x):
    n, me = mesh.world_size, mesh.rank
    parts, out = x.chunk(n), list(x.chunk(n))
    for k in range(1, n):
        a, b = (me + k) % n, (me - k) % n
        work = comm.send(parts[a].contiguous(), mesh.world, dst=a, async_op=True)
        out[b] = comm.recv(torch.empty_like(parts[b]), mesh.world, src=b)
        work.wait()
    return torch.cat(out)
