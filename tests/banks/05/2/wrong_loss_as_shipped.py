"""The program as it was: a call a loss.

message: calls-missing
"""

import torch

from minidist.core import comm


def mean_loss(mesh, losses):
    both = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        both += comm.all_reduce(torch.tensor([loss, 1.0], dtype=torch.float64), mesh.world)
    return (both[0] / both[1]).item()
