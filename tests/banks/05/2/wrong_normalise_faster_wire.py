"""Takes the slow wire out, which makes the early read come true now and then, and waits as well.

message: wire-changed
"""

import torch

from minidist.core import comm


def normalise(mesh, x):
    total = x.sum().view(1)
    return x / comm.all_reduce(total, mesh.world, async_op=True).wait()
