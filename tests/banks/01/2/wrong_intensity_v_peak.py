"""Compares FLOPs a byte with FLOP/s.

message: intensity-v-peak
"""

def bound(op, machine):
    if machine["launch_s"] > seconds(op, machine | {"launch_s": 0}):
        return "launch"
    return "compute" if op["flops"] / op["bytes"] > machine["peak"][op["dtype"]] else "memory"


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
