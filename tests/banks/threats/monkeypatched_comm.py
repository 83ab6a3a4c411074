"""Replaces comm's functions by ones that make their results up.

task: 00.1
earns: 0
"""

import torch

from minidist.core import comm


def gather(x, group, dst=0, **kwargs):
    return [x.clone() for _ in group.ranks] if group.rank == dst else None


comm.gather = gather


def gather_squares(mesh, secret):
    parts = comm.gather(torch.tensor([secret + mesh.rank**2]), mesh.world)
    return [part.item() for part in parts] if parts else None
