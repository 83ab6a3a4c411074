"""Sends the secret and the square apart: twice the bytes.

message: bytes
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    secrets = comm.gather(torch.tensor([secret]), mesh.world)
    squares = comm.gather(torch.tensor([mesh.rank**2]), mesh.world)
    if mesh.rank == 0:
        return [a.item() + b.item() for a, b in zip(secrets, squares, strict=True)]
