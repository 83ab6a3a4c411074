"""A product has many FLOPs, so it is bound by compute.

message: by-flops
"""

def bound(op, machine):
    if machine["launch_s"] > seconds(op, machine | {"launch_s": 0}):
        return "launch"
    return "compute"


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
