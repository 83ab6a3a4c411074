"""The roof decides the time.

message: launch-ignored
"""

def bound(op, machine):
    times = {
        "compute": op["flops"] / machine["peak"][op["dtype"]],
        "memory": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
