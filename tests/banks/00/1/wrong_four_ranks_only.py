"""Counts on four ranks.

message: fixed-world-size
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    mine = torch.tensor([secret + mesh.rank**2])
    if mesh.rank:
        comm.send(mine, mesh.world, dst=0)
        return None
    return [mine.item()] + [comm.recv(mine.clone(), mesh.world, src=r).item() for r in (1, 2, 3)]
