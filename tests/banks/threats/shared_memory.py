"""Ranks share memory by name.

task: 00.1
earns: 0
message: refused
"""

import os
import time
from multiprocessing import shared_memory


def gather_squares(mesh, secret):
    name = f"minidist-threat-{os.getppid()}-{mesh.world_size}"
    try:
        block = shared_memory.SharedMemory(name, create=True, size=64)
    except FileExistsError:
        block = shared_memory.SharedMemory(name)
    numbers = block.buf.cast("q")
    numbers[mesh.rank] = secret + mesh.rank**2
    time.sleep(0.5)
    return list(numbers[: mesh.world_size]) if mesh.rank == 0 else None
