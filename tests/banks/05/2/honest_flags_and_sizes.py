"""Sizes and flags told first, by maximum and by gather; a flat buffer for the gradients."""

import torch

from minidist.core import comm
from minidist.core.links import Delay, Link


def mean_loss(mesh, losses):
    both = comm.all_reduce(torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64), mesh.world)
    return float(both[0] / both[1])


def sum_grads(mesh, model, grads):
    flat = torch.cat([grads[name] if name in grads else torch.zeros(length, dtype=torch.float64) for name, length in model])
    comm.all_reduce(flat, mesh.world)
    return list(flat.split([length for _, length in model]))


def gather_rows(mesh, rows):
    sizes = comm.all_gather(torch.tensor([len(rows)]), mesh.world).tolist()
    parts = []
    for rank, size in enumerate(sizes):  # a broadcast of the exact size from each
        part = rows.clone() if rank == mesh.rank else torch.empty(size, 3, dtype=torch.int64)
        parts.append(comm.broadcast(part, mesh.world, src=rank))
    return torch.cat(parts)


def step_or_skip(mesh, weight, grad):
    bad = torch.tensor([0.0 if torch.isfinite(grad).all() else 1.0], dtype=torch.float64)
    comm.all_reduce(bad, mesh.world, op="max")
    if bad.item():
        return weight
    return weight - comm.all_reduce(grad, mesh.world)


def normalise(mesh, x):
    mesh.delay = Delay(Link(latency_s=0.05))
    work = comm.all_reduce(x.sum().view(1), mesh.world, async_op=True)
    squares = x * x
    while not work.is_completed():
        squares = squares * 1.0
    return x / work.wait()
