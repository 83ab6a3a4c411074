"""Takes all-reduce for gather.

message: summed
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    total = comm.all_reduce(torch.tensor([secret + mesh.rank**2]), mesh.world)
    return [total.item()] * mesh.world_size if mesh.rank == 0 else None
