"""Calls the process group itself, which comm never hears of.

task: 00.1
earns: 6
message: told-everybody
"""

import torch


def gather_squares(mesh, secret):
    mine = torch.tensor([secret + mesh.rank**2])
    if mesh.world_size == 1:
        return mine.tolist()
    parts = [torch.zeros_like(mine) for _ in range(mesh.world_size)]
    mesh.world.handle.allgather([parts], [mine]).wait()
    return [part.item() for part in parts] if mesh.rank == 0 else None
