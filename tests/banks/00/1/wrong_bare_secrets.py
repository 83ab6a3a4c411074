"""Forgets the square.

message: square-ignored
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(torch.tensor([secret]), mesh.world)
    return [part.item() for part in parts] if mesh.rank == 0 else None
