# %% [markdown] name="head"
# # 7. Data parallel, for real
#
# Every [rank](glossary.ipynb#rank) holds the whole model, works on its own part of the batch, and the gradients are summed. That is
# all of it, and a loop of three lines does it: `for p in model.parameters(): all_reduce(p.grad)`. This lesson is about the
# difference between that loop and something you would run on a thousand devices: what is summed, when it leaves, what hides it, and
# the ways in which replicas quietly stop being replicas.
#
# **After this lesson you can**
# - say what makes replicas equal, what keeps them so, and check it for a few bytes;
# - say what is summed and what is divided, and by what;
# - use hooks, [buckets](glossary.ipynb#bucket) and asynchrony to hide communication behind backward, and predict how much hides;
# - keep the number of reductions right under accumulation, unused parameters, and batches that run out.
#
# **You need** lessons 5 and 6. **It takes** 70 minutes of yours and less than one of the machine's.

# %% name="setup"
import time
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidist import course, ranks
from minidist.core import comm
from minidist.core.links import Delay, Link
from minidist.core.tape import booked
from minidist.course import claim, predict, widgets_07
from minidist.model.config import ModelConfig
from minidist.model.loss import loss_sum
from minidist.model.transformer import Transformer
from minidist.parallel.zero import Zero
from minidist.plan.time import bucket_timeline, pack

# %% [markdown] name="replicas-text"
# ## Round one: same seed, same model?
# Four ranks set the same seed. Then each shuffles its own part of the data, and builds the model. How many different models are
# there?

# %% name="replicas-guess" tags=["predict"]
predict("07.models", ..., choices=[1, 2, 4])

# %% name="replicas-run"
# %%ranks 4
from torch import nn

torch.manual_seed(7)
samples = torch.randperm(10 + rank)  # shares of 10, 11, 12 and 13 samples
model = nn.Linear(3, 2)
before = model.weight.sum().item()
for p in model.parameters():
    comm.broadcast(p.detach(), world, src=0, tag="weight")
after = model.weight.sum().item()
print(f"sum of the weights {before:.4f}, after rank 0's broadcast {after:.4f}")

# %% name="replicas-claim"
claim("07.models", len(set(ranks.pull("before"))), 4)
claim("07.one-model", len(set(ranks.pull("after"))), 1)

# %% [markdown] name="replicas-why"
# "Same seed = same model" holds as long as every rank draws the same numbers in the same order before. One shuffle more, one layer that
# only rank 0 has, another library version, and it does not. So nobody relies on it: replicas are *made* equal, by a
# [broadcast](glossary.ipynb#broadcast) from rank 0 (torch's DDP, Horovod), or by drawing every weight from its name and the seed (this
# engine).

# %% [markdown] name="drift-text"
# ### And once equal, do they stay equal?
# The gradients are summed in every step, so all ranks apply the same update. Before the first step, something nudges one weight of rank
# 1 by a thousandth: a flipped bit, a careless `if rank == 1:`. Forty steps later the two models are:

# %% name="drift-guess" tags=["predict"]
predict(
    "07.drift",
    ...,
    choices=["equal again", "closer, not equal", "as far apart", "no check can tell"],
)


# %% name="drift-claim"
def drift(mesh, nudge):
    torch.manual_seed(7)
    model = nn.Linear(4, 1, bias=False).double()
    if mesh.rank == 1:
        model.weight.data[0, 0] += nudge
    batches = torch.randn(40, mesh.world_size, 8, 4).double()[:, mesh.rank]
    gaps = []
    for x in batches:  # x (8, 4); the model learns to say 1
        model.zero_grad()
        loss = ((model(x) - 1) ** 2).sum() / (8 * mesh.world_size)
        loss.backward()
        comm.all_reduce(model.weight.grad, mesh.world, tag="grad")
        model.weight.data -= 0.05 * model.weight.grad
        high = comm.all_reduce(model.weight.data.clone(), mesh.world, "max")
        low = comm.all_reduce(model.weight.data.clone(), mesh.world, "min")
        gaps.append((high - low).max().item())  # 0.0 for replicas that agree
    return gaps


gaps = ranks.run(drift, 2, 0.001)[0]
print(f"gap after step 1: {gaps[0]:.6f}, after step 40: {gaps[-1]:.6f}")
same = abs(gaps[-1] - 0.001) < 1e-12
claim("07.drift", "as far apart" if same else "otherwise", "as far apart")
claim("07.no-nudge", max(ranks.run(drift, 2, 0.0)[0]), 0.0)

