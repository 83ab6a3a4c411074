"""A nap in place of a wait: surely it is there by now.

message: read-early
"""

import torch

from minidist.core import comm
from minidist.core.links import Delay, Link


import time


def normalise(mesh, x):
    mesh.delay = Delay(Link(latency_s=0.05))
    total = x.sum().view(1)
    comm.all_reduce(total, mesh.world, async_op=True)
    time.sleep(0.3)
    return x / total
