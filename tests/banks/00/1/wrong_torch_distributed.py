"""Goes around the tape by name.

message: refused
"""

import torch
import torch.distributed as dist


def gather_squares(mesh, secret):
    parts = [None] * mesh.world_size if mesh.rank == 0 else None
    if mesh.world_size == 1:
        return [secret]
    dist.gather_object(secret + mesh.rank**2, parts)
    return parts
