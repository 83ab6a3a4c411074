"""Names sorted after the union is known from the model, an uneven all-to-all for the rows, min of finite flags."""

import torch

from minidist.core import comm
from minidist.core.links import Delay, Link


def mean_loss(mesh, losses):
    total = torch.tensor(losses, dtype=torch.float64)
    count = torch.ones_like(total)
    both = torch.stack([total.sum(), count.sum()])
    comm.all_reduce(both, mesh.world)
    return (both[0] / both[1]).item()


def sum_grads(mesh, model, grads):
    sums = {}
    works = {}
    for name, length in sorted(model):
        sums[name] = grads.get(name, torch.zeros(length, dtype=torch.float64)).clone()
        works[name] = comm.all_reduce(sums[name], mesh.world, async_op=True)
    return [works[name].wait() for name, _ in model]


def gather_rows(mesh, rows):
    n = mesh.world_size
    recv = comm.all_gather(torch.tensor([len(rows)]), mesh.world).tolist()
    return comm.all_to_all(rows.repeat(n, 1), mesh.world, send=[len(rows)] * n, recv=recv)


def step_or_skip(mesh, weight, grad):
    fine = torch.tensor([1.0 if grad.isfinite().all() else 0.0], dtype=torch.float64)
    both = comm.all_reduce(torch.cat([grad.nan_to_num(0.0, 0.0, 0.0), fine]), mesh.world)
    return weight - both[:-1] if both[-1] == mesh.world_size else weight


def normalise(mesh, x):
    mesh.delay = Delay(Link(latency_s=0.05))
    total = x.sum().view(1)
    work = comm.all_reduce(total, mesh.world, async_op=True)
    work.wait()
    return x / total
