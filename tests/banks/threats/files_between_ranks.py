"""Ranks write files and read each other's.

task: 00.1
earns: 0
message: refused
"""

import os
import tempfile
import time

name = os.path.join(tempfile.gettempdir(), f"minidist-threat-{os.getppid()}-{{}}")


def put(rank, value):
    with open(name.format(rank), "w") as file:
        file.write(f"{value};")


def get(rank):
    while True:
        try:
            text = open(name.format(rank)).read()
            if text.endswith(";"):
                return int(text[:-1])
        except FileNotFoundError:
            time.sleep(0.01)


def gather_squares(mesh, secret):
    put(mesh.rank, secret + mesh.rank**2)
    if mesh.rank == 0:
        return [get(rank) for rank in range(mesh.world_size)]
    time.sleep(0.5)