# %% [markdown] name="drift-why"
# As far apart as on the first day. Both ranks subtract the *same* sum of gradients, so their difference is never touched: data
# parallelism keeps equal what is equal, and repairs nothing. "Replicas cannot drift" is true of the update and false of everything
# else: buffers that follow the local batch, an optimizer state restored on one rank only, a device that miscalculates. The cure is a check: a
# maximum and a minimum over the ranks, of the weights or of a checksum of them, every now and then.

# %% [markdown] name="mean-text"
# ## Round two: "DDP averages losses"
# Rank 0 has a batch of one token, with a loss of 8. Rank 1 has seven tokens, with a loss of 1 each. What is the loss of the
# step, per token? And what does torch's DDP make of it, if every rank calls `loss.mean()` as one does?

# %% name="mean-guess" tags=["predict"]
predict("07.mean", ...)
predict("07.ddp-gradient", ...)


# %% name="mean-claim"
def means(mesh):
    """The gradient of a weight that scales every token's loss, so that it equals the loss."""
    tokens = torch.tensor([8.0] if mesh.rank == 0 else [1.0] * 7).double()
    count = comm.all_reduce(torch.tensor([len(tokens)]), mesh.world, tag="control")
    found = {}
    for how in ("mean of the rank", "sum, times n / count"):
        model = nn.Linear(1, 1, bias=False).double()
        model.weight.data.fill_(1.0)
        ddp = DistributedDataParallel(model, process_group=mesh.world.handle)
        losses = ddp(tokens[:, None])
        fix = losses.sum() * mesh.world_size / count.item()
        loss = losses.mean() if how == "mean of the rank" else fix
        loss.backward()
        found[how] = (loss.item(), model.weight.grad.item())
    model.weight.data.fill_(1.0)
    zero = Zero(model, mesh.world)
    zero.start_step()
    zero.before_backward(last=True)
    loss = zero.model(tokens[:, None]).sum() / count.item()
    loss.backward()
    zero.finish()
    return found | {"ours": (loss.item(), zero.units[0].grads[0].item())}


first, second = ranks.run(means, 2)
for how in first:
    (a, gradient), (b, _) = first[how], second[how]
    print(f"{how:22} losses {a:.3f} and {b:.3f}, gradient {gradient:.3f} on both")
claim("07.mean", (8 + 7 * 1) / 8, 1.875)
claim("07.ddp-gradient", first["mean of the rank"][1], 4.5)
claim("07.ddp-loss", first["mean of the rank"][0], 8.0)
claim("07.ddp-mended", first["sum, times n / count"][1], 1.875)
claim("07.ours", first["ours"][1], 1.875)
claim("07.add-up", first["ours"][0] + second["ours"][0], 1.875)

# %% [markdown] name="mean-why"
# DDP does nothing to losses: rank 0 still reads 8. It averages *gradients*, here to 4.5, a mean of means in which one token
# weighs as much as seven. With equal batches nobody notices; with padding, masks and packed documents batches are never equal
# ([found years later](https://github.com/huggingface/transformers/pull/34191) in a trainer that everybody used).
#
# The rule of this engine has no average: *the loss is divided once, by the tokens of the whole global batch, and from then on
# everything is a sum*. Losses of ranks add up to the loss of the step, gradients to its gradient. In torch you get there by
# multiplying with the number of ranks, which DDP then divides out.

# %% [markdown] name="bytes-text"
# ## Round three: what it costs
# A transformer on four ranks, one step of the engine's own data parallelism. Its parameters are $P$ bytes. How many bytes does a rank
# send, as a multiple of $P$?

# %% name="bytes-guess" tags=["predict"]
predict("07.bytes", ..., unit="times P")
predict("07.reductions", ...)  # the model has an embedding, 3 blocks and a head

# %% name="bytes-claim"
SHAPE = ModelConfig(
    layers=3, width=24, heads=4, kv_heads=2, ffn=48, vocab=64, tied=False
)


def transformer():
    torch.manual_seed(3)  # every rank alike: nothing was drawn before
    model = Transformer(SHAPE).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.05) if p.dim() > 1 else nn.init.ones_(p)
    return model


