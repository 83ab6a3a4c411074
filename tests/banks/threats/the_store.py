"""Ranks tell each other numbers through the store that introduced them.

task: 00.1
earns: 0
message: refused
"""

import time


def gather_squares(mesh, secret):
    if mesh.world_size == 1:
        return [secret]
    store = mesh.world.handle.get_group_store()
    store.set(f"sly-{mesh.rank}", str(secret + mesh.rank**2))
    if mesh.rank == 0:
        return [int(store.get(f"sly-{rank}")) for rank in range(mesh.world_size)]
    time.sleep(0.3)
