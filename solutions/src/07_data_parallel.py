# %% [markdown] name="head"
# # Exercises 7: build DDP
# To [lesson 7](../lessons/07_data_parallel.ipynb). One class, five tasks of 10 points each, two hours in all. The tasks
# grade the same class and score alone: a class with buckets and no hooks gets the points for buckets. Check after every step.

# %% name="setup"
from contextlib import contextmanager, nullcontext

import torch

from minidist import ranks
from minidist.core import comm
from minidist.course import check, finish, hint, solution

# %% [markdown] name="spec-07"
# ## The class
# Write `DDP`, in one cell. On every rank at once, this is the loop that will use it:
#
# ```python
# ddp = DDP(mesh, model, bucket_bytes)   # model: any nn.Module of one dtype, whose weights may differ by rank so far
# for step in steps:
#     for micro_batch in step:           # under ddp.no_sync() for all but the last
#         loss = (... ddp(x, ...) ...).sum() / rows_of_all_ranks
#         loss.backward()
#     ddp.finish()
#     # now p.grad is, on every rank, the sum over all ranks and micro-batches of this step
#     ...                                # the loop's own update of every p that has a p.grad
#     model.zero_grad()                  # sets every p.grad to None
# ```
#
# - `ddp(*inputs)` is `model(*inputs)`. `no_sync()` is a context manager. Nothing else of the class is called.
# - The loss has been divided once, by the rows of the whole global batch. So gradients are *summed*; nobody divides again.
# - "The sum" is within 1e-10 of one process's in float64 and 1e-4 in float32, relative to the largest element of the tensor; a
#   missing gradient counts as zeros. Checked in every step, for every parameter, on every rank, with 1, 2, 3 and 4 ranks.
# - Everything travels through `minidist.core.comm`. Bounds on traffic and launches hold from 2 ranks up; broadcasts and barriers
#   are not counted. The loop runs on a delay line: a result that you do not wait for does not arrive.
#
# **Allowed**: all of `minidist.core`, all of torch but the following. **Not allowed**: `minidist.parallel`, `minidist.train`,
# `minidist.plan`, `torch.nn.parallel` (they are the thing to build) and `torch.distributed`. **Limit**: 10 seconds for each case; then
# it counts as a hang. Every attempt draws new shapes, weights and data.


# %% name="answer-07" tags=["answer"]
class DDP:
    """Data parallelism around `model`: gradients are summed over the ranks while backward is still running."""

    def __init__(self, mesh, model, bucket_bytes):
        """Make replicas equal; decide the buckets; ask to be told when a gradient is complete."""
        # BEGIN ANSWER
        self.group, self.model, self.quiet = mesh.world, model, False
        for tensor in [*model.parameters(), *model.buffers()]:
            comm.broadcast(tensor.detach(), self.group, src=0, tag="weight")
        self.buckets, room = [], -1
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            size = p.numel() * p.element_size()
            if not self.buckets or size > room:
                self.buckets.append([])
                room = bucket_bytes
            self.buckets[-1].append(p)
            room -= size
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(self._hook(number))
        self._begin()
        # END ANSWER
        # STUB: raise NotImplementedError("07.1")

    def __call__(self, *inputs):
        """The model's output."""
        return self.model(*inputs)

    def no_sync(self):
        """A context in which backward adds to p.grad and sends nothing."""
        # BEGIN ANSWER
        return self._quietly()
        # END ANSWER
        # STUB: raise NotImplementedError("07.4")

    def finish(self):
        """Wait until every p.grad is the sum over all ranks."""
        # BEGIN ANSWER
        while len(self.launched) < len(self.buckets):
            self._launch()
        for bucket, (flat, work) in zip(self.buckets, self.launched, strict=True):
            work.wait()
            pieces = flat.split([p.numel() for p in bucket])
            for p, piece in zip(bucket, pieces, strict=True):
                p.grad = piece.view_as(p)
        for buffer in self.model.buffers():
            comm.broadcast(buffer, self.group, src=0, tag="weight")
        self._begin()

    def _begin(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.launched = []

    def _hook(self, number):
        def arrived(p):
            if self.quiet:
                return
            self.missing[number] -= 1
            while len(self.launched) < len(self.buckets):
                if self.missing[len(self.launched)]:
                    return  # a later bucket may be full: it waits, for the order's sake
                self._launch()

        return arrived

    def _launch(self):
        bucket = self.buckets[len(self.launched)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.flatten() for grad in grads])
        work = comm.all_reduce(flat, self.group, tag="grad", async_op=True)
        self.launched.append((flat, work))

    @contextmanager
    def _quietly(self):
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False
        # END ANSWER
        # STUB: raise NotImplementedError("07.1")


# %% [markdown] name="try-07"
# To try it before you have it checked: two ranks, a step, and what each of them then holds.


# %% name="try"
def trial(mesh):
    torch.manual_seed(mesh.rank)  # so the two draw different weights
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    ddp = DDP(mesh, model, bucket_bytes=60)
    ddp(torch.ones(1, 3)).sum().backward()
    ddp.finish()
    reduced = [line.payload for line in mesh.tape.select(op="all_reduce")]
    return f"bytes of each reduction: {reduced}; {model[1].bias.grad.tolist()}"


try:
    print(*ranks.run(trial, 2, timeout_s=10), sep="\n")
except ranks.RanksError as error:
    print(f"not yet: {str(error).strip().splitlines()[-1]}")

