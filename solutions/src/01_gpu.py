# %% [markdown] name="head"
# # Exercise 1: count first, then time
# To [lesson 1](../lessons/01_gpu.ipynb). Two tasks, 20 points, 45 minutes. No clock decides about a point here: intensity is
# arithmetic, and the machines' numbers are given.

# %% name="setup"
from minidist.course import check, finish, hint

# %% [markdown] name="spec-01-1"
# ## Task 01.1: the intensity of six operations
# Write six functions. Each returns the arithmetic intensity of one operation, its FLOPs for each byte moved, as a float. The arguments
# are sizes, and last the bytes of one element.
#
# | function | what is computed | points |
# |---|---|---|
# | `add(n, itemsize)` | out = a + b, vectors of length n | 1 |
# | `dot(n, itemsize)` | out = the sum of a · b over vectors of length n; out is one number | 1 |
# | `momentum(n, itemsize)` | an optimizer step *in place* on n weights: v ← μ v + g, then w ← w − η v | 2 |
# | `matmul(m, k, n, itemsize)` | out = a @ b, of shapes (m, k) and (k, n) | 2 |
# | `linear(batch, seq, k, n, itemsize)` | out = x @ w + bias, of shapes (batch, seq, k), (k, n) and (n) | 2 |
# | `scores(batch, heads, seq, width, itemsize)` | attention's scores: out = q @ kᵀ in each head; q and k have shape (batch, heads, seq, width) | 2 |
#
# The convention, that of the lesson and of data sheets:
# - A multiply is one FLOP, an add another; a dot product of length n counts as 2n. Scaling by μ or η is a multiply.
# - Every input is read from memory once, every output written once; a tensor changed in place is both. Nothing else moves:
#   what is needed in between stays in registers.
# - All tensors have the given itemsize (4 or 2 bytes), except in `momentum`: there g has it, and w and v are float32 (4 bytes) always.
#
# **Graded**: each function alone, at six sets of sizes drawn anew at every check, within ±1 %.
# **Allowed**: Python, numpy, torch. **Not allowed**: `minidist.plan`, which has the answer. **Limit**: 10 seconds a call.


# %% name="answer-01-1-add" tags=["answer"]
def add(n, itemsize):
    """An add of two vectors. FLOPs a byte."""
    # BEGIN ANSWER
    return n / (3 * n * itemsize)
    # END ANSWER
    # STUB: raise NotImplementedError("01.1")


# %% name="answer-01-1-dot" tags=["answer"]
def dot(n, itemsize):
    """The dot product of two vectors. FLOPs a byte."""
    # BEGIN ANSWER
    return 2 * n / ((2 * n + 1) * itemsize)
    # END ANSWER
    # STUB: raise NotImplementedError("01.1")


# %% name="answer-01-1-momentum" tags=["answer"]
def momentum(n, itemsize):
    """v = mu * v + g and w = w - eta * v, in place; v and w are float32. FLOPs a byte."""
    # BEGIN ANSWER
    flops = 4 * n  # mu * v, + g, eta * v, w - that
    # g read; v read and written; w read and written
    nbytes = n * (itemsize + 2 * 4 + 2 * 4)
    return flops / nbytes
    # END ANSWER
    # STUB: raise NotImplementedError("01.1")


# %% name="answer-01-1-matmul" tags=["answer"]
def matmul(m, k, n, itemsize):
    """(m, k) @ (k, n). FLOPs a byte."""
    # BEGIN ANSWER
    return 2 * m * k * n / ((m * k + k * n + m * n) * itemsize)
    # END ANSWER
    # STUB: raise NotImplementedError("01.1")


# %% name="answer-01-1-linear" tags=["answer"]
def linear(batch, seq, k, n, itemsize):
    """(batch, seq, k) @ (k, n) + (n). FLOPs a byte."""
    # BEGIN ANSWER
    tokens = batch * seq  # all of them share one weight
    flops = 2 * tokens * k * n + tokens * n
    return flops / ((tokens * k + k * n + n + tokens * n) * itemsize)
    # END ANSWER
    # STUB: raise NotImplementedError("01.1")


# %% name="answer-01-1-scores" tags=["answer"]
def scores(batch, heads, seq, width, itemsize):
    """q @ k.T in each head. FLOPs a byte."""
    # BEGIN ANSWER
    flops = 2 * batch * heads * seq * seq * width
    elements = batch * heads * (2 * seq * width + seq * seq)
    return flops / (elements * itemsize)
    # END ANSWER
    # STUB: raise NotImplementedError("01.1")


# %% name="check-01-1" tags=["check"]
check("01.1")

# %% [markdown] name="why-01-1" tags=["solution"]
# **Why.** Everything element-wise has an intensity that does not depend on its size: an add does one FLOP for three elements moved,
# a dot two FLOPs for two elements, and the optimizer step four FLOPs for up to 20 bytes. No tuning moves these to the right; only
# *fusion* does, by dropping tensors from the list of what is moved. A product is different: its FLOPs grow like a volume, its bytes
# like a surface. That is why `"linear"` profits from batch × seq (one weight for all tokens) and `"scores"` is limited by the head's
# width, which never grows: for long sequences the s² results are nearly all of the traffic, 2 s² w FLOPs over 2 s² bytes at two
# bytes an element, so it tends to the width of a head, 64 or 128, left of every ridge in the table of the lesson. That number is
# the reason for FlashAttention, which never writes the scores at all.

