"""Right, in microseconds.

message: not-seconds
"""

def bound(op, machine):
    times = {
        "compute": op["flops"] / machine["peak"][op["dtype"]],
        "memory": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)


def seconds(op, machine):
    return 1e6 * max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / (seconds(op, machine) / 1e6) / machine["peak"][op["dtype"]]