# %% [markdown] name="spec-07-1"
# ## Task 07.1: hooks
# Difficulty: easy, 25 minutes. The constructor gives every rank the weights of rank 0. In every step, each gradient is reduced by a
# hook of its parameter. `bucket_bytes` is 0 here, so each parameter travels by itself; every step has one micro-batch.
#
# **Points**: 5 for the sums (three steps, weights that start apart). 5 for the hooks, once the sums are right: when `backward()` has
# returned, every reduction has been launched; a rank sends $2\frac{n-1}{n}$ of the bytes of all trainable parameters a step.

# %% name="check-07-1" tags=["check"]
check("07.1")

# %% [markdown] name="why-07-1"
# **Why so.** Two things make replicas: equal weights at the start, equal updates ever after. Nothing else does. The broadcast takes care
# of the first; `p.detach()` is the same memory without autograd's interest in it.
#
# `register_post_accumulate_grad_hook` is called when `p.grad` holds everything that this backward has to add, be it from one use
# of `p` or from five. The older `p.register_hook` sees the gradient before it is added, which is too early for accumulation.

# %% [markdown] name="spec-07-2"
# ## Task 07.2: buckets
# Difficulty: middling, 30 minutes. Trainable parameters share flat tensors. Walk them in the reverse order of `model.parameters()`. A
# bucket closes before the parameter that would take it past `bucket_bytes`; a parameter larger than that has a bucket to
# itself. Each step reduces each bucket once, the one with the last parameter first.
#
# **Points**: 4 for the sums, 6 for the buckets, once the sums are right: the payloads of a step are the buckets' bytes, in order, and
# bytes sent are those of 07.1. float64 and float32; when they are launched does not matter here.

# %% name="check-07-2" tags=["check"]
check("07.2")

# %% [markdown] name="why-07-2"
# **Why so.** A message pays its latency whether it carries a bias or a matrix; a bucket pays it once for both. Reverse order because that
# is roughly the order in which backward is done with them, so that a bucket fills soon after it was begun.
#
# `flat.split` gives views into the bucket, and `p.grad` may just as well be one of them: no copy back.

# %% [markdown] name="spec-07-3"
# ## Task 07.3: overlap
# Difficulty: middling, 15 minutes once you have hooks. Buckets of your own design, or none.
#
# **Points**: 5 for early launches (with right sums): whenever backward enters a layer, at most `bucket_bytes` bytes of complete
# gradients are not launched; `bucket_bytes` is 0 or 240, the first layer's own gradients excepted. 5 for asynchrony: in one step rank 0
# begins its backward only after the last rank has come down to its second layer. Whoever waits for rank 0 inside backward waits for ever.

# %% name="check-07-3" tags=["check"]
check("07.3")

# %% [markdown] name="why-07-3"
# **Why so.** The hook does the least that it can: count, and launch what is full. It never waits, because whatever waits in a hook stops
# backward, on this rank and, one bucket later, on all. All waiting is in `finish()`, when there is nothing else to do.

# %% [markdown] name="spec-07-4"
# ## Task 07.4: no_sync
# Difficulty: middling, 15 minutes. Steps have three micro-batches, one, and two. All backwards but a step's last run under `no_sync()`.
# What counts is where the *backward* runs: in some cases the forwards lie on the other side of the switch, on purpose. An
# exception may pass through `no_sync()` between two steps.
#
# **Points**: 5 for silence: nothing is launched before the last backward of a step, and everything by the end of `finish()`. 5 for
# the sums over ranks and micro-batches, once that is so, with the bytes of one reduction a step.

# %% name="check-07-4" tags=["check"]
check("07.4")

# %% [markdown] name="why-07-4"
# **Why so.** Under `no_sync` autograd does the work: it adds to `p.grad`, and the hook goes home. The next backward outside finds the sum of
# all micro-batches there and sends that, once. Reading the flag in the hook makes backward the moment that counts; torch reads it in forward,
# and a user who switches around `backward()` alone gets silence or noise at the wrong time. `finally`, because data loaders raise.

# %% [markdown] name="spec-07-5"
# ## Task 07.5: odd cases
# Difficulty: hard, 35 minutes. Each corner has cases of its own:
#
# - *shared*: one weight in two layers (tied), others frozen (`requires_grad=False`). Each trainable tensor travels once. Frozen ones do
#   not travel in a step, and their `p.grad` stays `None`.
# - *buffers*: the model keeps a running mean that its forward updates. At the beginning of every step's forward it is rank 0's on
#   every rank, in the first step too.
# - *unused*: a branch taken by one rank, by another, by nobody; and a rank that has no micro-batch in a step and goes straight to
#   `finish()`. The sums are those of one process over all the batches, a skipped use counting as zero; bytes as in 07.1.
#
# **Points**: 4, 2 and 4, in this order: each counts once those before it are right.

# %% name="check-07-5" tags=["check"]
check("07.5")

# %% [markdown] name="why-07-5"
# **Why so.** One rule settles all of it: *what a rank sends, and in which order, depends on the model alone*, never on what this rank happened
# to run. A tied weight is one parameter with one hook, called when both uses are in. A branch not taken leaves a bucket that never
# fills, so buckets leave strictly in order, and `finish()` launches what is left, as zeros. The result is put back even where there
# was no gradient before. Buffers travel in `finish()`, where every rank comes by; torch sends them in forward, which a
# rank without a batch would miss.

# %% [markdown] name="help"
# Stuck? `hint("07.1")` gives the next of three hints for a task, and costs nothing. `solution("07.1")` opens after a pass or three tries.

# %% name="finish" tags=["check"]
finish("07")
