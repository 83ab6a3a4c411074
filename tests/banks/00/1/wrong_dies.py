"""A rank dies on the way.

message: died
"""

import os


def gather_squares(mesh, secret):
    if mesh.rank == mesh.world_size - 1:
        os._exit(7)
