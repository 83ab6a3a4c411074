"""Calls the backend below the process group.

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
    backend = mesh.world.handle._get_backend(torch.device("cpu"))
    backend.allgather([parts], [mine]).wait()
    return [part.item() for part in parts] if mesh.rank == 0 else None
