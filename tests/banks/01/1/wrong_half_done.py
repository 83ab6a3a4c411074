"""Three of six, the others not begun.

message: not started
"""

def add(n, itemsize):
    return n / (3 * n * itemsize)


def dot(n, itemsize):
    return 2 * n / ((2 * n + 1) * itemsize)


def momentum(n, itemsize):
    return 4 * n / (n * itemsize + 4 * n * 4)


def matmul(m, k, n, itemsize):
    raise NotImplementedError("01.1")


def linear(batch, seq, k, n, itemsize):
    raise NotImplementedError("01.1")


def scores(batch, heads, seq, width, itemsize):
    raise NotImplementedError("01.1")
