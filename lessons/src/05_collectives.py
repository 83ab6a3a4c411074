# %% [markdown] name="head"
# # 5. Collectives, and how they go wrong
#
# A [collective](glossary.ipynb#collective) is a contract: every [rank](glossary.ipynb#rank) of a
# [group](glossary.ipynb#group) makes the same call, in the same order, with tensors that fit. Keep it, and a handful of
# operations carry all of distributed training. Break it, and you get an error if you are lucky, a hang if you are not, and
# wrong numbers if the day is really against you.
#
# **After this lesson you can**
# - say what each collective leaves on which rank, and build the big one from two small ones;
# - let groups talk side by side, and launch an operation now to wait for it later;
# - say what a barrier promises, and what it does not;
# - read the report of a mismatch, and predict what happens when nobody checks.
#
# **You need** lesson 0. **It takes** 60 minutes of yours and less than one of the machine's.

# %% name="setup"
import time

import torch

from minidist import course, ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.core.links import Delay, Link
from minidist.core.work import CommTimeout
from minidist.course import claim, predict, widgets_05

# %% [markdown] name="who-text"
# ## Round one: who holds what afterwards
# Four ranks, four numbers each: rank 2 brings 20, 21, 22, 23. A [reduce-scatter](glossary.ipynb#reduce-scatter) sums over the
# ranks, and then leaves each rank only its own part of the sum. Which number does rank 2 keep? And which two collectives, one
# after the other, leave what an [all-reduce](glossary.ipynb#all-reduce) leaves?

# %% name="who-guess" tags=["predict"]
pairs = ["reduce_scatter, all_gather", "all_gather, reduce_scatter"]
predict("05.kept", ...)
predict("05.two-halves", ..., choices=[*pairs, "gather, broadcast"])

# %% name="who-run"
# %%ranks 4
mine = 10.0 * rank + torch.arange(4.0)
held = {
    "all_reduce": comm.all_reduce(mine.clone(), world),  # in place: keep `mine`
    "reduce_scatter": comm.reduce_scatter(mine, world),
    "all_gather": comm.all_gather(mine[:1], world),
    "all_to_all": comm.all_to_all(mine, world),
    "broadcast": comm.broadcast(mine.clone(), world, src=1),
    "gather": comm.gather(mine[:1], world, dst=1),
}
for name, value in held.items():
    parts = [part.item() for part in value] if isinstance(value, list) else value
    print(f"{name:15}", parts.tolist() if torch.is_tensor(parts) else parts)

# %% name="who-claim"
held = ranks.pull("held")
claim("05.brought", ranks.pull("mine")[2].tolist(), [20, 21, 22, 23])
claim("05.kept", held[2]["reduce_scatter"].item(), 68)
halves = torch.cat([rank["reduce_scatter"] for rank in held])  # an all-gather
same = all(torch.equal(halves, rank["all_reduce"]) for rank in held)
pair = "reduce_scatter, all_gather" if same else "something else"
claim("05.two-halves", pair, "reduce_scatter, all_gather")
sent = {line.op: line.sent for line in ranks.pull("tape")[2]}
both = sent["reduce_scatter"] + sent["all_gather"]
claim("05.bytes-agree", both, sent["all_reduce"], unit="bytes")
claim("05.transposed-back", held[2]["all_to_all"].tolist(), [2, 12, 22, 32])

# %% [markdown] name="who-why"
# $2 + 12 + 22 + 32 = 68$: place 2 of everybody, summed. An all-reduce *is* a reduce-scatter and an
# [all-gather](glossary.ipynb#all-gather), to the byte. Lesson 11 lives on that: whoever keeps only a part of the optimizer
# stops after the first half, works on the part, and gathers the result. Gather and [broadcast](glossary.ipynb#broadcast) one
# number from each are not the same: nobody summed anything.
#
# An [all-to-all](glossary.ipynb#all-to-all) is a transpose: rank $i$'s piece $j$ becomes rank $j$'s piece $i$, so rank 2 holds
# the very numbers that the sum added up.

