"""Above the ridge is memory, is it not?

message: intensity-v-peak
"""

def bound(op, machine):
    compute, memory = op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"]
    if machine["launch_s"] > max(compute, memory):
        return "launch"
    return "memory" if compute > memory else "compute"


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
