"""Nothing by hand: tensors without data know their bytes, and torch counts the FLOPs of products."""

import torch
from torch.utils.flop_counter import FlopCounterMode

DTYPE = {2: torch.bfloat16, 4: torch.float32}


def tensor(*shape, itemsize):
    return torch.empty(*shape, dtype=DTYPE[itemsize], device="meta")


def intensity(flops, *tensors):
    return flops / sum(t.nbytes for t in tensors)


def product(a, b, extra_flops=0, extra=()):
    with FlopCounterMode(display=False) as counter:
        out = a @ b
    read = {id(t): t for t in (a, b)}.values()
    return (counter.get_total_flops() + extra_flops) / sum(t.nbytes for t in (*read, out, *extra))


def add(n, itemsize):
    a = tensor(n, itemsize=itemsize)
    return intensity(n, a, a, a)


def dot(n, itemsize):
    a = tensor(n, itemsize=itemsize)
    return intensity(2 * n, a, a, tensor((), itemsize=itemsize))


def momentum(n, itemsize):
    g, w = tensor(n, itemsize=itemsize), tensor(n, itemsize=4)
    return intensity(4 * n, g, w, w, w, w)


def matmul(m, k, n, itemsize):
    return product(tensor(m, k, itemsize=itemsize), tensor(k, n, itemsize=itemsize))


def linear(batch, seq, k, n, itemsize):
    x, w, bias = tensor(batch * seq, k, itemsize=itemsize), tensor(k, n, itemsize=itemsize), tensor(n, itemsize=itemsize)
    return product(x, w, extra_flops=batch * seq * n, extra=[bias])


def scores(batch, heads, seq, width, itemsize):
    q = tensor(batch * heads, seq, width, itemsize=itemsize)
    keys = tensor(batch * heads, width, seq, itemsize=itemsize)
    return product(q, keys)