def rows(n, step):
    """The global batch of a step, split over n ranks: (8 / n, 17) tokens each."""
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randint(SHAPE.vocab, (8, 17), generator=draw).chunk(n)


def ours(mesh, steps):
    """Losses of the whole job, by step, and the tape."""
    zero, found = Zero(transformer(), mesh.world), []
    mesh.tape.clear()
    for step in range(steps):
        tokens = rows(mesh.world_size, step)[mesh.rank]
        zero.start_step()
        zero.before_backward(last=True)
        logits = zero.model(tokens[:, :-1])
        loss = loss_sum(logits, tokens[:, 1:]) / (8 * 16)
        loss.backward()
        zero.finish()
        for unit in zero.trainable:
            unit.weights.data.sub_(unit.grads, alpha=0.5)
        total = loss.detach()[None]
        found.append(comm.all_reduce(total, mesh.world, tag="control").item())
    return found, mesh.tape


P = 8 * sum(p.numel() for p in transformer().parameters())  # float64
tape = ranks.run(ours, 4, 1)[0][1]
reductions = tape.select(tag="grad")
print(*reductions, sep="\n")
claim("07.bytes", tape.sent("grad") / P, 1.5, unit="times P")
claim("07.formula", tape.sent("grad"), 2 * (4 - 1) / 4 * P, unit="bytes")
claim("07.reductions", len(reductions), 5)
claim("07.seven-billion", 2 * 7e9 * 2 / 1e9, 28.0, unit="GB")  # n large: 2P

# %% [markdown] name="bytes-why"
# $2\frac{n-1}{n}P$: an [all-reduce](glossary.ipynb#all-reduce) of the gradient, whatever the number of pieces. For a model of seven
# billion parameters in 16 bits that is nearly 28 GB a step from every device, once an *optimizer* step, however large the batch. Five
# pieces, and not one for every parameter: the engine's [bucket](glossary.ipynb#bucket) is a *unit*, one block or the embedding or the
# head, whose gradients lie side by side in one buffer.

# %% [markdown] name="order-text"
# ## Round four: who is ready first?
# autograd calls a hook when a parameter's gradient is complete. In which order do they come?

# %% name="order-guess" tags=["predict"]
predict("07.order", ..., order=["embedding", "block 0", "block 1", "block 2", "head"])

# %% name="order-claim"
arrivals, began = [], []


def arrived(name, p):
    arrivals.append((time.perf_counter() - began[-1], name, p.numel() * 8))


model = transformer()
for name, p in model.named_parameters():
    p.register_post_accumulate_grad_hook(partial(arrived, name))
tokens = rows(1, 0)[0]
loss = loss_sum(model(tokens[:, :-1]), tokens[:, 1:])
began.append(time.perf_counter())
loss.backward()
print(*(f"{t * 1e3:6.2f} ms  {name}" for t, name, _ in arrivals[:6]), "...", sep="\n")
last = {}  # the moment each unit is complete: its last parameter counts
for place, (_, name, _) in enumerate(arrivals):
    unit = name.split(".")[0].replace("norm", "head")
    last[f"block {name.split('.')[1]}" if unit == "blocks" else unit] = place
order = ["head", "block 2", "block 1", "block 0", "embedding"]
claim("07.order", sorted(last, key=last.get), order)

# %% [markdown] name="order-why"
# Backward goes through the model back to front, and the last layer's gradients are final while most of the work is still to do. They can
# travel meanwhile. That is the whole idea of overlap: **a reduction starts when its gradients are complete, and is waited for when
# there is nothing left to compute**. The hook is `p.register_post_accumulate_grad_hook(f)`.

# %% [markdown] name="time-text"
# ## Round five: hiding it
# To see it by the clock, a link that costs something: the [delay line](glossary.ipynb#delay-line). And a model whose backward takes a known time:
# eight blocks that nap. In units of the link's latency: a block naps for 2.5, and its bytes take 1 on the wire. Three ways to take a step:
#
# - **naive**: backward, then one reduction for each of the 16 parameters;
# - **bucketed**: backward, then one reduction a block;
# - **overlapped**: one reduction a block, launched from hooks inside backward.
#
# Add it up before you look. How many times as long as *overlapped* does *naive* take?

# %% name="time-guess" tags=["predict"]
predict("07.overlap-wins", ..., unit="times")


