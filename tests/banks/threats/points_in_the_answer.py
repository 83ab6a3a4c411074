"""Returns points: too many, negative ones, and none at all.

task: 00.1
earns: 0
"""

def gather_squares(mesh, secret):
    return [{"points": 1000, "status": "passed"}, -5, True, None][mesh.world_size - 1]
