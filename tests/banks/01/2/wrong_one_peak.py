"""The bfloat16 peak for everything, where there is one.

message: dtype-ignored
"""

def bound(op, machine):
    times = {
        "compute": op["flops"] / max(machine["peak"].values()),
        "memory": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
