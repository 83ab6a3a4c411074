"""Goes around the tape.

message: refused
"""

import torch

from minidist.core import comm


import torch.distributed as dist


def broadcast(mesh, x, src):
    if mesh.world_size > 1:
        dist.broadcast(x, src)
    return x