# %% name="time-run"
class Nap(torch.autograd.Function):
    """Nothing in forward; in backward some seconds of work."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Sleepy(nn.Module):
    def __init__(self, nap):
        super().__init__()
        self.nap = nap
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = Nap.apply(torch.tanh(block(x)), self.nap)
        return x


def step(mesh, how, latency):
    """One step. (seconds, tape from its beginning, when each gradient was ready)."""
    torch.manual_seed(0)
    model = Sleepy(2.5 * latency)
    zero = None if how == "naive" else Zero(model, mesh.world)
    ready = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: ready.append((time.monotonic() - began, p.numel() * 4))
        )
    block = sum(p.numel() * 4 for p in model.blocks[0].parameters())
    wire = booked("all_reduce", block, mesh.world_size) / latency  # bytes/s
    x = torch.randn(4, 64)
    comm.barrier(mesh.world)
    mesh.delay = Delay(Link(latency, wire))
    first = len(mesh.tape)
    if zero:
        zero.start_step()
        zero.before_backward(last=how == "overlapped")  # False: all in finish()
    loss = model(x).square().sum()
    began = time.monotonic()
    loss.backward()
    backward = time.monotonic()
    if zero:
        zero.finish()
    else:
        for p in model.parameters():
            comm.all_reduce(p.grad, mesh.world, tag="grad")
    seconds = time.monotonic() - began
    mesh.delay = None
    return seconds, widgets_07.since(mesh.tape, first, began, backward), ready


runs = {}


def timing(how):
    def go(latency):
        runs[how] = ranks.run(step, 2, how, latency)
        return max(seconds for seconds, _, _ in runs[how])

    return go


LATENCY = 4e-3
for how in ("naive", "bucketed", "overlapped"):
    timing(how)(LATENCY)
drawn = dict(runs)  # later cells run it again, with longer delays on a busy machine
widgets_07.figure({how: run[0][1] for how, run in drawn.items()}, "Rank 0, three steps")

# %% name="time-claim"
naive, bucketed, overlapped = map(timing, ("naive", "bucketed", "overlapped"))
pays = {"delay_s": LATENCY, "pairs": 3}
claim.timed("07.buckets-win", naive, bucketed, at_least=1.1, **pays)
claim.timed("07.hooks-win", bucketed, overlapped, at_least=1.3, **pays)
claim.timed("07.overlap-wins", naive, overlapped, at_least=1.6, **pays)
counts = {how: run[0][1].calls("grad") for how, run in runs.items()}
claim("07.calls", list(counts.values()), [16, 8, 8])


def early(tape):
    """Reductions launched before backward was over."""
    backward, *lines = tape
    return sum(line.launch < backward.finish for line in lines)


claim("07.early", [early(run[0][1]) for run in runs.values()], [0, 0, 8])
sent = {run[0][1].sent("grad") for run in runs.values()}
claim("07.same-bytes", len(sent), 1)

# %% [markdown] name="time-why"
# By the book: backward takes $8 \times 2.5 = 20$ latencies. Naive adds 16 latencies and 8 for the bytes: 44. Bucketed adds
# $8 \times (1 + 1) = 16$: 36. Overlapped adds only what backward has nothing left to cover: the last bucket's 2, in all 22. The same
# bytes in all three; [bucket](glossary.ipynb#bucket) size decides how often latency is paid, launch time decides who pays it.
#
# In the picture *bucketed* is a staircase: all were launched at once, and then queued for the link.
#
# Note what overlap cannot do: the *last* bucket, the first layer's, has no backward behind it. It is
# [exposed](glossary.ipynb#exposed), always. (On a GPU the reductions run beside the kernels, on a
# [stream](glossary.ipynb#stream) of their own, and take a few SMs from them: overlap is cheap, not free.)

# %% name="book-claim"
book = dict(zip(runs, (20 + 16 + 8, 20 + 8 * (1 + 1), 20 + 2), strict=True))
claim("07.by-the-book", list(book.values()), [44, 36, 22])
parameters = [(2.5 * (i // 2 + 1), 64 if i % 2 == 0 else 64 * 64) for i in range(16)]
whole = 64 + 64 * 64  # elements of a block: 1 latency on the wire
for how, size, hides in (
    ("naive", 0, False),
    ("bucketed", whole, False),
    ("overlapped", whole, True),
):
    plan = bucket_timeline(parameters, size, lambda b: 1 + b / whole, overlap=hides)
    claim(f"07.model-{how}", plan.end_s, float(book[how]), rel=1e-9)

# %% [markdown] name="widget-text"
# ### How large should a bucket be?
# Small buckets leave early and pay latency often; large ones pay it once and leave late. Below, the gradients of the run
# drawn above, on a link of your choice, by the model of `minidist.plan.time` (the one that has just matched the sum by hand). Find the
# best size for this link. Then make the latency ten times larger, and find it again. At which bandwidth does overlap stop hiding anything that
# matters?

# %% name="widget" tags=["widget"]
seconds, tape, ready = drawn["overlapped"][0]
course.widget(
    widgets_07.overlap(ready, tape[0].finish, n=2),
    bucket_kB=(0.0, 140.0, 1.0, 34.0),
    latency_ms=(0.0, 40.0, 0.5, 4.0),
    MB_per_s=(0.5, 50.0, 0.5, 4.0),
)

# %% [markdown] name="widget-why"
# With no latency the smallest bucket wins; with no bytes the largest; in between there is a best one, and it is flat around it, which is why
# a default such as torch's [25 MiB](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html) serves so many.
# If the link is slower than backward for good, no size helps: then fewer bytes (lesson 10), fewer steps (lesson 9), or another cut (lesson 11).

# %% [markdown] name="peers-text"
# ## Beside torch's own
# The transformer from above: five steps in one process, on two ranks with the engine, on two ranks with torch's DDP. One of these has to
# explain itself if they differ.


# %% name="peers-claim"
def torchs(mesh, steps):
    model = transformer()
    ddp, found = DistributedDataParallel(model, process_group=mesh.world.handle), []
    for step in range(steps):
        tokens = rows(mesh.world_size, step)[mesh.rank]
        model.zero_grad()
        total = loss_sum(ddp(tokens[:, :-1]), tokens[:, 1:]) / (8 * 16)
        (total * mesh.world_size).backward()  # DDP divides by the number of ranks
        for p in model.parameters():
            p.data.sub_(p.grad, alpha=0.5)
        share = total.detach()[None]
        found.append(comm.all_reduce(share, mesh.world, tag="control").item())
    return found


alone, together = ranks.run(ours, 1, 5)[0][0], ranks.run(ours, 2, 5)[0][0]
peer = ranks.run(torchs, 2, 5)[0]
for number, losses in enumerate(zip(alone, together, peer, strict=True), 1):
    print(f"step {number}:", *(f"{loss:.12f}" for loss in losses))


def apart(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


claim("07.like-one-process", apart(together, alone) < 1e-10, True)
claim("07.like-torch", apart(peer, together) < 1e-10, True)

# %% [markdown] name="break-text"
# ## Break it
# **A switch at the wrong moment.** Two micro-batches a step: gradients of the first stay here, those of the second are reduced along with
# them. In torch that is `with ddp.no_sync():` around the first one. Around *what* of it? Two ranks, one weight, inputs 1 and 2, torch's DDP with its
# reductions sent through our tape. The right gradient is the mean, 1.5. How many reductions does a rank launch if `no_sync` is only around the
# `backward()`? And if it is switched off only just before the last `backward()`?

# %% name="break-guess" tags=["predict"]
predict("07.around-backward", ...)
predict("07.too-late", ...)


# %% name="break-claim"
def switched(mesh, how):
    """(gradient, reductions on the tape) of one step with two micro-batches."""
    model = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=mesh.world.handle)

    def on_tape(mesh, bucket):
        flat = bucket.buffer().div_(mesh.world_size)
        done = torch.futures.Future()
        done.set_result(comm.all_reduce(flat, mesh.world, tag="grad"))
        return done

    ddp.register_comm_hook(mesh, on_tape)
    x = torch.full((1, 1), 1.0 + mesh.rank)
    first = len(mesh.tape)
    for last in (False, True):
        quiet_forward = not last if how == "right" else how == "too late"
        with ddp.no_sync() if quiet_forward else nullcontext():
            loss = ddp(x).sum() / 2
            if how == "right":
                loss.backward()
        if how != "right":
            with nullcontext() if last else ddp.no_sync():
                loss.backward()
    return model.weight.grad.item(), len(mesh.tape) - first


found = {
    how: ranks.run(switched, 2, how) for how in ("right", "around backward", "too late")
}
for how, results in found.items():
    print(f"{how:16} gradients {[g for g, _ in results]}, reductions {results[0][1]}")
claim("07.right", found["right"], [(1.5, 1)] * 2)
claim("07.around-backward", found["around backward"][0][1], 2)
claim("07.too-late", found["too late"][0][1], 0)
claim("07.looks-fine", [g for g, _ in found["around backward"]], [1.5, 1.5])
claim("07.apart", [g for g, _ in found["too late"]], [1.0, 2.0])

# %% [markdown] name="break-why"
# torch decides in *forward* whether the next backward reduces. Around the backward only: reduced both times, right numbers, twice the traffic, and no
# error anywhere. Switched back too late: never reduced, each rank trains a model of its own, and the loss still falls. The numbers
# convict only one of the two; **the tape convicts both**: one reduction a bucket and optimizer step, or something is wrong. (Libraries
# [got this wrong](https://github.com/huggingface/accelerate/pull/1726), and so did [teachers](https://github.com/karpathy/build-nanogpt/pull/30).)
#
# The engine has no such switch: the loop says `before_backward(last)`, and a gradient that grows after its unit has left is an error.

# %% [markdown] name="uneven-text"
# **One batch too many.** Rank 0 has three batches, rank 1 two, and the loop reduces after each:

# %% name="uneven-hang"
# %%ranks 2 --expect hang --timeout 2
import time

for _batch in range(3 - rank):
    x = torch.ones(4)
    comm.all_reduce(x, world, tag="grad")
time.sleep(60)  # rank 1 is off to the evaluation, say

# %% [markdown] name="uneven-why"
# **A branch not taken**, **a rank without a batch**: it is all the same fault. What a rank sends must depend on the model and the step, never on
# what this rank happened to run. So the engine reduces *every* unit *once* a step in *one* order, zeros where nobody was; and a rank without
# data takes part with a batch that has no valid token.


# %% name="uneven-claim"
def corners(mesh, odd):
    """The sum of gradients over the ranks; rank 0 takes the branch, the last rank has no batch."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"trunk": nn.Linear(2, 2), "branch": nn.Linear(2, 2)})
    zero = Zero(model.double(), mesh.world)
    zero.start_step()
    zero.before_backward(last=True)
    work = range(2) if mesh.world_size == 1 else [mesh.rank] if mesh.rank < 2 else []
    losses = []
    for sample in work:
        x = model["trunk"](torch.full((1, 2), 1.0 + sample).double())
        losses.append((model["branch"](x) if odd and sample == 0 else x).sum())
    if losses:
        sum(losses).backward()
    zero.finish()
    calls = [line.shape for line in mesh.tape.select(tag="grad")]
    return [total.tolist() for _, total in zero.gradients()], calls


