"""Each rank sends as many numbers as its rank: the ranks do not call the same thing.

message: mismatch
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    parts = comm.gather(torch.full((mesh.rank + 1,), secret), mesh.world)
    return [part[0].item() for part in parts] if mesh.rank == 0 else None
