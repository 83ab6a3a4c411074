"""Rank 0 decides for all, from its own gradient.

message: stepped-alone
"""

import torch

from minidist.core import comm


def step_or_skip(mesh, weight, grad):
    skip = torch.tensor([0.0 if torch.isfinite(grad).all() else 1.0], dtype=torch.float64)
    comm.broadcast(skip, mesh.world, src=0)
    comm.all_reduce(grad, mesh.world)
    return weight if skip.item() else weight - grad
