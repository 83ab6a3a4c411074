"""Batched products are all one helper; FLOPs of the bias are left out, which is far below one percent; ints stay ints."""

import math


def _product(copies, m, k, n, itemsize, shared=False, bias=False):
    weights = 1 if shared else copies
    elements = copies * m * k + weights * k * n + copies * m * n + bias * n
    return copies * 2 * m * k * n / (elements * itemsize)


def matmul(m, k, n, itemsize):
    return _product(1, m, k, n, itemsize)


def linear(batch, seq, k, n, itemsize):
    return _product(batch, seq, k, n, itemsize, shared=True, bias=True)


def scores(batch, heads, seq, width, itemsize):
    return _product(batch * heads, seq, width, seq, itemsize)


def dot(n, itemsize):
    return _product(1, 1, n, 1, itemsize)


def add(n, itemsize):
    return math.pow(3 * itemsize, -1)


def momentum(n, itemsize):
    return 4 / (itemsize + 16)
