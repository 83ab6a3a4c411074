"""Counts ranks from 1.

message: rank-from-1
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(torch.tensor([secret + (mesh.rank + 1) ** 2]), mesh.world)
    return [part.item() for part in parts] if mesh.rank == 0 else None
