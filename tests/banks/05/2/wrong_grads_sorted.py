"""Sorts the names: the order is the same now, the absent branch is still absent.

message: calls-missing
"""

import torch

from minidist.core import comm


def sum_grads(mesh, model, grads):
    for name in sorted(grads):
        comm.all_reduce(grads[name], mesh.world)
    return [grads.get(name, torch.zeros(length, dtype=torch.float64)) for name, length in model]
