# %% [markdown] name="head"
# # Exercises 5: build four, repair five
# To [lesson 5](../lessons/05_collectives.ipynb). Two tasks, 20 points each, 60 minutes each. In both, every function pays
# on its own: do them in any order, check as often as you like.

# %% name="setup"
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.links import Delay, Link
from minidist.course import check, finish, hint, solution


def each(fn, *inputs):
    """Try a function: rank r gets the arguments inputs[r]. Returns the results by rank."""
    return ranks.run(
        lambda mesh: fn(mesh, *inputs[mesh.rank]), len(inputs), timeout_s=10
    )


# %% [markdown] name="spec-05-1"
# ## Task 05.1: four collectives from messages
# Difficulty: middling. Build these out of `comm.send`, `comm.recv` and `comm.exchange`, for the world of `mesh`, with 1, 2, 3 and
# 4 ranks ($n$ below). Each is called on every rank at once.
#
# | function | brings | returns, on every rank |
# |---|---|---|
# | `broadcast(mesh, x, src)` | `x`, same shape and dtype everywhere | the `x` of rank `src` |
# | `reduce_scatter(mesh, x)` | `x` ($nk$, ...) | its own $k$ rows of the sum over the ranks |
# | `all_gather(mesh, x)` | `x` ($k$, ...) | the ($nk$, ...) rows of all, in rank order |
# | `all_to_all(mesh, x)` | `x` ($nk$, ...): $k$ rows for each rank | ($nk$, ...): the rows that each rank had for it, in rank order |
#
# - A result is a tensor of the dtype of `x` (`int64`, `float64`), which may have one, two or three dimensions.
# - `x` stays as it was; only `broadcast` may write into it, on the other ranks than `src`.
# - **Traffic**, read off the tapes. `broadcast`: at most $n - 1$ messages and $n - 1$ times the bytes of `x`, all ranks together.
#   The others: each rank sends at most $n - 1$ messages and at most $n - 1$ times the bytes of $k$ rows. One rank sends nothing.
# - Nobody waits for ever. A blocking send on gloo is a rendezvous: a ring of them stands still.
#
# **Points**: 5 for each function that is right in values and in traffic. **Allowed**: `send`, `recv` and `exchange` of
# `minidist.core.comm`, blocking or with `async_op=True`; `barrier`, if you see a use. **Not allowed**: its collectives (they are the
# thing to build), `torch.distributed`. **Limit**: 10 seconds a call. Every attempt draws new sizes and numbers; in a report, a
# number begins with the rank it comes from, plus one.
#
# Try before you check: `each(all_gather, [torch.ones(2)], [torch.zeros(2)])` runs on two ranks.


# %% name="answer-05-1-broadcast" tags=["answer"]
def broadcast(mesh, x, src):
    """Rank src's x, on every rank."""
    # BEGIN ANSWER
    if mesh.rank != src:
        return comm.recv(torch.empty_like(x), mesh.world, src=src)
    others = [rank for rank in range(mesh.world_size) if rank != src]
    comm.exchange([("send", x, rank) for rank in others], mesh.world)
    return x
    # END ANSWER
    # STUB: raise NotImplementedError("05.1")


# %% name="answer-05-1-reduce_scatter" tags=["answer"]
def reduce_scatter(mesh, x):
    """This rank's k rows of the sum over the ranks of x (n k, ...)."""
    # BEGIN ANSWER
    n, me, world = mesh.world_size, mesh.rank, mesh.world
    parts = x.view(n, -1, *x.shape[1:])  # (n, k, ...)
    total = parts[me].clone()
    for k in range(1, n):
        right, left = (me + k) % n, (me - k) % n
        came = torch.empty_like(total)
        comm.exchange([("send", parts[right], right), ("recv", came, left)], world)
        total += came
    return total
    # END ANSWER
    # STUB: raise NotImplementedError("05.1")


# %% name="answer-05-1-all_gather" tags=["answer"]
def all_gather(mesh, x):
    """The rows of all ranks' x (k, ...), in rank order: (n k, ...)."""
    # BEGIN ANSWER
    n, me, world = mesh.world_size, mesh.rank, mesh.world
    parts = [torch.empty_like(x) for _ in range(n)]
    parts[me] = x
    for k in range(1, n):
        right, left = (me + k) % n, (me - k) % n
        comm.exchange([("send", x, right), ("recv", parts[left], left)], world)
    return torch.cat(parts)
    # END ANSWER
    # STUB: raise NotImplementedError("05.1")


# %% name="answer-05-1-all_to_all" tags=["answer"]
def all_to_all(mesh, x):
    """Of every rank's x (n k, ...), the k rows meant for this rank, in rank order: (n k, ...)."""
    # BEGIN ANSWER
    n, me, world = mesh.world_size, mesh.rank, mesh.world
    mine = x.view(n, -1, *x.shape[1:])  # (n, k, ...): mine[r] is for rank r
    came = mine.clone()  # came[me] is right already
    for k in range(1, n):
        right, left = (me + k) % n, (me - k) % n
        comm.exchange([("send", mine[right], right), ("recv", came[left], left)], world)
    return came.view(x.shape)
    # END ANSWER
    # STUB: raise NotImplementedError("05.1")


