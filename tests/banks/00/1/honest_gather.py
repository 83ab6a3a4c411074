"""The obvious one: every rank calls gather."""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(torch.tensor([secret + mesh.rank**2]), mesh.world)
    return [int(part) for part in parts] if parts else None