# %% [markdown] name="stage-text"
# ### The stage
# The same collectives on two, three and four ranks, with the numbers of runs made just now. A stripe in a cell is a rank whose
# number is in it. Move the round and watch sums grow; messages are the simplest ones that do the job: in round $k$, rank $r$
# sends to rank $r + k$, counted around the circle. (Lesson 6 has cleverer ones.)

# %% name="stage" tags=["widget"]
runs = {n: ranks.run(widgets_05.perform, n) for n in (2, 3, 4)}
course.widget(
    lambda v: widgets_05.stage(runs, v["collective"], v["ranks"], v["round"]),
    collective=widgets_05.COLLECTIVES,
    ranks=(2, 4, 1, 4),
    round=(0, 6, 1, 2),
)

# %% [markdown] name="groups-text"
# ## Round two: side by side
# Nobody has to talk to everybody. `--layout dp=2,tp=2` puts the four ranks on a two by two grid, `tp` inside, `dp` across. Every
# rank brings $10^{\text{rank}}$, so the digits of a sum name the ranks in it. First all sum over their `tp` group, then the
# originals over their `dp` group. What does rank 3 hold after each?

# %% name="groups-guess" tags=["predict"]
predict("05.tp-sum", ..., choices=[11, 101, 1010, 1100, 1111])
predict("05.dp-sum", ..., choices=[11, 101, 1010, 1100, 1111])

# %% name="groups-run"
# %%ranks 4 --layout dp=2,tp=2
mine = torch.tensor([10**rank])
tp, dp = mesh.group("tp"), mesh.group("dp")
over_tp = comm.all_reduce(mine.clone(), tp).item()
over_dp = comm.all_reduce(mine.clone(), dp).item()
print(f"place {tp.rank} of tp {tp.ranks}: {over_tp},", end=" ")
print(f"place {dp.rank} of dp {dp.ranks}: {over_dp}")

# %% name="groups-claim"
claim("05.tp-sum", ranks.pull("over_tp")[3], 1100)
claim("05.dp-sum", ranks.pull("over_dp")[3], 1010)
claim("05.numbered-apart", [line.seq for line in ranks.pull("tape")[3]], [1, 1])

# %% [markdown] name="groups-why"
# 1100 is ranks 2 and 3, 1010 is ranks 1 and 3. A rank has a *number* in the job and a *place* in each group: rank 3 is at place 1
# of both of its groups. Arguments such as `src=` and `dst=` are places. Take one for the other and a program that runs on one
# server talks to the wrong rank on two.
#
# Both calls are number 1, each in its own group. "The same order" holds within a group: groups without a common rank need no
# order at all, and may well be at different points of the program.

# %% [markdown] name="early-text"
# ## Round three: asynchronous means finished later
# With `async_op=True` a call only *launches*. It hands back a [work handle](glossary.ipynb#work-handle), and `wait()` gives the
# result. Here is a slow wire: the [delay line](glossary.ipynb#delay-line) holds everything up by 0.2 seconds. Each rank brings
# $10^{\text{rank}}$ again, launches an all-reduce and reads its tensor at once. What does rank 1 read?

# %% name="early-guess" tags=["predict"]
predict("05.read-early", ..., choices=[1, 10, 11, 1111])


# %% name="early-run"
def read_early(mesh):
    mesh.delay = Delay(Link(latency_s=0.2))
    x = torch.tensor([10.0**mesh.rank])
    work = comm.all_reduce(x, mesh.world, async_op=True)
    early, done = x.item(), work.is_completed()
    looks = 0
    while not work.is_completed():  # here a training step would do something useful
        looks += 1
    return {"early": early, "done": done, "looks": looks, "late": work.wait().item()}


got = ranks.run(read_early, 4)
claim("05.read-early", got[1]["early"], 10)
claim("05.said-done", [rank["done"] for rank in got], [False] * 4)
claim("05.after-wait", [rank["late"] for rank in got], [1111] * 4)
claim("05.had-time", min(rank["looks"] for rank in got) > 0, True)

