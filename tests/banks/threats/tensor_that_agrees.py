"""Returns a tensor of a class that answers every question with yes.

task: 05.1
earns: 0
"""

import torch


class Sly(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return True


def all_gather(mesh, x):
    return x.as_subclass(Sly)


def broadcast(mesh, x, src):
    return x.as_subclass(Sly)


reduce_scatter = all_to_all = all_gather
