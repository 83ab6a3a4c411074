"""Round k: send to the right, receive from the left; everything in flight before anything is waited for."""

import torch

from minidist.core import comm


def around(mesh):
    n, me = mesh.world_size, mesh.rank
    return [((me + k) % n, (me - k) % n) for k in range(1, n)]


def broadcast(mesh, x, src):
    if mesh.rank == src:
        works = [comm.send(x, mesh.world, dst=right, async_op=True) for right, _ in around(mesh)]
        for work in works:
            work.wait()
    else:
        comm.recv(x, mesh.world, src=src)
    return x


def trade(mesh, pieces, like):
    """Send pieces[r] to r; what came, by sender; my own piece stays."""
    came = {mesh.rank: pieces[mesh.rank]}
    transfers = []
    for right, left in around(mesh):
        came[left] = torch.empty_like(like)
        transfers += [("send", pieces[right], right), ("recv", came[left], left)]
    comm.exchange(transfers, mesh.world)
    return [came[rank] for rank in range(mesh.world_size)]


def reduce_scatter(mesh, x):
    pieces = list(x.chunk(mesh.world_size))
    return torch.stack(trade(mesh, pieces, pieces[0])).sum(0)


def all_gather(mesh, x):
    return torch.cat(trade(mesh, [x] * mesh.world_size, x))


def all_to_all(mesh, x):
    pieces = list(x.chunk(mesh.world_size))
    return torch.cat(trade(mesh, pieces, pieces[0]))
