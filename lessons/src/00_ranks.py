# %% [markdown] name="head"
# # 0. A cluster in your notebook
#
# A [rank](glossary.ipynb#rank) is a process with a number. Distributed training is several of them running one program,
# each with a memory of its own, and agreeing on something now and then. Here are four, behind the cells of this notebook:
# no cloud, no scheduler, no port to open.
#
# **After this lesson you can**
# - start and stop ranks, and say which process ran what;
# - tell the order of printing from the order of running;
# - read the failure of one rank among several;
# - rescue a hang, and name the rank that everyone waits for.
#
# **You need** Python, and PyTorch on one device. **It takes** 45 minutes of yours and less than one of the machine's.
#
# **How it works.** Every round goes *predict, run, claim, explain*. Replace the `...` by a guess, then run on. Guesses cost
# nothing, and a wrong one is the fastest way to learn something. A line with ✓ is a number of this text, compared with the run
# you have just made.

# %% name="setup"
import os
import time

import torch

from minidist import course, ranks
from minidist.core import comm
from minidist.core.timeline import timeline
from minidist.course import claim, predict

course.course_map()

# %% [markdown] name="map-text"
# That is the course, and where you are in it. Arrows are hard prerequisites; the essentials, in thick frames, can be taken
# without the rest.

# %% [markdown] name="processes-text"
# ## Round one: the cell runs once, doesn't it?
# `%%ranks 4` at the top of a cell hands the cell to four ranks. Each finds its own number in `rank`, and how many there are in
# `world_size`. How many different processes will run the next cell but one?

# %% name="processes-guess" tags=["predict"]
predict("00.processes", ..., choices=[1, 4, 5])

# %% name="processes-run"
# %%ranks 4
import os

pid = os.getpid()
print(f"I am rank {rank} of {world_size}, process {pid}")

# %% name="processes-claim"
pids = ranks.pull("pid")  # the variable `pid` of every rank, in rank order
claim("00.processes", len(set(pids)), 4)
claim("00.notebook-among-them", os.getpid() in pids, False)

# %% [markdown] name="processes-why"
# Four processes, and your notebook is none of them: it only sends the text of the cell and prints what comes back. "The cell
# runs once" is the first myth to go. It runs once *a rank*, at the same time, and `[2]` in front of a line says who spoke.
#
# The first cell may have taken a second or two, while a helper process imported torch. The ranks are forked from it and stay
# warm: run the cell again and compare.

# %% [markdown] name="memory-text"
# ### And whose variable is it?
# Each rank now sets a variable. Then the notebook asks for it. What does it get?

# %% name="memory-guess" tags=["predict"]
predict("00.memory", ..., choices=["9", "[0, 1, 4, 9]", "NameError"])

# %% name="memory-run"
# %%ranks 4
mine = rank**2

# %% name="memory-claim"
claim("00.memory", str(ranks.pull("mine")), "[0, 1, 4, 9]")
claim("00.not-here", "mine" in globals(), False)
ranks.push(bonus=100)  # the other direction: one value, into every rank

# %% name="memory-again"
# %%ranks 4
mine = mine + bonus  # kept from two cells ago, and different on each rank
mine

# %% [markdown] name="memory-why"
# Nothing is shared. Each rank has a namespace of its own that lives from cell to cell; `pull` fetches a copy from each, `push`
# puts a copy into each. If rank 0 wants to know what rank 3 knows, rank 3 has to send it. All of distributed training is
# arranging for that to happen seldom, early and in bulk.

# %% [markdown] name="order-text"
# ## Round two: print order is run order?
# Rank 0 sleeps longest before it prints, rank 3 does not sleep at all. In which order do they *reach* the print?

# %% name="order-guess" tags=["predict"]
predict("00.order", ..., order=[0, 1, 2, 3])

# %% name="order-run"
# %%ranks 4
import time

time.sleep(0.3 * (world_size - 1 - rank))
arrived = time.monotonic()
print("here I am")

# %% name="order-stream"
# %%ranks 4 --stream
time.sleep(0.3 * (world_size - 1 - rank))
print("here I am")

