"""Receives into a tensor and returns another.

message: not-received
"""

import torch

from minidist.core import comm


def broadcast(mesh, x, src):
    if mesh.rank == src:
        comm.exchange([("send", x, r) for r in range(mesh.world_size) if r != src], mesh.world)
    else:
        comm.recv(torch.empty_like(x), mesh.world, src=src)
    return x
