"""Not begun.

message: not started
"""

def bound(op, machine):
    raise NotImplementedError("01.2")


def seconds(op, machine):
    raise NotImplementedError("01.2")


def share(op, machine):
    raise NotImplementedError("01.2")
