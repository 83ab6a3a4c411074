"""The sum over all ranks, divided by this rank's own count.

message: wrong-count
"""

import torch

from minidist.core import comm


def mean_loss(mesh, losses):
    total = comm.all_reduce(torch.tensor([sum(losses)], dtype=torch.float64), mesh.world)
    return total.item() / max(1, len(losses))
