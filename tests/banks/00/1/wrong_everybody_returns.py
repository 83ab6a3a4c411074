"""Thinks that a result on rank 0 is not enough: everybody gathers, everybody returns.

message: list-everywhere
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    return comm.all_gather(torch.tensor([secret + mesh.rank**2]), mesh.world).tolist()