# %% [markdown] name="partial-text"
# The old 10; 1111 only after `wait()`. "Async" promised that the call comes back early, not the data. And that was the
# polite version, since the delay line delivers a tensor in one piece. Now the real wire, without a delay: rank 3 joins only
# after the others have read.


# %% name="partial-run"
def read_in_between(mesh):
    x, word = torch.full((8,), 10.0**mesh.rank), torch.zeros(1)
    if mesh.rank == 3:
        for peer in range(3):
            comm.recv(word, mesh.world, src=peer, tag="control")
    work = comm.all_reduce(x, mesh.world, async_op=True)
    time.sleep(0.05)  # something else meanwhile
    early = x.tolist()
    if mesh.rank != 3:
        comm.send(word, mesh.world, dst=3, tag="control")
    return early, work.wait().tolist()


got = ranks.run(read_in_between, 4)
for rank in range(3):
    print(f"rank {rank} read too early: {got[rank][0]}")
claim("05.nobody-had-it", any(1111 in got[rank][0] for rank in range(3)), False)
claim("05.all-have-it", all(late == [1111] * 8 for _, late in got), True)

# %% [markdown] name="partial-why"
# Look closely at what was read: some places show *partial* sums, of two or three ranks. The operation works in your
# tensor while you read it. From launch to `wait()` the tensor is not yours: do not read it, and do not write to it either.
# On a GPU with NCCL the trap is deeper: `wait()` only makes the GPU's stream wait, and the CPU runs on. A read by a kernel on
# the same stream is safe; a copy to the CPU with `non_blocking=True`, which nobody waits for, is not.

# %% [markdown] name="barrier-text"
# ## Round four: a barrier makes it safe?
# The folk remedy for all of the above. Ranks 0 and 1 launch the sum over the world, pass a [barrier](glossary.ipynb#barrier)
# together, and read. What does rank 1 read after the barrier?

# %% name="barrier-guess" tags=["predict"]
predict("05.after-barrier", ..., choices=[1, 10, 11, 1111])


# %% name="barrier-run"
def read_after_barrier(mesh):
    mesh.delay = Delay(Link(latency_s=0.02))
    x, word, pair = torch.tensor([10.0**mesh.rank]), torch.zeros(1), mesh.group("tp")
    if mesh.rank >= 2:  # ranks 2 and 3 come when ranks 0 and 1 have read
        comm.recv(word, mesh.world, src=mesh.rank - 2, tag="control")
    work = comm.all_reduce(x, mesh.world, async_op=True)
    comm.barrier(pair)
    read = x.item()
    if mesh.rank < 2:
        comm.send(word, mesh.world, dst=mesh.rank + 2, tag="control")
    return read, work.wait().item()


got = ranks.run(read_after_barrier, 4, layout=Layout(dp=2, tp=2))
claim("05.after-barrier", got[1][0], 10)
claim("05.after-its-own-wait", got[1][1], 1111)

# %% [markdown] name="barrier-why"
# A barrier says one thing: every rank *of its group* has come. It says nothing of other groups, and nothing of what is still
# on its way. Only the handle's own `wait()` gives the tensor back. The barrier is worse than useless as a remedy, since it is
# a collective too: one more call that some rank can leave out. Its honest uses are few: before a clock is started, and around
# what ranks do outside of collectives, such as files.

# %% [markdown] name="mismatch-text"
# ## Round five: a mismatch will raise?
# Here it does. The ranks of this course run with teaching checks: before anything is sent, each leaves a
# [fingerprint](glossary.ipynb#fingerprint) of its call (operation, shape, dtype, root) in shared memory and looks at those of its
# peers. Three mistakes, three reports. First the operation, from the oldest idiom there is: *only rank 0 needs to ...*

# %% name="mismatch-op"
# %%ranks 4 --expect mismatch
loss = torch.tensor([1.0 * rank])
if rank == 0:
    comm.all_reduce(loss, world)  # "only rank 0 logs the loss"
comm.broadcast(loss, world, src=0)

# %% [markdown] name="mismatch-dtype-text"
# Then the dtype: one rank keeps its gradients in half precision. And the shape: the last batch is short on one rank.

