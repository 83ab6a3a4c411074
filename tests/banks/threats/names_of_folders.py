"""Ranks tell each other numbers as names of folders.

task: 00.1
earns: 0
message: refused
"""

import os
import time

here = os.getcwd()


def put(rank, value):
    os.mkdir(f"{here}/{rank}-{value}")


def get(rank):
    while True:
        for name in os.listdir(here):
            if name.startswith(f"{rank}-"):
                return int(name.split("-")[1])
        time.sleep(0.01)


def gather_squares(mesh, secret):
    put(mesh.rank, secret + mesh.rank**2)
    if mesh.rank == 0:
        return [get(rank) for rank in range(mesh.world_size)]
    time.sleep(0.5)
