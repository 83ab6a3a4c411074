"""Keeps the whole sum: an all-reduce in disguise.

message: whole-kept
"""

import torch

from minidist.core import comm


def reduce_scatter(mesh, x):
    n, me, total = mesh.world_size, mesh.rank, x.clone()
    for k in range(1, n):
        came = torch.empty_like(x)
        comm.exchange([("send", x, (me + k) % n), ("recv", came, (me - k) % n)], mesh.world)
        total += came
    return total
