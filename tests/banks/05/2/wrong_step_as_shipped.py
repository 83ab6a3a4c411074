"""The program as it was: the rank that overflowed leaves.

message: calls-missing
"""

import torch

from minidist.core import comm


def step_or_skip(mesh, weight, grad):
    if not torch.isfinite(grad).all():
        return weight
    comm.all_reduce(grad, mesh.world)
    return weight - grad