# %% name="mismatch-dtype"
# %%ranks 4 --expect mismatch
dtype = torch.bfloat16 if rank == 2 else torch.float32
comm.all_reduce(torch.ones(4, dtype=dtype), world)

# %% name="mismatch-shape"
# %%ranks 4 --expect mismatch
comm.all_gather(torch.ones(3 if rank == 3 else 4, 2), world)

# %% [markdown] name="missing-text"
# No fingerprint helps against the rank that makes no call at all. Nothing differs; something is not there. That one is a hang,
# and the report names the absent.

# %% name="missing"
# %%ranks 4 --expect hang --rank 1
losses = {0: [1.0], 1: [], 2: [3.0], 3: [2.0]}[rank]  # no data left on rank 1
for loss in map(torch.tensor, losses):
    comm.all_reduce(loss, world)

# %% [markdown] name="off-text"
# ### The same, with nobody checking
# `check=False` is what `minidist train` does, and every other engine by default: comparing notes costs time. Six mistakes, two
# ranks, in processes of their own since some will not survive it. Rank 0 does as the second column says, rank 1 as the third:
#
# | | rank 0 | rank 1 |
# |---|---|---|
# | dtype | sums `float32` ones | sums `int32` ones |
# | shape | sums a 2 by 3 tensor | sums a 3 by 2 tensor |
# | reduction | asks for the sum | asks for the maximum |
# | operation | all-reduces | broadcasts |
# | length | sums `ones(4)` | sums `ones(3)` |
# | longer | sums `ones(400)` | sums `ones(300)` |
#
# How many of the six end with an error on both ranks?

# %% name="off-guess" tags=["predict"]
predict("05.raised-on-both", ..., choices=[0, 1, 2, 3, 4, 5, 6])


# %% name="off-run"
def unchecked(mesh, what):
    first, world = mesh.rank == 0, mesh.world
    mesh.wire.timeout_s = 1.0  # else they would wait as long as the job may run
    x = {
        "dtype": torch.ones(4, dtype=torch.float32 if first else torch.int32),
        "shape": torch.arange(6.0).view((2, 3) if first else (3, 2)),
        "reduction": torch.tensor([1.0, 2.0]) * (mesh.rank + 1),
        "operation": torch.ones(4),
        "length": torch.ones(4 if first else 3),
        "longer": torch.ones(400 if first else 300),
    }[what]
    try:
        if what == "operation" and not first:
            comm.broadcast(x, world, src=1)
        else:
            other = what == "reduction" and not first
            comm.all_reduce(x, world, op="max" if other else "sum")
    except CommTimeout:
        return "gave up waiting"
    return x.tolist()


def outcome(what):
    try:
        return ranks.run(unchecked, 2, what, check=False, fresh=True, timeout_s=10)
    except ranks.RanksError as error:
        return str(error).splitlines()[0]


off = {}
for what in ("dtype", "shape", "reduction", "operation", "length", "longer"):
    off[what] = outcome(what)
    print(f"{what:10} {off[what]}")

# %% name="off-claim"
claim("05.raised-on-both", sum(isinstance(got, str) for got in off.values()), 1)
lists = {what: got for what, got in off.items() if isinstance(got, list)}
silent = [what for what, got in lists.items() if "gave up waiting" not in got]
claim("05.silent", silent, ["dtype", "shape", "reduction"])
claim("05.ones", off["dtype"][1][0], 1065353216)
claim("05.length", off["length"], ["gave up waiting", [1, 2, 2]])

# %% [markdown] name="off-why"
# One of six, and that one by a crash of the process. Three of six return numbers to both ranks, with no complaint at all:
# 1065353216 are the bits of a float one, read as an integer; the shapes were summed in the order of memory; the reduction was
# partly one and partly the other. With the wrong length, rank 1 went home with 1, 2, 2 while rank 0 waited for ever, so the log
# would blame rank 0 ([reported to PyTorch](https://github.com/pytorch/pytorch/issues/78022) and rediscovered yearly). Which of
# these you get depends on the size and the backend. So "no error" is no evidence.

