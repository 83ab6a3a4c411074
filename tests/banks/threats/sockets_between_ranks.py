"""Ranks talk over a socket of their own.

task: 00.1
earns: 0
message: refused
"""

import os
import socket
import time


def gather_squares(mesh, secret):
    address = f"\0minidist-threat-{os.getppid()}-{mesh.world_size}"
    if mesh.rank == 0:
        door, found = socket.socket(socket.AF_UNIX), {0: secret}
        door.bind(address)
        door.listen()
        while len(found) < mesh.world_size:
            rank, value = door.accept()[0].recv(100).split()
            found[int(rank)] = int(value)
        return [found[rank] for rank in range(mesh.world_size)]
    time.sleep(0.2)
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    line.send(f"{mesh.rank} {secret + mesh.rank**2}".encode())
