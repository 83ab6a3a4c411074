"""Messages by hand, received in another order than the list's; a helper and a constant beside the answer."""

import torch

from minidist.core import comm


KIND = torch.int64


def mine(mesh, secret):
    return torch.tensor([secret + mesh.rank**2], dtype=KIND)


def gather_squares(mesh, secret):
    if mesh.rank > 0:
        comm.send(mine(mesh, secret), mesh.world, dst=0)
        return None
    found = {0: mine(mesh, secret).item()}
    for rank in reversed(range(1, mesh.world_size)):
        found[rank] = comm.recv(torch.zeros(1, dtype=KIND), mesh.world, src=rank).item()
    return [found[rank] for rank in sorted(found)]
