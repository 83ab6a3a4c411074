"""The rank without losses says so, and leaves the others waiting.

message: calls-missing
"""

import torch

from minidist.core import comm


def mean_loss(mesh, losses):
    if not losses:
        return 0.0
    both = comm.all_reduce(torch.tensor([sum(losses), len(losses)], dtype=torch.float64), mesh.world)
    return (both[0] / both[1]).item()
