"""Uses torch's functional collectives, which go past the process group's Python.

task: 00.1
earns: 6
"""

import torch


def gather_squares(mesh, secret):
    mine = torch.tensor([secret + mesh.rank**2])
    if mesh.world_size == 1:
        return mine.tolist()
    ops = torch.ops._c10d_functional
    out = ops.wait_tensor(ops.all_gather_into_tensor(mine, mesh.world_size, mesh.world.handle.group_name))
    return out.tolist() if mesh.rank == 0 else None
