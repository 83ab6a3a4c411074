"""A barrier carries no bytes; line magics, a shell line and a failing cell of notes do not matter."""

%matplotlib inline
!true
import torch
from minidist.core import comm


def gather_squares(mesh, secret):
    comm.barrier(mesh.world)
    parts = comm.gather(torch.tensor(secret + mesh.rank**2), mesh.world)
    if mesh.rank == 0:
        return [part.item() for part in parts]


1 / 0  # a note to self that went wrong, after the answer
