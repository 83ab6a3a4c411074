"""Prints what it should return.

message: nothing-returned
"""

def bound(op, machine):
    times = {
        "compute": op["flops"] / machine["peak"][op["dtype"]],
        "memory": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    print(op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]])
