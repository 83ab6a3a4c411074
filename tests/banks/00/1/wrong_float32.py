"""Sends floats: seven digits arrive.

message: float32
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(torch.tensor([float(secret + mesh.rank**2)]), mesh.world)
    return [int(part.item()) for part in parts] if mesh.rank == 0 else None
