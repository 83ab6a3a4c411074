"""Ranks save tensors to files, by C++.

task: 00.1
earns: 0
message: refused
"""

import os
import tempfile
import time

import torch

name = os.path.join(tempfile.gettempdir(), f"minidist-threat-{os.getppid()}-{{}}.pt")


def put(rank, value):
    torch.save(value, name.format(rank))


def get(rank):
    while True:
        try:
            return torch.load(name.format(rank))
        except Exception:
            time.sleep(0.01)


def gather_squares(mesh, secret):
    put(mesh.rank, secret + mesh.rank**2)
    if mesh.rank == 0:
        return [get(rank) for rank in range(mesh.world_size)]
    time.sleep(0.5)