# %% name="order-claim"
arrived = ranks.pull("arrived")
claim("00.order", sorted(range(4), key=lambda r: arrived[r]), [3, 2, 1, 0])

# %% [markdown] name="order-why"
# The first run printed in rank order, because the notebook holds rank 3's lines back until those before it are done. That is a
# courtesy: two runs then look the same. With `--stream` lines come as they arrive. On a real cluster the log is a stream from
# many machines, and its order is evidence of nothing at all.

# %% [markdown] name="error-text"
# ## Round three: one rank raises
# Rank 2 raises before a [barrier](glossary.ipynb#barrier), which lets nobody through until everybody has come. The other three
# stand in it. `--expect error --rank 2` says that we want this failure: the cell shows the real report and would complain only if
# the failure did *not* happen. Whose traceback will you see?

# %% name="error-guess" tags=["predict"]
predict("00.culprit", ..., choices=[0, 1, 2, 3, "all four"])

# %% name="error-run"
# %%ranks 4 --expect error --rank 2
if rank == 2:
    raise ValueError("rank 2 has had enough")
comm.barrier(world)

# %% [markdown] name="error-python-text"
# The same from plain Python. `ranks.run(fn, 4)` calls `fn(mesh)` on four ranks and returns their results in a list; the
# [mesh](glossary.ipynb#mesh) knows the rank, the world size and the groups. Tests and graders of this course use just that.


# %% name="error-claim"
def program(mesh):
    if mesh.rank == 2:
        raise ValueError("rank 2 has had enough")
    comm.barrier(mesh.world)


try:
    ranks.run(program, 4)
except ranks.RankError as error:
    claim("00.culprit", error.rank, 2)

# %% [markdown] name="error-why"
# One traceback, the right one, and the other three are freed at once. Do not take that for granted: with a plain launcher they
# would wait until a timeout of half an hour, or die of a closed connection, and then *their* error would be the one in the log
# ([reported here](https://github.com/pytorch/pytorch/pull/49305)). Hence the rule for reading the logs of a big job: the first
# complaint is seldom the cause. Ask who fell silent.

# %% [markdown] name="hang-text"
# ## Round four: nobody raises, and nothing happens
# Rank 1 skips the all-reduce and goes for a nap; no error, anywhere. Whom will the report blame: those who are stuck, or the one
# who is not?

# %% name="hang-guess" tags=["predict"]
predict("00.blame", ..., choices=["ranks 0, 2 and 3", "rank 1", "nobody"])

# %% name="hang-run"
# %%ranks 4 --expect hang --timeout 2
import time

x = torch.ones(8)
if rank != 1:
    comm.all_reduce(x, world)
else:
    time.sleep(60)

# %% [markdown] name="hang-why"
# Read it top down. First who waits for whom; then, rank by rank, the collective it stands in, since when, and the line of code;
# last the first place where the [tapes](glossary.ipynb#tape) of the ranks part. The ranks that are stuck did nothing wrong. The
# culprit is the one that is *not* in the collective.
#
# A cell of your own that hangs needs no restart of the kernel: press the stop button, or wait for the limit (`--timeout`).
# `ranks.status()` shows what each rank is doing, `ranks.stop()` ends them all. Their variables go with them; yours stay.


# %% name="hang-claim"
def absent(mesh):
    if mesh.rank != 1:
        comm.all_reduce(torch.ones(8), mesh.world)
    else:
        time.sleep(60)


try:
    ranks.run(absent, 4, timeout_s=2)
except ranks.RankHang as hang:
    claim("00.blame", course.rank_names(hang.ranks), "rank 1")

# %% [markdown] name="bytes-text"
# ## Round five: what does agreement cost?
# An [all-reduce](glossary.ipynb#all-reduce) leaves the sum of everybody's tensor on everybody. The tensor below has 4,000 bytes.
# How many bytes does each of four ranks have to send, if they are clever about it? (Sending it to all three others would
# be 12,000.)

# %% name="bytes-guess" tags=["predict"]
predict("00.sent", ..., unit="bytes")

