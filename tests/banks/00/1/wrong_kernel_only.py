"""Uses a name that only exists in the kernel: a fresh start does not have it.

message: error
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(make_tensor(secret + mesh.rank**2), mesh.world)
    return [part.item() for part in parts] if mesh.rank == 0 else None
