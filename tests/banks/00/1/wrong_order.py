"""Lists the messages backwards, as they were received.

message: order
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    mine = torch.tensor([secret + mesh.rank**2])
    if mesh.rank:
        comm.send(mine, mesh.world, dst=0)
        return None
    got = []
    for rank in reversed(range(1, mesh.world_size)):
        got.append(comm.recv(torch.zeros_like(mine), mesh.world, src=rank).item())
    return [*got, mine.item()]
