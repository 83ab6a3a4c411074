"""Everybody reduces, then each decides from what was its own.

message: stepped-alone
"""

import torch

from minidist.core import comm


def step_or_skip(mesh, weight, grad):
    skip = not torch.isfinite(grad).all()
    comm.all_reduce(grad, mesh.world)
    return weight if skip else weight - grad