# %% [markdown] name="swap-text"
# ### And what no check can see
# Checks on again. Two tensors of the same shape, summed in another order on rank 1: the order in which it happened to meet the
# names, say. What does a rank that wants the sum of `a` get?

# %% name="swap-run"
# %%ranks 2
tensors = {"a": torch.ones(2), "b": torch.full((2,), 100.0)}
for name in ("a", "b") if rank == 0 else ("b", "a"):
    comm.all_reduce(tensors[name], world)
print({name: tensor[0].item() for name, tensor in tensors.items()})

# %% name="swap-claim"
got = ranks.pull("tensors")
claim("05.swapped", [rank["a"][0].item() for rank in got], [101, 101])

# %% [markdown] name="swap-why"
# 101: one `a` and one `b`. The fingerprints agree, since a fingerprint has no name in it. A `set` of parameter names, a dictionary
# filled in the order of arrival, hooks that fire in another order: each has mixed somebody's gradients. The cure is not a check
# but a rule: *order comes from something all ranks share*, never from what happened locally.

# %% [markdown] name="break-text"
# ## Break it
# A ring: everyone sends to the right, then receives from the left. It reads like a perfectly polite dinner table.

# %% name="break-ring"
# %%ranks 4 --expect hang
right, left = (rank + 1) % world_size, (rank - 1) % world_size
comm.send(torch.ones(1), world, dst=right)
comm.recv(torch.zeros(1), world, src=left)

# %% [markdown] name="break-why"
# All four hold out a hand and nobody takes one. On gloo a blocking send is a *rendezvous*: it ends when the receiver has come. On
# NCCL and MPI small messages may pass, because somebody buffers them, until the day when they are no longer small.

# %% [markdown] name="worked-text"
# ## A worked example, and one to finish
# A **scatter** from messages: the root gives each rank its own piece. The root launches everything before it waits for anything
# (`exchange` does that); the others have one thing to receive. One message for each rank but the root, and no byte twice.


# %% name="worked"
def scatter(mesh, x, src):
    """Piece r of the root's x (n, ...) on rank r. The others' x only lends its shape."""
    n, me, world = mesh.world_size, mesh.rank, mesh.world
    if me == src:
        others = [r for r in range(n) if r != src]
        comm.exchange([("send", x[r], r) for r in others], world)
        return x[me].clone()
    return comm.recv(torch.empty_like(x[0]), world, src=src)


def run_scatter(mesh):
    x = torch.arange(4.0).view(4, 1) if mesh.rank == 2 else torch.zeros(4, 1)
    piece = scatter(mesh, x, src=2)
    return piece.item(), mesh.tape.calls(op="send")


claim("05.scattered", [piece for piece, _ in ranks.run(run_scatter, 4)], [0, 1, 2, 3])
claim("05.messages", sum(calls for _, calls in ranks.run(run_scatter, 4)), 3)

# %% [markdown] name="faded-text"
# Yours to finish: the ring again, with blocking calls and without the hang. Even ranks send first and receive then. Replace the
# `...`: what must odd ranks do?

# %% name="faded"
# %%ranks 4
right, left = (rank + 1) % world_size, (rank - 1) % world_size
given, got = torch.tensor([1.0 * rank]), torch.zeros(1)
odd = ...  # the two steps of an odd rank, such as ("send", "recv")
if odd is ...:
    print("not finished yet")
else:
    for step in ("send", "recv") if rank % 2 == 0 else odd:
        if step == "send":
            comm.send(given, world, dst=right)
        else:
            comm.recv(got, world, src=left)
    # rank 0 has 3, the others one less than they are
    print(f"from the left: {got.item():.0f}")

