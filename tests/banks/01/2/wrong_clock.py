"""Asks the clock what can be worked out, and reads it once.

message: seconds
"""

def bound(op, machine):
    times = {
        "compute": op["flops"] / machine["peak"][op["dtype"]],
        "memory": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)


import time


def seconds(op, machine):
    return time.time()


def share(op, machine):
    spans = op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"]
    return spans[0] / max(spans)