# %% name="check-05-1" tags=["check"]
check("05.1")

# %% [markdown] name="why-05-1"
# **Why.** Each of the last three is one loop. In round $k$ rank $r$ sends to $r + k$ and receives from $r - k$, around the circle:
# everybody is busy in every round, every pair meets once in each direction, and after $n - 1$ rounds nothing is left to say. What
# differs is the piece that goes and what is done with the piece that comes: all-gather sends its own part and files what
# comes under its sender, all-to-all sends each peer another piece, reduce-scatter adds. `exchange` launches both transfers before
# it waits, so a ring of rendezvous cannot stand still. A ring with relayed parts (lesson 6) sends the same bytes, and only ever
# to a neighbour, which matters once there are more ranks than links.
#
# The root of a broadcast sends everything itself here: right in bytes, and slow for it, since one rank does all the
# sending. A tree has the same $n - 1$ messages and spreads them. With one rank all four loops have no round: no special case.
#
# `total = parts[me].clone()` matters: without the clone, `+=` would write into the caller's `x`, as `view` shares its memory. And the
# receive buffers are made like `x`, which keeps dtype and device.

# %% [markdown] name="help-05-1"
# Stuck? `hint("05.1")` gives the next of three hints, and costs nothing. `solution("05.1")` shows ours, and why, once you have
# passed or had three tries checked; `solution("05.1", now=True)` does so at once.

# %% [markdown] name="spec-05-2"
# ## Task 05.2: five programs, each after a real report
# Difficulty: middling to hard. Each of these came from somebody's training run. Three stand still (or stop with a mismatch, since
# your ranks compare notes), two return wrong numbers without a word. The code is in the cell, behind one line that you take away.
# Repair it; the repair is a few lines each.
#
# 1. `mean_loss` ([a rank has fewer batches](https://github.com/pytorch/pytorch/issues/38174)): the mean over all losses of all
#    ranks, on every rank. Some ranks have fewer losses, some none; somewhere there is one. **At most one all-reduce, of at most
#    16 bytes.**
# 2. `sum_grads` ([a branch that not all ranks use](https://github.com/deepspeedai/DeepSpeed/pull/5008)): gradients arrive in
#    another order on each rank, and one is missing where a branch was not used (it counts as zeros). Sums of all, in the model's
#    order, on every rank. **Not more bytes of payload than one gradient of the whole model.**
# 3. `gather_rows` ([sizes that differ](https://github.com/pytorch/pytorch/issues/78022)): everybody's rows, in rank order, on every
#    rank. Ranks have different numbers of rows, some none. A row may be all zeros, and still counts. **Payload at most $n$ times
#    (the bytes of the longest rank's rows + 16).**
# 4. `step_or_skip` ([one rank sees the overflow](https://github.com/pytorch/pytorch/pull/115710)): where every rank's gradient
#    is finite, the weight minus the sum of the gradients; where any is not, *all* ranks return the weight unchanged.
#    **At most the bytes of the gradient and 8 more.**
# 5. `normalise` (the same report: a flag read before its reduction had finished): `x` divided by the sum of all elements on all
#    ranks. The wire is slow, on purpose; it stays so, and the call stays asynchronous. **One all-reduce, no barrier.**
#
# **Points**: 4 for each program that is right in values and within its bytes, with 1, 2, 3 and 4 ranks. Payload and bytes are those
# of one rank's tape. **Allowed**: all of `minidist.core.comm`. **Not allowed**: `torch.distributed`. **Limit**: 10 seconds a call.
# Every attempt draws new numbers.
#
# See one fail first: take away the line, then `each(mean_loss, [[1.0, 3.0]], [[5.0]])` gives rank 0 two losses and rank 1 one.


# %% name="answer-05-2-mean_loss" tags=["answer"]
def mean_loss(mesh, losses):
    """losses: this rank's, a list of floats. The mean of everybody's, a float, on every rank."""
    # BEGIN ANSWER
    both = torch.tensor([sum(losses), len(losses)], dtype=torch.float64)
    comm.all_reduce(both, mesh.world)
    return (both[0] / both[1]).item()
    # END ANSWER
    # STUB: raise NotImplementedError("05.2")  # take this line away, then repair the rest
    # STUB: both = torch.zeros(2, dtype=torch.float64)  # sum, count
    # STUB: for loss in losses:
    # STUB:     step = torch.tensor([loss, 1.0], dtype=torch.float64)
    # STUB:     both += comm.all_reduce(step, mesh.world)
    # STUB: return (both[0] / both[1]).item()


