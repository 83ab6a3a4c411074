"""Launches a gather to everybody under the line of a barrier.

task: 00.1
earns: 6
message: tape-altered
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    mine = torch.tensor([secret + mesh.rank**2])
    if mesh.world_size == 1:
        return mine.tolist()
    parts = [torch.zeros_like(mine) for _ in range(mesh.world_size)]

    def start():
        return mesh.world.handle.allgather([parts], [mine])

    comm._run("gather", mine, mesh.world, mesh.world_size * 8, start, lambda: None, "act", False, peer=0)
    return [part.item() for part in parts] if mesh.rank == 0 else None
