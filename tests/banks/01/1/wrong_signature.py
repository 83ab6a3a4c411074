"""The itemsize left out.

message: signature
"""

def add(n, itemsize):
    return n / (3 * n * itemsize)


def dot(n):
    return 2 * n / (2 * n + 1)


def momentum(n, itemsize):
    return 4 * n / (n * itemsize + 4 * n * 4)


def matmul(m, k, n, itemsize):
    return 2 * m * k * n / ((m * k + k * n + m * n) * itemsize)


def linear(batch, seq, k, n, itemsize):
    t = batch * seq
    return (2 * t * k * n + t * n) / ((t * k + k * n + n + t * n) * itemsize)


def scores(batch, heads, seq, width, itemsize):
    h = batch * heads
    return 2 * h * seq * seq * width / (h * (2 * seq * width + seq * seq) * itemsize)