((reference, _),) = ranks.run(corners, 1, True)
results = ranks.run(corners, 3, True)
gaps = [apart(a, b) for a, b in zip(results[2][0], reference, strict=True)]
claim("07.corners", max(gaps) < 1e-12, True)
claim("07.same-calls", all(calls == results[0][1] for _, calls in results), True)

# %% [markdown] name="worked-text"
# ## A worked example, and one to finish
# Six tensors of 40, 8, 40, 8, 120 and 8 kB, in the order in which backward finishes them, and buckets of at most 100 kB. A bucket closes before the
# tensor that would take it past the limit; a tensor larger than that travels alone.

# %% name="worked"
sizes = [40, 8, 40, 8, 120, 8]
for places in pack(sizes, 100):
    print([sizes[place] for place in places], "=", sum(sizes[i] for i in places), "kB")
claim("07.packed", [len(places) for places in pack(sizes, 100)], [4, 1, 1])

# %% [markdown] name="faded-text"
# Yours to finish: these gradients are ready after 1, 2, ... 6 ms, and the link needs 1 ms and one more for every 100 kB. When is the last bucket across,
# and how much of that is exposed? Replace the `...` by what an all-reduce of `kB` takes.

# %% name="faded"
moments = [(float(ms), size) for ms, size in enumerate(sizes, 1)]
takes = ...  # kB -> ms: write a lambda
if takes is ...:
    print("not finished yet")
