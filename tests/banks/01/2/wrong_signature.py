"""Wants the intensity, which nobody passes.

message: signature
"""

def bound(intensity, op, machine):
    return 'compute' if intensity > machine['peak'][op['dtype']] / machine['bandwidth'] else 'memory'


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
