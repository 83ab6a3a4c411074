"""By the picture: ridge, roof and launch, and the share from the roof."""


def _roof(op, machine):
    intensity = op["flops"] / op["bytes"]
    return min(machine["peak"][op["dtype"]], machine["bandwidth"] * intensity)


def seconds(op, machine):
    return max(op["flops"] / _roof(op, machine), machine["launch_s"])


def bound(op, machine):
    if seconds(op, machine) == machine["launch_s"]:
        return "launch"
    ridge = machine["peak"][op["dtype"]] / machine["bandwidth"]
    return "compute" if op["flops"] / op["bytes"] > ridge else "memory"


def share(op, machine):
    return op["flops"] / (seconds(op, machine) * machine["peak"][op["dtype"]])
