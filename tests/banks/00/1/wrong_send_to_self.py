"""Rank 0 sends to itself too.

message: send-to-self
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    mine = torch.tensor([secret + mesh.rank**2])
    comm.send(mine, mesh.world, dst=0)
    if mesh.rank == 0:
        return [comm.recv(mine.clone(), mesh.world, src=r).item() for r in range(mesh.world_size)]