# %% [markdown] name="spec-01-2"
# ## Task 01.2: name the bound
# Three things run side by side: the arithmetic, the memory traffic, and the launch of the next kernel. The longest decides how long
# an operation takes. Write three functions; each gets an operation and a machine, both dicts:
#
# - `op` has `"flops"` and `"bytes"` (as in 01.1), `"dtype"` (`"bfloat16"` or `"float32"`) and a `"name"` for the curious;
# - `machine` has `"peak"` (a dict: FLOP/s by dtype), `"bandwidth"` (bytes/s), `"launch_s"` (seconds from one launch to the next) and
#   a `"name"`.
#
# | function | returns | points |
# |---|---|---|
# | `bound(op, machine)` | which of the three is the longest: `"compute"`, `"memory"` or `"launch"` | 4 |
# | `seconds(op, machine)` | how long that is, in seconds | 3 |
# | `share(op, machine)` | the FLOP/s reached in that time, as a share (0 to 1) of the peak for the operation's dtype | 3 |
#
# **Graded**: each function alone, on 18 operations drawn anew; numbers within ±1 %. The machines are an H100 and an A100 by their
# data sheets, and a CPU core as it was recorded; launch costs are drawn. No operation is a close call: the longest time is
# at least 1.3 times the next. The functions may call each other. **Allowed and not**: as in 01.1. **Limit**: 10 seconds a call.


# %% name="answer-01-2-bound" tags=["answer"]
def bound(op, machine):
    """Which of the three takes longest."""
    # BEGIN ANSWER
    times = {
        "compute": op["flops"] / machine["peak"][op["dtype"]],
        "memory": op["bytes"] / machine["bandwidth"],
        "launch": machine["launch_s"],
    }
    return max(times, key=times.get)
    # END ANSWER
    # STUB: raise NotImplementedError("01.2")


# %% name="answer-01-2-seconds" tags=["answer"]
def seconds(op, machine):
    """How long the longest of the three takes."""
    # BEGIN ANSWER
    compute = op["flops"] / machine["peak"][op["dtype"]]
    memory = op["bytes"] / machine["bandwidth"]
    return max(compute, memory, machine["launch_s"])
    # END ANSWER
    # STUB: raise NotImplementedError("01.2")


# %% name="answer-01-2-share" tags=["answer"]
def share(op, machine):
    """FLOP/s reached as a share of the peak."""
    # BEGIN ANSWER
    return op["flops"] / seconds(op, machine) / machine["peak"][op["dtype"]]
    # END ANSWER
    # STUB: raise NotImplementedError("01.2")


# %% name="check-01-2" tags=["check"]
check("01.2")

# %% [markdown] name="why-01-2" tags=["solution"]
# **Why.** `max`, not a sum: while one kernel computes, its next operands are on the way and the host prepares the next launch, so the
# shorter two hide behind the longest. Real kernels overlap less than perfectly, so this is a floor of the time and a ceiling of the
# share. The share is what "utilisation" does not tell you: a device that adds vectors all day is 100 % utilised, and its share of
# the peak is a fraction of a percent.

# %% [markdown] name="live-text"
# ## And on this machine?
# No points for this one: your functions against the clock, with a roof measured a moment ago on one core. A factor of two either
# way is a good day; caches make small adds faster than the roof, other programs make everything slower. The order should hold.

# %% name="live" tags=["demo"]
import torch

from minidist.plan import roofline

torch.set_num_threads(1)


def adding(n):
    a, b, out = torch.rand(n), torch.rand(n), torch.empty(n)
    return lambda: torch.add(a, b, out=out)


def multiplying(m, k, n):
    a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
    return lambda: torch.mm(a, b, out=out)


shapes = {
    "matvec": (1, 2048, 2048),
    "a small product": (48, 48, 48),
    "a larger one": (512, 512, 512),
}
calls = [adding(16), adding(2**23), *[multiplying(*shape) for shape in shapes.values()]]
taken = roofline.measure(calls)
works = [
    roofline.elementwise(16, 4),
    roofline.elementwise(2**23, 4),
    *[roofline.matmul(*s, 4) for s in shapes.values()],
]
mine = {"name": "this core", "launch_s": taken[0]}
mine |= {
    "bandwidth": works[1].nbytes / taken[1],
    "peak": {"float32": works[-1].flops / taken[-1]},
}
for name, work, took in zip(
    ["tiny add", "large add", *shapes], works, taken, strict=True
):
    op = {"name": name, "flops": work.flops, "bytes": work.nbytes, "dtype": "float32"}
    try:
        says = f"{bound(op, mine)}, {seconds(op, mine) * 1e6:.1f} µs"
    except NotImplementedError:
        says = "(not written yet)"
    print(f"{name:16} took {took * 1e6:8.1f} µs; you say {says}")

# %% [markdown] name="help"
# Stuck? `hint("01.1")` gives the next of three hints, and costs nothing. `solution("01.1")` shows answer and reasoning once you have
# passed or tried three times.

# %% name="finish" tags=["check"]
finish("01")
