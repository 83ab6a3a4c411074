"""Ranks share the pages of one file through a tensor.

task: 00.1
earns: 0
message: refused
"""

import os
import tempfile
import time

import torch

name = os.path.join(tempfile.gettempdir(), f"minidist-threat-{os.getppid()}.bin")


def gather_squares(mesh, secret):
    shared = torch.from_file(name, shared=True, size=8, dtype=torch.int64)
    shared[mesh.rank] = secret + mesh.rank**2
    time.sleep(0.5)
    return shared[: mesh.world_size].tolist() if mesh.rank == 0 else None
