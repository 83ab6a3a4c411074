"""In words of its own.

message: unknown-bound
"""

def bound(op, machine):
    times = {
        "compute-bound": op["flops"] / machine["peak"][op["dtype"]],
        "memory-bound": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
