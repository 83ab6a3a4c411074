"""Reduces the overflow flag by its minimum: skips only if all overflow.

message: stepped-alone
"""

import torch

from minidist.core import comm


def step_or_skip(mesh, weight, grad):
    bad = torch.tensor([0.0 if torch.isfinite(grad).all() else 1.0], dtype=torch.float64)
    comm.all_reduce(bad, mesh.world, op="min")
    comm.all_reduce(grad, mesh.world)
    return weight if bad.item() else weight - grad
