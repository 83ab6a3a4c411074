"""A central server: everything to rank 0, the whole back to everybody.

message: bytes
"""

import torch

from minidist.core import comm


def all_gather(mesh, x):
    n, me = mesh.world_size, mesh.rank
    whole = x.new_empty(n, *x.shape)
    if me == 0:
        whole[0] = x
        for r in range(1, n):
            comm.recv(whole[r], mesh.world, src=r)
        for r in range(1, n):
            comm.send(whole, mesh.world, dst=r)
    else:
        comm.send(x, mesh.world, dst=0)
        comm.recv(whole, mesh.world, src=0)
    return whole.flatten(0, 1)
