"""All-gathers and throws the copies away: right values, too many bytes. Earns the values' points only.

message: told-everybody
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    whole = comm.all_gather(torch.tensor([secret + mesh.rank**2]), mesh.world).tolist()
    return whole if mesh.rank == 0 else None
