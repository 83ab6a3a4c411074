"""Prints the list instead of returning it.

message: nothing-on-0
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(torch.tensor([secret + mesh.rank**2]), mesh.world)
    if mesh.rank == 0:
        print([part.item() for part in parts])
