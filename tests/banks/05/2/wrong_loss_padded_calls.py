"""Right numbers: the ranks that are done take part with zeros, one call a loss.

message: bytes
"""

import torch

from minidist.core import comm


def mean_loss(mesh, losses):
    longest = int(comm.all_reduce(torch.tensor([len(losses)]), mesh.world, op="max"))
    both = torch.zeros(2, dtype=torch.float64)
    for i in range(longest):
        mine = [losses[i], 1.0] if i < len(losses) else [0.0, 0.0]
        both += comm.all_reduce(torch.tensor(mine, dtype=torch.float64), mesh.world)
    return (both[0] / both[1]).item()