# %% name="answer-05-2-sum_grads" tags=["answer"]
def sum_grads(mesh, model, grads):
    """model: [name, length] of each parameter, the same on all ranks. grads: name -> this rank's gradient (length,) float64,
    in order of arrival, absent where unused. A list of the sums over the ranks, in the model's order, on every rank."""
    # BEGIN ANSWER
    sums = []
    for name, length in model:
        grad = grads.get(name, torch.zeros(length, dtype=torch.float64))
        sums.append(comm.all_reduce(grad, mesh.world))
    return sums
    # END ANSWER
    # STUB: raise NotImplementedError("05.2")  # take this line away, then repair the rest
    # STUB: for grad in grads.values():
    # STUB:     comm.all_reduce(grad, mesh.world)
    # STUB: return [grads[name] for name, length in model]


# %% name="answer-05-2-gather_rows" tags=["answer"]
def gather_rows(mesh, rows):
    """rows: this rank's, (k, 3) int64 with a k of its own. Everybody's rows in rank order, on every rank."""
    # BEGIN ANSWER
    n, k = mesh.world_size, len(rows)
    lengths = comm.all_gather(torch.tensor([k]), mesh.world).tolist()
    longest = max(lengths)
    padded = torch.cat([rows, rows.new_zeros(longest - k, 3)])
    whole = comm.all_gather(padded, mesh.world).view(n, longest, 3)
    return torch.cat([whole[rank, :length] for rank, length in enumerate(lengths)])
    # END ANSWER
    # STUB: raise NotImplementedError("05.2")  # take this line away, then repair the rest
    # STUB: return comm.all_gather(rows, mesh.world)


# %% name="answer-05-2-step_or_skip" tags=["answer"]
def step_or_skip(mesh, weight, grad):
    """weight (d,) float64, equal on all ranks; grad (d,) float64, this rank's own. The weight after the step, or unchanged."""
    # BEGIN ANSWER
    # a sum with an inf or a nan in it is not finite either
    comm.all_reduce(grad, mesh.world)
    return weight - grad if torch.isfinite(grad).all() else weight
    # END ANSWER
    # STUB: raise NotImplementedError("05.2")  # take this line away, then repair the rest
    # STUB: if not torch.isfinite(grad).all():
    # STUB:     return weight  # overflow: skip this step
    # STUB: comm.all_reduce(grad, mesh.world)
    # STUB: return weight - grad


# %% name="answer-05-2-normalise" tags=["answer"]
def normalise(mesh, x):
    """x (k,) float64, this rank's own. x divided by the sum of all elements on all ranks."""
    # BEGIN ANSWER
    mesh.delay = Delay(Link(latency_s=0.05))  # a slow wire: leave this line
    total = x.sum().view(1)
    work = comm.all_reduce(total, mesh.world, async_op=True)
    # other work goes here, while the sum is under way
    return x / work.wait()
    # END ANSWER
    # STUB: raise NotImplementedError("05.2")  # take this line away, then repair the rest
    # STUB: mesh.delay = Delay(Link(latency_s=0.05))  # a slow wire: leave this line
    # STUB: total = x.sum().view(1)
    # STUB: comm.all_reduce(total, mesh.world, async_op=True)
    # STUB: comm.barrier(mesh.world)  # to be safe
    # STUB: return x / total


# %% name="check-05-2" tags=["check"]
check("05.2")

# %% [markdown] name="why-05-2"
# **Why.** All five broke one of two rules. *What is called must not depend on what only this rank knows* (how many losses it has, which
# gradient came first, how long its data is, whether its numbers are finite): turn what is local into a number, and let the collective
# carry it. *What is launched is not there until somebody waited for it.*
#
# 1. The loop called once a loss. Sums add up locally for nothing; one call carries sum and count together, and a rank without
#    losses takes part with zeros. Sum everything, divide once.
# 2. The loop walked through what had arrived, in the order of arrival. Equal shapes were mixed without an error; the missing one
#    moved everything after it by one. The model's order is the same everywhere, and absent is zeros. Sorting the names
#    would cure the order, and not the absence.
# 3. Sizes first (8 bytes a rank), then contents in one common shape; padding is cut by its place, since a row of zeros may be a row.
# 4. The decision has to follow from a number that all have. The sum itself is one: inf and nan survive every addition. A flag
#    reduced by maximum works as well, and does so where a sum of finite numbers may overflow.
# 5. The barrier waited for the ranks, not for the sum. `wait()` does, and whatever stands between launch and wait is free of
#    charge. Without the slow wire this program is right on most days, which is the worst thing about it.

# %% [markdown] name="help-05-2"
# Stuck? `hint("05.2")` gives the next of three hints, and costs nothing. `solution("05.2")` shows ours, and why, once you have
# passed or had three tries checked; `solution("05.2", now=True)` does so at once.

# %% name="finish" tags=["check"]
finish("05")
