"""Thinks a module's global is seen by all ranks.

message: no-list
"""

shared = []


def gather_squares(mesh, secret):
    shared.append(secret + mesh.rank**2)
    return shared if mesh.rank == 0 else None
