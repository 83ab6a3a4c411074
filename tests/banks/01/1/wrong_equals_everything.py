"""An object that claims to equal any number.

message: not-a-number
"""

class Yes(float):
    def __eq__(self, other):
        return True

    def __sub__(self, other):
        return 0.0

    __rsub__ = __sub__
    __hash__ = float.__hash__


def add(n, itemsize):
    return Yes(1.0)


def dot(n, itemsize):
    return Yes(1.0)


def momentum(n, itemsize):
    return Yes(1.0)


def matmul(m, k, n, itemsize):
    return Yes(1.0)


def linear(batch, seq, k, n, itemsize):
    return Yes(1.0)


def scores(batch, heads, seq, width, itemsize):
    return Yes(1.0)
