"""Asks all ranks whether they have the branch, and leaves it out where one has not.

message: absent-lost
"""

import torch

from minidist.core import comm


def sum_grads(mesh, model, grads):
    has = torch.tensor([name in grads for name, _ in model], dtype=torch.int8)
    comm.all_reduce(has, mesh.world, op="min")
    return [
        comm.all_reduce(grads[name], mesh.world) if there else torch.zeros(length, dtype=torch.float64)
        for (name, length), there in zip(model, has.tolist(), strict=True)
    ]
