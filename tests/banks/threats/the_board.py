"""Ranks tell each other numbers through the teaching board.

task: 00.1
earns: 6
"""

import time


def gather_squares(mesh, secret):
    if mesh.world_size == 1:
        return [secret]
    mesh.wire.board.enter(mesh.rank, {"op": "gather", "group": "sly", "seq": 1, "where": str(secret + mesh.rank**2)})
    if mesh.rank:
        time.sleep(0.5)
        return None
    found = []
    for rank in range(mesh.world_size):
        while (entry := mesh.wire.board.find(rank, ("sly", 1))) is None:
            time.sleep(0.01)
        found.append(int(entry["where"]))
    return found