# %% name="bytes-run"
# %%ranks 4
import time

x = torch.full((1000,), float(rank))
if rank == 3:
    time.sleep(0.3)  # somebody is always late
comm.all_reduce(x, world)
print(x[0].item(), tape[-1])

# %% name="bytes-claim"
tapes = ranks.pull("tape")
claim("00.naive", 3 * tapes[0].payload(), 12_000, unit="bytes")
claim("00.payload", tapes[0].payload(), 4_000, unit="bytes")
claim("00.sent", tapes[0].sent(), 6_000, unit="bytes")
waits = [line.finish - line.launch for line in (tape[-1] for tape in tapes)]
claim("00.least-patient", waits.index(min(waits)), 3)
timeline(tapes)

# %% [markdown] name="bytes-why"
# Every operation leaves a line on the *tape*: what, with whom, how many bytes, when, from which line of code. Two byte counts
# matter. The *payload* is the tensor, 4,000 bytes. *Sent* is what a rank sends under the best algorithm there is,
# $2\,\frac{n-1}{n}$ of the payload for $n$ ranks: 6,000 bytes here, never quite twice the payload, however many join (lesson 6 builds it).
#
# Now look at the picture. Three ranks spent their time waiting for rank 3. The late one has the *shortest* bar: in a profile it
# looks like the fastest communicator of all. Waiting is communication's favourite disguise.

# %% [markdown] name="strip-text"
# The same run, moment by moment: move the slider (or type a number) and see who is running and who is waiting, in what.

# %% name="strip" tags=["widget"]
course.widget(
    lambda values: course.rank_strip(tapes, values["ms_after_first_launch"]),
    ms_after_first_launch=(0, 350, 10, 150),
)

# %% [markdown] name="break-text"
# ## Break it
# *"If rank 0 is fine, all are."* Rank 0 finishes and says so. Read the report before you believe it: ranks 2 and 3 both
# wait to receive what neither has sent.

# %% name="break-rank0"
# %%ranks 4 --expect hang --timeout 2
if rank == 0:
    print("rank 0 here: all done, all good")
if rank in (2, 3):
    x = torch.zeros(1)
    comm.recv(x, world, src=5 - rank)

# %% [markdown] name="mismatch-text"
# And one that real libraries may let pass with wrong numbers and no error: rank 3 brings a tensor of another shape to the sum.
# The ranks of this course compare notes before they send; `minidist train` on a cluster does not, for speed.

# %% name="break-mismatch"
# %%ranks 4 --expect mismatch
comm.all_reduce(torch.ones(4 if rank == 3 else 3), world)

# %% [markdown] name="worked-text"
# ## A worked example, and one to finish
# Each rank has a loss. The worst one, on every rank: an all-reduce that takes the maximum instead of the sum.

# %% name="worked"
# %%ranks 4
loss = torch.tensor([1.0, 4.0, 2.0, 3.0])[rank]
worst = comm.all_reduce(loss.clone(), world, op="max")
print(f"mine {loss:.0f}, the worst {worst:.0f}")

# %% [markdown] name="faded-text"
# Yours to finish: the mean over all tokens, where ranks have different numbers of them. Replace the `...` by one call. (Not a
# mean of means: sum everything, divide once. That rule will return in every lesson.)

# %% name="faded"
# %%ranks 4
# the sum of this rank's token losses, and how many tokens it has
local = torch.tensor([10.0 * rank, 1.0 + rank])
total = ...  # both numbers, summed over all ranks
if total is ...:
    print("not finished yet")
else:
    print(f"mean loss {total[0] / total[1]:.2f}")  # 6.00 if you did it right

# %% [markdown] name="train-text"
# ## Your first distributed training run
# What all this is for. The engine's own training loop, a small transformer, and a text close at hand: the source of this very
# engine. Once on one rank, once on four, the same settings; the batch is split, gradients are summed. Do the losses agree?

# %% name="train"
import json
import tempfile
from pathlib import Path

import minidist
from minidist.data import corpus
from minidist.train import config, loop

