"""The program as it was: a barrier in place of a wait.

message: read-early
"""

import torch

from minidist.core import comm
from minidist.core.links import Delay, Link


def normalise(mesh, x):
    mesh.delay = Delay(Link(latency_s=0.05))
    total = x.sum().view(1)
    comm.all_reduce(total, mesh.world, async_op=True)
    comm.barrier(mesh.world)
    return x / total
