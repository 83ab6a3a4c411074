"""Hands back what comm returned: tensors, not ints.

message: not-ints
"""

import torch

from minidist.core import comm


def gather_squares(mesh, secret):
    return comm.gather(torch.tensor([secret + mesh.rank**2]), mesh.world)
