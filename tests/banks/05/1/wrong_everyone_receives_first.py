"""Everybody receives before sending: nobody ever sends.

message: unmatched
"""

import torch

from minidist.core import comm


def all_to_all(mesh, x):
    n, me = mesh.world_size, mesh.rank
    parts = list(x.chunk(n))
    came = list(parts)
    for k in range(1, n):
        came[(me - k) % n] = comm.recv(torch.empty_like(parts[0]), mesh.world, src=(me - k) % n)
        comm.send(parts[(me + k) % n], mesh.world, dst=(me + k) % n)
    return torch.cat(came)
