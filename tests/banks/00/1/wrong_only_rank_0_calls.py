"""Thinks a collective is something rank 0 does to the others.

message: not-all-call
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    if mesh.rank == 0:
        return [part.item() for part in comm.gather(torch.tensor([secret]), mesh.world)]