scratch = tempfile.TemporaryDirectory(prefix="minidist-lesson-")  # goes with the kernel
folder = Path(scratch.name)
corpus.build(Path(minidist.__file__).parent / "core", folder / "text")
small = "--model.layers=2 --model.width=48 --model.ffn=96 --train.seq_len=64".split()
small += "--train.steps=6 --train.sample_tokens=0 --metrics.plot=false".split()
losses = {}
for n in (1, 4):
    where = [f"--data.source={folder}/text", f"--run.dir={folder}"]
    where += [f"--run.name=on-{n}"]
    ranks.run(loop.train, n, config.load("tiny", [*small, *where], ranks=n))
    rows = (folder / f"on-{n}" / "metrics.jsonl").read_text().splitlines()
    losses[n] = [json.loads(row)["loss"] for row in rows]
for step, (one, four) in enumerate(zip(losses[1], losses[4], strict=True), 1):
    print(f"step {step}: loss on 1 rank {one:.5f}, on 4 ranks {four:.5f}")
apart = max(abs(four / one - 1) for one, four in zip(losses[1], losses[4], strict=True))
claim("00.same-losses", apart < 1e-4, True)

# %% [markdown] name="train-why"
# They do, and this is the promise of the whole engine: *any legal layout trains like one process*. For the real thing, three
# minutes on a laptop, ask a terminal (File, New, Terminal): `minidist train tiny --ranks 4`.

# %% [markdown] name="elsewhere"
# ## The same idea elsewhere
#
# | | my number | how many of us | start them | sum over all |
# |---|---|---|---|---|
# | here | `rank` | `world_size` | `%%ranks 4`, `ranks.run` | `comm.all_reduce` |
# | PyTorch | `dist.get_rank()` | `dist.get_world_size()` | `torchrun`, `mp.spawn` | `dist.all_reduce` |
# | Accelerate | `accelerator.process_index` | `accelerator.num_processes` | `accelerate launch` | `accelerator.reduce` |
# | DeepSpeed | `dist.get_rank()` | `dist.get_world_size()` | `deepspeed` | `dist.all_reduce` |
# | Horovod | `hvd.rank()` | `hvd.size()` | `horovodrun` | `hvd.allreduce` |
# | JAX | `jax.process_index()` | `jax.process_count()` | one process a host | `jax.lax.psum` |
# | tf.distribute | id in the replica context | `num_replicas_in_sync` | a `Strategy`'s scope | `strategy.reduce` |
#
# Hangs have tools elsewhere too: PyTorch's flight recorder and `monitored_barrier`, Horovod's stall inspector.

# %% [markdown] name="lives-text"
# ## Where this lives in the engine
# Nothing above was a mock. This is the function that decided whom to blame, as it runs:

# %% name="lives"
from minidist.core import hang

course.source(hang.suspects)

# %% [markdown] name="cluster"
# ## Run it on your cluster
# The program is the same; a launcher starts the ranks and tells each its number. On one machine with four GPUs:
#
# ```
# torchrun --standalone --nproc-per-node 4 -m minidist train tiny
# ```
#
# On two machines with eight each, the same line on both (`HOST` is either of them):
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
#     -m minidist train tiny
# ```
#
# Lesson 17 is about launchers, and about what can be wrong with `HOST`.

# %% [markdown] name="gpu-text"
# ## On a GPU
# The same cell there runs one rank a GPU, over NCCL.


# %% name="gpu"
def where(mesh):
    comm.all_reduce(torch.ones(1, device=mesh.device), mesh.world)
    return str(mesh.device)


if gpus := course.gpu():
    print(ranks.run(where, gpus))

# %% [markdown] name="next"
# ## Now you
# The [exercise](../exercises/00_ranks.ipynb) (15 minutes) has every rank hold a number of its own and brings them all to rank 0.
# It is graded on what the ranks return *and* on what they sent. After that, lesson 1 looks at a single device, and lesson 5
# takes collectives apart.

# %% name="finish" tags=["check"]
course.finish("00")
