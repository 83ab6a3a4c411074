"""The root sends to all ranks, itself among them.

message: send-to-self
"""

import torch

from minidist.core import comm


def broadcast(mesh, x, src):
    if mesh.rank == src:
        comm.exchange([("send", x, r) for r in range(mesh.world_size)], mesh.world)
        return x
    return comm.recv(torch.empty_like(x), mesh.world, src=src)
