"""Sends everything to the last rank.

message: wrong-destination
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    last = mesh.world_size - 1
    parts = comm.gather(torch.tensor([secret + mesh.rank**2]), mesh.world, dst=last)
    return [part.item() for part in parts] if mesh.rank == last else None