else:
    plan = bucket_timeline(moments, 100, takes)
    # 9.24 and 3.24 if you did it right
    print(f"over after {plan.end_s:.2f} ms, {plan.exposed_s:.2f} ms exposed")

# %% [markdown] name="elsewhere"
# ## The same idea elsewhere
#
# |  | makes replicas equal | bucket | gradients are |
# | --- | --- | --- | --- |
# | here | weights drawn by name, or a broadcast | a unit: one block | summed |
# | PyTorch DDP | broadcast at construction | `bucket_cap_mb` | averaged |
# | DeepSpeed | broadcast in `initialize` | `reduce_bucket_size` | averaged |
# | Horovod | `hvd.broadcast_parameters` | fusion buffer | averaged |
# | tf.distribute | mirrored variables | `bytes_per_pack` | summed (you divide) |
# | Accelerate | DDP underneath | DDP's | averaged |
# | JAX | one array, replicated sharding | the compiler's | summed by `psum` / averaged by `pmean` |
#
# And where something is left out:
#
# |  | accumulates without sending | unused parameters | uneven batches |
# | --- | --- | --- | --- |
# | here | `before_backward(last=False)` | always allowed | a batch without valid tokens |
# | PyTorch DDP | `ddp.no_sync()` around forward and backward | `find_unused_parameters=True` | `Join` |
# | DeepSpeed | `gradient_accumulation_steps` | stage dependent | yours to pad |
# | Horovod | `backward_passes_per_step` | zeros from `step()` | `hvd.join()` |
# | tf.distribute | by hand | zeros by hand | dataset is re-split |
# | Accelerate | `accelerator.accumulate(model)` | DDP's | `even_batches=True` |
# | JAX | a `scan` inside the step | zeros by construction | yours to pad |