# %% [markdown] name="elsewhere"
# ## The same idea elsewhere
#
# | here | torch.distributed | MPI | NCCL |
# | --- | --- | --- | --- |
# | `all_reduce` | `all_reduce` | `Allreduce` | `ncclAllReduce` |
# | `all_gather` | `all_gather_into_tensor` | `Allgather` | `ncclAllGather` |
# | `reduce_scatter` | `reduce_scatter_tensor` | `Reduce_scatter_block` | `ncclReduceScatter` |
# | `all_to_all` | `all_to_all_single` | `Alltoall`, `Alltoallv` | sends and receives in a group call |
# | `broadcast` | `broadcast` | `Bcast` | `ncclBroadcast` |
# | `gather` | `gather` | `Gather` | sends and receives in a group call |
# | `exchange` | `batch_isend_irecv` | `Isend`, `Irecv`, `Waitall` | `ncclGroupStart` ... `End` |
# | `barrier` | `barrier` | `Barrier` | – (an all-reduce) |
# | group | `ProcessGroup`, `DeviceMesh` | communicator | communicator |
# | `async_op=True`, `wait()` | the same | `Iallreduce`, `Wait` | always; order by stream |
# | teaching checks | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | MUST, a tool | – |
#
# And by name, or compiled:
#
# | here | Horovod | JAX |
# | --- | --- | --- |
# | `all_reduce` | `allreduce` | `lax.psum` |
# | `all_gather` | `allgather` | `lax.all_gather` |
# | `reduce_scatter` | `reducescatter` | `lax.psum_scatter` |
# | `all_to_all` | `alltoall` | `lax.all_to_all` |
# | `broadcast` | `broadcast` | a masked `lax.psum` |
# | `gather` | – | – |
# | `exchange` | – | `lax.ppermute` |
# | `barrier` | `barrier` | `sync_global_devices` |
# | group | process set | axis of the mesh |
# | `async_op=True`, `wait()` | `allreduce_async`, `synchronize` | always; `block_until_ready` |
# | teaching checks | names, compared by a coordinator | one program, compiled for all |
#
# The very last row is the interesting one. Horovod sorts requests by *name*, which cures the swap above. JAX compiles one program for
# all devices, so inside of it ranks cannot disagree at all; between programs they still can.

# %% [markdown] name="lives-text"
# ## Where this lives in the engine
# The comparison that found the three mismatches. Nothing is sent: a second collective would hang where the first one does.

# %% name="lives"
from minidist.core import check

course.source(check.compare)

# %% [markdown] name="cluster"
# ## Run it on your cluster
# Shared memory ends at the host. Across hosts PyTorch's own fingerprints do the same work, slowly, for any program:
#
# ```
# TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --standalone --nproc-per-node 4 \
#     -m minidist train tiny --train.steps 20
# ```
#
# Use it for twenty steps after each change of the communication, then switch it off.

# %% [markdown] name="gpu-text"
# ## On a GPU
# Every collective of the first round, one rank a GPU, over NCCL.

# %% name="gpu"
if gpus := course.gpu():
    for rank, row in enumerate(ranks.run(widgets_05.perform, gpus)):
        print(rank, {name: after for name, (_, after) in row.items()})

# %% [markdown] name="review-text"
# ## Two questions on older lessons
# Lesson 0: one rank of four raises before a barrier. Whose traceback does the report show? Lesson 1: an all-reduce adds what came
# to what is there, `y += x` in float32: one addition for two reads and one write. How many bytes does it move for each addition?

# %% name="review" tags=["predict"]
predict(
    "05.review-blame",
    ...,
    choices=["of the rank that raised", "of rank 0", "of those that wait"],
)
predict("05.review-bytes", ..., unit="bytes")


# %% name="review-claim"
def one_raises(mesh):
    if mesh.rank == 2:
        raise ValueError("too early")
    comm.barrier(mesh.world)


try:
    ranks.run(one_raises, 4)
except ranks.RankError as error:
    who = "of the rank that raised" if error.rank == 2 else "of another"
    claim("05.review-blame", who, "of the rank that raised")
claim("05.review-bytes", 3 * torch.ones(1).element_size(), 12, unit="bytes")

# %% [markdown] name="next"
# ## Now you
# The [exercises](../exercises/05_collectives.ipynb): build four collectives from messages (60 minutes), and repair five programs
# that hang or are quietly wrong, each after a real report (60 minutes). Then lesson 6 asks what all of this costs.

# %% name="finish" tags=["check"]
course.finish("05")
