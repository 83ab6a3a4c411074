"""The engine has all that.

message: refused
"""

from minidist.plan import roofline


def bound(op, machine):
    return roofline.bound(roofline.Work(op["flops"], op["bytes"]), roofline.Machine("", machine["peak"][op["dtype"]], machine["bandwidth"]))


def seconds(op, machine):
    return max(op["flops"] / machine["peak"][op["dtype"]], op["bytes"] / machine["bandwidth"], machine["launch_s"])


def share(op, machine):
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