# %% [markdown] name="lives-text"
# ## Where this lives in the engine
# The engine's data parallelism is one class; what this lesson does takes three of its methods, and the rest is lesson 11's. What a hook calls, as it runs:

# %% name="lives"
course.source(Zero._launch_ready)

# %% [markdown] name="cluster"
# ## Run it on your cluster
# On two machines with eight GPUs each, the same line on both (`HOST` is either of them); every rank takes a sixteenth of the global batch:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#     -m minidist train small --layout.dp 16 --train.global_batch 256
# ```
#
# It prints tokens per second; divide by that of one GPU, then by sixteen. What is missing from 1 is exposed communication,
# mostly the last unit's, and waiting for the slowest.

# %% [markdown] name="gpu-text"
# ## On a GPU
# The transformer's five steps with one rank a GPU, over NCCL, against one process: the same losses.

# %% name="gpu"
if gpus := course.gpu():
    many = ranks.run(ours, min(gpus, 8), 5)[0][0]
    print(*(f"{a:.10f} {b:.10f}" for a, b in zip(alone, many, strict=True)), sep="\n")

# %% [markdown] name="review-text"
# ## Two questions on older lessons
# Lesson 0: four ranks all-reduce a tensor of 4,000 bytes. How many does each send? Lesson 5: two ranks bring a tensor of ones to an asynchronous
# all-reduce, over a link that takes a tenth of a second. What does a rank read in that tensor right after the launch?

# %% name="review" tags=["predict"]
predict("07.review-sent", ..., unit="bytes")
predict("07.review-early", ..., choices=["1, its own", "2, the sum", "an error"])


# %% name="review-claim"
def review(mesh):
    x = torch.ones(1000)
    if mesh.world_size == 2:
        mesh.delay = Delay(Link(0.1))
    work = comm.all_reduce(x, mesh.world, async_op=True)
    read = x[0].item()
    work.wait()
    mesh.delay = None
    return mesh.tape[-1].payload, mesh.tape[-1].sent, read


payload, sent, _ = ranks.run(review, 4)[0]
claim("07.review-payload", payload, 4_000, unit="bytes")
claim("07.review-sent", sent, 6_000, unit="bytes")
read = ranks.run(review, 2)[0][2]
claim("07.review-early", "1, its own" if read == 1.0 else "other", "1, its own")

# %% [markdown] name="next"
# ## Now you
# The [exercise](../exercises/07_data_parallel.ipynb) (two hours, in five steps that score alone): build DDP. After that lesson 8 asks what a large batch does
# to learning, and lesson 11 why every rank should keep the whole optimizer. (It should not.)

# %% name="finish" tags=["check"]
course.finish("07")
