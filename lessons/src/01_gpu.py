# %% [markdown] name="head"
# # 1. What a GPU is
#
# A GPU is a machine that would rather be full than fast. It starts no operation sooner than your CPU does; it does a hundred
# thousand of them at once, provided that somebody has a hundred thousand ready and has brought the bytes. Most of what is called
# "slow training" is one of these two conditions not being met, and both can be worked out on paper.
#
# **After this lesson you can**
# - tell from shapes and dtype alone whether memory or arithmetic bounds an operation;
# - draw the roofline of the machine you sit at, and read any other one;
# - say what a device that is "100 % utilised" may be doing: nothing much;
# - time asynchronous work without fooling yourself.
#
# **You need** lesson 0, and matrix products in PyTorch. **It takes** 60 minutes of yours and less than one of the machine's.
#
# Everything here is measured on the CPU you have; it has the same parts, in smaller numbers. What is said about GPUs comes from
# their data sheets and is marked as such. Where you have a GPU, the last cells measure it.

# %% name="setup"
import queue
import threading
import time
from functools import partial

import torch
from IPython.display import display

from minidist import course, ranks
from minidist.core import comm, device, hardware
from minidist.course import claim, predict
from minidist.course import widgets_01 as figures
from minidist.plan import occupancy, roofline

threads_before = torch.get_num_threads()
# one core: a roof of two busy ones would be the neighbours' weather
torch.set_num_threads(1)
H100 = hardware.find("NVIDIA H100 80GB HBM3")
A100 = hardware.find("NVIDIA A100-SXM4-80GB")

# %% [markdown] name="flops-text"
# ## Round one: FLOPs predict time, don't they?
# Two jobs with exactly as many [FLOPs](glossary.ipynb#flop): one product of two 256 × 256 matrices, and one vector added to
# another, over and over. Which takes longer, in float32, on one core?

# %% name="flops-guess" tags=["predict"]
predict("01.slower", ..., choices=["the product", "the adds", "no difference"])

# %% name="flops-run"
a, b, product = torch.rand(256, 256), torch.rand(256, 256), torch.empty(256, 256)
x, y, total = torch.rand(2**22), torch.rand(2**22), torch.empty(2**22)


def multiply():
    torch.mm(a, b, out=product)


def adds():
    for _ in range(8):
        torch.add(x, y, out=total)


# 256 x 256 results, each 256 multiplies and 256 adds
claim("01.product-flops", 2 * 256**3, 33_554_432, unit="FLOPs")
claim("01.adds-flops", 8 * x.numel(), 33_554_432, unit="FLOPs")
product_bytes = a.nbytes + b.nbytes + product.nbytes
adds_bytes = 8 * (x.nbytes + y.nbytes + total.nbytes)
claim("01.bytes-ratio", adds_bytes / product_bytes, 512)
ratio = claim.timed("01.flops-do-not-predict", adds, multiply, at_least=5)
claim("01.slower", "the adds" if ratio > 1 else "the product", "the adds")

# %% [markdown] name="flops-why"
# As many FLOPs, 512 times the bytes, and many times the time. The product uses every number it has fetched 256
# times; the add uses it once and needs the next. *FLOPs predict time* is the first myth: they predict it only for operations
# that are not waiting for memory, and most operations are.

# %% [markdown] name="roof-text"
# ## Round two: the roofline of your machine
# The number that decides is the [arithmetic intensity](glossary.ipynb#arithmetic-intensity): FLOPs for each byte moved, when
# every input is read once and every output written once. An add in float32 does one FLOP for three elements of four bytes: a
# twelfth of a FLOP a byte, at any size. What is the intensity of the 256 × 256 product?

# %% name="roof-guess" tags=["predict"]
predict("01.intensity", ..., unit="FLOPs a byte")

# %% name="roof-measure"
matrices = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768)
vectors = [2**k for k in (8, 10, 12, 14, 15, 16, 17, 18, 20, 22, 23, 24)]


def multiplying(m, k, n):
    a, b, out = torch.rand(m, k), torch.rand(k, n), torch.empty(m, n)
    return lambda: torch.mm(a, b, out=out)


def adding(n):
    x, y, out = torch.rand(n), torch.rand(n), torch.empty(n)
    return lambda: torch.add(x, y, out=out)


def over(n, call):
    return lambda: [call() for _ in range(n)]


works = [roofline.matmul(n, n, n, 4) for n in matrices]
works += [roofline.elementwise(n, 4) for n in vectors]
calls = [multiplying(n, n, n) for n in matrices] + [adding(n) for n in vectors]
medians = roofline.measure(calls)  # warmed up, interleaved, the median of nine
points = list(zip(works, medians, strict=True))
measured = {"matmul, 12 sizes": points[:12], "add, 12 sizes": points[12:]}
mine = roofline.Machine(
    "this machine, one core",
    peak=max(work.flops / s for work, s in points[:12]),
    bandwidth=works[-1].nbytes / medians[-1],  # the largest add: no cache holds it
)
display(figures.roofline_figure(mine, measured)[0])

# %% name="roof-claim"
intensity = roofline.matmul(256, 256, 256, 4).intensity
claim("01.intensity", intensity, 42.67, rel=0.01, unit="FLOPs a byte")
claim("01.add-intensity", {work.intensity for work in works[12:]} == {1 / 12}, True)
bounds = [roofline.bound(work, mine) for work in works]
claim("01.adds-left", bounds[12:].count("memory"), 12)
claim("01.large-products-right", bounds[9:12], ["compute"] * 3)

# %% [markdown] name="roof-why"
# That is a [roofline](glossary.ipynb#roofline) ([Williams, Waterman and Patterson, 2009](https://doi.org/10.1145/1498765.1498785)).
# The flat part is the most arithmetic this core has done; the slope is its memory, bandwidth times intensity; they meet at the
# [ridge](glossary.ipynb#ridge). No operation gets above the roof for long:
#
# $$\text{FLOP/s} \le \min(\text{peak},\ \text{bandwidth} \times \text{intensity})$$
#
# Left of the ridge, memory is the bound: faster arithmetic would change nothing. Right of it, arithmetic is: faster memory would
# change nothing. And two kinds of points are *off* the roof. Adds above the slope found their data in a cache, whose bandwidth is
# not the one that the slope was drawn with. Small operations far below it were done before the next call had begun: what they
# show is not the machine but the price of asking it.

# %% [markdown] name="ladder-text"
# ## Round three: the memory ladder
# The same adds, as bytes a second. A server has such a ladder too, and it does not end at the edge of the chip. One trap before
# we climb down: memory is sold in bytes, networks in *bits*. How many gigabytes a second does a 400 Gb/s network card carry?

# %% name="ladder-guess" tags=["predict"]
predict("01.network", ..., unit="GB/s")

# %% name="ladder-run"
moved = [work.nbytes for work in works[12:]]
speeds = [work.nbytes / s for work, s in points[12:]]
display(figures.ladder_figure(moved, speeds)[0])
large, small = adding(2**23), adding(2**16)
claim.timed("01.cache-is-faster", large, over(128, small), at_least=1.3)
claim("01.network", 400e9 / 8 / 1e9, 50, unit="GB/s")
claim("01.sms", H100.sms, 132)
claim("01.nvlink-to-infiniband", H100.link / H100.network, 9)
claim("01.memory-to-nvlink", H100.bandwidth / H100.link, 7.4, rel=0.01)
claim("01.memory-to-ethernet", H100.bandwidth / (100e9 / 8), 268)

# %% [markdown] name="ladder-why"
# The steps of your figure are the caches; its left end is what a call costs; its right end is main memory. Moving the same
# bytes through a cache is faster, and that is the whole idea of tiling: cut the work so that what is used again is still near.
#
# A GPU's ladder; links and networks in one direction:
#
# | rung (H100 SXM) | how much | bytes a second | where lessons meet it | source |
# |---|---|---|---|---|
# | registers of all 132 [SMs](glossary.ipynb#sm) | 33 MB | as fast as the arithmetic | lesson 1 | [Hopper in depth](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/) |
# | shared memory and L1 | 33 MB | some ten times HBM | lesson 13 | as above |
# | L2 cache | 50 MB | a few times HBM | lesson 1 | [measured](https://chipsandcheese.com/p/nvidias-h100-funny-l2-and-tons-of-bandwidth) |
# | HBM, the "80 GB" of the name | 80 GB | 3,350 GB/s | lesson 2 | [data sheet](https://www.nvidia.com/en-us/data-center/h100/) |
# | NVLink to the neighbours in the server | 8 GPUs | 450 GB/s | lesson 12 | [ml-engineering](https://github.com/stas00/ml-engineering/tree/master/network) |
# | PCIe 5 to the host | the host's memory | 63 GB/s | lesson 4 | as above |
# | InfiniBand, 400 Gb/s a GPU (DGX H100) | the cluster | 50 GB/s | lessons 7 and 11 | as above |
# | InfiniBand, 200 Gb/s a GPU (DGX A100) | the cluster | 25 GB/s | lesson 17 | as above |
# | Ethernet, 100 Gb/s | the cluster | 12.5 GB/s | lesson 17 | as above |
#
# From HBM to NVLink a factor of 7.4, from NVLink to InfiniBand one of 9, and 268 from HBM to 100 Gb/s Ethernet. Tensor
# parallelism stays inside a server because of the 9. Nearly everything in this course is about which bytes go down which rung.

# %% [markdown] name="batch-text"
# ## Round four: the same layer, on both sides of the ridge
# A linear layer with a 4096 × 4096 weight in bfloat16, on an H100 ([data sheet](https://www.nvidia.com/en-us/data-center/h100/):
# 989.5 TFLOP/s, 3.35 TB/s). One token at a time, the weight is read for one row and thrown away. Which is the smallest
# power of two of tokens that makes arithmetic the bound?

# %% name="batch-guess" tags=["predict"]
predict("01.h100-batch", ..., choices=[1, 4, 16, 64, 256, 512, 4096])

# %% name="batch-run"
one, many = roofline.matmul(1, 2048, 2048, 4), roofline.matmul(256, 2048, 2048, 4)
claim("01.here-batch-1", roofline.bound(one, mine), "memory")
claim("01.here-batch-256", roofline.bound(many, mine), "compute")
claim("01.intensities", [one.intensity, many.intensity], [0.5, 102.4], rel=1e-3)
single, batch = multiplying(1, 2048, 2048), multiplying(256, 2048, 2048)
# as many tokens both times
claim.timed("01.batch-pays", over(256, single), batch, at_least=2)

h100, a100 = roofline.machine(H100), roofline.machine(A100)
h100_single = roofline.machine(H100, "float32")
ridges = [round(machine.ridge) for machine in (h100, a100, h100_single)]
claim("01.ridges", ridges, [295, 153, 20])
layers = {2**k: roofline.matmul(2**k, 4096, 4096, 2) for k in range(13)}
crossing = [n for n in layers if roofline.bound(layers[n], h100) == "compute"]
claim("01.h100-batch", crossing[0], 512)
claim("01.a100-at-256", roofline.bound(layers[256], a100), "compute")
claim("01.tensor-cores", h100.peak / h100_single.peak, 14.8, rel=0.01)
claim("01.best-measured-share", H100.measured / h100.peak, 0.80, rel=0.01)

# %% [markdown] name="batch-why"
# On your core the layer crosses the ridge between batch 1 (intensity 0.5) and 256 (102.4), and 256 tokens together cost much less
# than 256 times one. On the A100 (ridge 153) 256 is enough; on the H100 (ridge 295) it is not, and 512 is. Each generation adds
# more arithmetic than bandwidth, so ridges move right and *yesterday's good batch is today's memory-bound one*. It is also why
# generating text, a token at a time, is so much worse at using a GPU than training is.
#
# [Tensor cores](glossary.ipynb#tensor-core) are why the ridge is so far right: units that multiply small tiles of matrices, in
# 16-bit formats, 14.8 times the float32 rate of the same chip. Without them the H100's ridge would be at 20. They do nothing for
# an add, nothing for a softmax, and little for a product whose sizes are no multiple of their tile.
#
# And the peak is a ceiling, not a promise: the best bfloat16 product that
# [ml-engineering measured on an H100](https://github.com/stas00/ml-engineering/tree/master/compute/accelerator) reached 794.5 of
# 989.5 TFLOP/s, a share of 0.80. Hence the figure of merit of lesson 19, MFU, for which 0.45 is a fine result.

# %% [markdown] name="widget-text"
# Now move the layer yourself: choose a machine, a batch (as a power of two), a width, and the bytes of an element. The measured
# points of this machine stay where they are. (Presets: data sheets; the CPU core is recorded on ours. On the laptop and the CPU
# the peak is float32's: take 4 bytes.)

# %% name="widget" tags=["widget"]
roofs = {"this machine": mine, **figures.presets()}
course.widget(
    lambda values: figures.linear_on(roofs[values["machine"]], measured, values),
    machine=list(roofs),
    batch_is_2_to_the=(0, 14, 1, 8),
    width=(256, 16384, 256, 4096),
    bytes_an_element=(2, 4, 2, 4),
)

# %% [markdown] name="launch-text"
# ## Round five: the price of asking
# The activation of many transformers, GELU in its tanh form, can be written as one call of torch or spelt out from the formula. How many
# operations does the spelt-out one ask for?

# %% name="launch-guess" tags=["predict"]
predict("01.launches", ..., unit="operations")

# %% name="launch-run"
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Counts the operations that reach the device, and the bytes of the tensors that go in and out."""

    def __init__(self):
        super().__init__()
        self.count, self.nbytes = 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        self.count += 1
        tensors = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
        self.nbytes += sum(t.nbytes for t in tensors)
        return out


def spelt_out(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


tiny, whole = adding(64), adding(2**16)
# 1,024 of the one are as many adds as the other
claim.timed("01.launch-cost", over(1024, tiny), whole, at_least=5)
x = torch.rand(2**16)
with Launches() as formula:
    spelt_out(x)
with Launches() as one_call:
    torch.nn.functional.gelu(x, approximate="tanh")
claim("01.launches", formula.count, 8)
claim("01.one-launch", one_call.count, 1)
claim("01.traffic", formula.nbytes / one_call.nbytes, 9)

# %% [markdown] name="launch-why"
# Eight [kernels](glossary.ipynb#kernel) for one, and 9 times the traffic, because each writes a tensor that the next reads back. That
# is what *fusion* means and what `torch.compile` is for: same FLOPs, fewer trips to memory, fewer launches. Intensity is a
# property of the kernel, not of the formula.
#
# And every launch costs something before the first FLOP: 1,024 adds of 64 elements against one of 65,536, the same arithmetic. A
# GPU's launch takes microseconds ([NVIDIA shows where they go](https://developer.nvidia.com/blog/cuda-graphs/)), in which an H100
# could have done billions of FLOPs. So there are three bounds: compute, memory, and *launch*.

# %% [markdown] name="async-text"
# ## Round six: the call that returns before it has begun
# To hide that price, a launch does not wait. It puts the kernel into a queue, a [stream](glossary.ipynb#stream), and returns;
# a worker on the other side takes one after another. No GPU of ours recorded a trace for this page, so here is the mechanism
# itself, in ten lines, with a thread for the device. The device is kept busy, five products are launched, and the timer is
# stopped. How many of the five are done at that moment?

# %% name="async-guess" tags=["predict"]
predict("01.done-when-the-timer-stops", ..., choices=[0, 1, 2, 3, 4, 5])


# %% name="async-run"
class Stream:
    """A queue with one worker: what is launched first is done first, and launching does not wait."""

    def __init__(self):
        self.work = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def launch(self, kernel, *args):
        self.work.put((kernel, args))

    def synchronize(self):
        self.work.join()  # returns when all that was launched is done

    def _serve(self):
        while True:
            kernel, args = self.work.get()
            kernel(*args)
            self.work.task_done()


gpu, gate, done = Stream(), threading.Event(), []
gpu.launch(gate.wait)  # something long is still running
for number in range(5):
    gpu.launch(lambda number=number: (multiply(), done.append(number)))
# an honest stopwatch around the loop would show microseconds
when_the_timer_stops = len(done)
gate.set()
gpu.synchronize()
claim("01.done-when-the-timer-stops", when_the_timer_stops, 0)
claim("01.done-after-synchronize", len(done), 5)
claim("01.in-order", done, [0, 1, 2, 3, 4])

# %% [markdown] name="async-why"
# None. A stopwatch without `synchronize` times the *asking*, which is why GPU code "timed" that way is always surprisingly fast, and the
# first line that reads a value, an innocent `loss.item()`, always surprisingly slow: it waits for everything before it. The rule: warm up,
# synchronise, read the clock, work, synchronise, read the clock; repeat, and take the median.
#
# ### Two streams, and a copy that reads too late
# A copy to the device can be a launch like any other, if the host's memory is [pinned](glossary.ipynb#pinned-memory): at a fixed
# physical address, so that the copy engine can fetch it without the CPU. (`x.to(device, non_blocking=True)` of ordinary
# memory has to wait, or copies it into a pinned buffer first.) Below the host fills a buffer with ones, launches the copy, and
# at once fills the buffer with twos for the next step. What arrives?

# %% name="copy-guess" tags=["predict"]
predict("01.what-arrives", ..., choices=["ones", "twos", "an error"])

# %% name="copy-run"
copies, gate = Stream(), threading.Event()
buffer, on_device = torch.ones(4), torch.zeros(4)  # think of `buffer` as pinned
copies.launch(gate.wait)  # the copy engine is still busy with the step before
copies.launch(on_device.copy_, buffer)
buffer.fill_(2)
gate.set()
copies.synchronize()
claim("01.what-arrives", "ones" if on_device[0] == 1 else "twos", "twos")

# the remedy: two buffers, and an event by which one stream waits for another
results = []
for buffer in (torch.full((4,), 1.0), torch.full((4,), 2.0)):
    event, target = threading.Event(), torch.zeros(4)
    copies.launch(target.copy_, buffer)
    copies.launch(event.set)  # "record": says that all before it is done
    gpu.launch(event.wait)  # the computing stream waits; the host does not
    gpu.launch(lambda t=target: results.append(t.sum().item()))
gpu.synchronize()
claim("01.after-events", results, [4.0, 8.0])

# %% [markdown] name="copy-why"
# Twos: right shapes, no error, wrong data, and only when the device happens to be busy. Within a stream the order is kept; between
# two, and between a stream and the host, there is none unless an [event](glossary.ipynb#event) makes one. With two buffers and
# an event, the copy of the next batch overlaps the work on this one. Everything that overlaps in this course, gradients in
# lesson 7 and weights in lesson 11, is this picture with a network in place of the copy engine.

# %% [markdown] name="waves-text"
# ## Round seven: what it means to be full
# A kernel is a grid of *blocks*. A block has up to 1,024 threads, in [warps](glossary.ipynb#warp) of 32 that take every step
# together, and lives on one of the 132 [SMs](glossary.ipynb#sm) of an H100 until it ends
# ([limits by example](https://modal.com/gpu-glossary/perf/occupancy)). An SM that waits for memory turns to another warp; the more are
# resident, the better it hides the wait. How many are is its [occupancy](glossary.ipynb#occupancy), and whatever runs out first
# decides: warp slots (64), blocks (32), registers (65,536) or shared memory (228 KB).
#
# A grid of 132 equal blocks, one to an SM, takes one wave. You ask for one block more. How many waves?

# %% name="waves-guess" tags=["predict"]
predict("01.waves", ..., unit="waves")

# %% name="waves-widget" tags=["widget"]
course.widget(
    lambda values: figures.kernel_on_gpu(H100, values),
    blocks=(1, 1056, 1, 133),
    threads_a_block=(32, 1024, 32, 1024),
    registers_a_thread=(16, 64, 8, 64),
    shared_KB_a_block=(0, 224, 8, 0),
)

# %% name="waves-claim"
claim("01.waves", occupancy.waves(133, H100.sms).waves, 2)
claim("01.idle-sms", H100.sms - occupancy.waves(133, H100.sms).last, 131)
claim("01.one-too-many", occupancy.waves(133, H100.sms).share, 0.504, rel=1e-3)
claim("01.lean", occupancy.occupancy(H100.sm, threads=256, registers=32).share, 1.0)
claim("01.greedy", occupancy.occupancy(H100.sm, threads=256, registers=128).share, 0.25)

# %% [markdown] name="waves-why"
# Two waves, the second with 131 idle SMs: a share of 0.504 of the slots used, for asking 133 times instead of 132. Occupancy works the same
# way inside an SM: 256 threads with 32 registers each fill it to 1.0, with 128 registers to 0.25, since the register file is
# what it is. Full is not always fast, a tuned product runs at low occupancy on purpose, but *empty is always slow*.

# %% [markdown] name="break-text"
# ## Break it: 100 % utilised, and idle
# `nvidia-smi` reports "utilisation": by
# [NVIDIA's own definition](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html), the share of time in which *one or
# more kernels was executing*. Here is a kernel that sits on the device and does no arithmetic whatever, and a meter that looks
# 20 times. How many of the 20 times does it see a busy device?

# %% name="break-guess" tags=["predict"]
predict("01.busy-samples", ..., unit="samples")

# %% name="break-run"
gate = threading.Event()
before = len(done)
gpu.launch(gate.wait)
seen = []
for _ in range(20):
    time.sleep(0.005)
    seen.append(gpu.work.unfinished_tasks > 0)  # is a kernel resident?
gate.set()
gpu.synchronize()
claim("01.busy-samples", sum(seen), 20)
claim("01.products-done", len(done) - before, 0)

# %% [markdown] name="break-why"
# 20 of 20, and not one FLOP. One warp on one of 132 SMs, waiting, counts as full utilisation. So does a collective that waits for
# a late rank: a hung job is usually *100 % utilised*, on every GPU but one. Utilisation can show that a device is idle. It cannot show
# that it is busy.

# %% [markdown] name="worked-text"
# ## A worked example, and one to finish
# An optimizer step touches every parameter: Adam in its plain form reads weight, gradient and two moments and writes weight and moments, seven
# tensors of float32, for some twelve FLOPs. Which bound, and what share of an H100's float32 peak?

# %% name="worked"
parameters = 10**9
adam = roofline.elementwise(parameters, 4, reads=4, writes=3, flops=12)
reach = roofline.attainable(adam.intensity, h100_single)
bound = roofline.bound(adam, h100_single)
print(f"intensity {adam.intensity:.2f}, ridge {h100_single.ridge:.0f}: {bound} bound")
print(f"at best {reach / h100_single.peak:.1%} of the peak")
claim("01.adam-share", reach / h100_single.peak, 0.021, rel=0.03)

# %% [markdown] name="faded-text"
# A share of 0.021, and nothing to be done about it but to touch fewer bytes, which is what lesson 11 does. Yours to finish: from which
# batch on is a layer of 1024 × 4096 in bfloat16 bound by compute on an A100? Intensity is close to the batch while the batch is small beside the
# widths, so start near the ridge and go up. Replace the `...` by a condition.

# %% name="faded"
tokens = 1
while tokens < 10_000:
    work = roofline.matmul(tokens, 1024, 4096, itemsize=2)
    past_the_ridge = ...  # does this work have an intensity of at least a100.ridge?
    if past_the_ridge is ... or past_the_ridge:
        break
    tokens += 1
# 189 if you did it right
print("not finished yet" if past_the_ridge is ... else f"from {tokens} tokens on")

# %% [markdown] name="elsewhere"
# ## The same idea elsewhere
#
# | | the many | the few that march together | their shared memory | the queue | the wide unit |
# |---|---|---|---|---|---|
# | NVIDIA | SM | warp, 32 threads | shared memory | stream | tensor core |
# | AMD (ROCm) | compute unit | wavefront, 64 or 32 | LDS | stream, HSA queue | matrix core |
# | Intel (SYCL) | Xe core | sub-group | SLM | queue | XMX |
# | Apple (Metal) | GPU core | SIMD group, 32 | threadgroup memory | command queue | in recent chips |
# | TPU ([XLA](https://jax-ml.github.io/scaling-book/tpus/)) | a core or two | none: vector lanes | VMEM | the compiled program | MXU, 128 × 128 or 256 × 256 |
# | your CPU | core | SIMD lanes | L1 cache | none: calls wait | AMX, SME where it has one |
#
# In PyTorch the stream is `torch.Stream`, the event `torch.Event`, pinned memory `x.pin_memory()` or a loader's `pin_memory=True`. JAX
# calls the same trap *asynchronous dispatch* and its remedy `block_until_ready()`. Rooflines are drawn for you by Nsight
# Compute, `rocprof-compute` and Intel Advisor.

# %% [markdown] name="lives-text"
# ## Where this lives in the engine
# The planner predicts with these functions, and this is the stopwatch that timed all of the above:

# %% name="lives"
display(
    course.source(roofline.attainable),
    course.source(roofline.bound),
    course.source(roofline.measure),
)

# %% [markdown] name="review-text"
# ## Before you go: a question on lesson 0
# An all-reduce of 12,000 bytes among *three* ranks. How many bytes does each of them send, by the best algorithm there is?

# %% name="review-guess" tags=["predict"]
predict("01.review-sent", ..., unit="bytes")


# %% name="review"
def summed(mesh):
    comm.all_reduce(torch.ones(3000), mesh.world)
    return mesh.tape.payload(), mesh.tape.sent()


payload, sent = ranks.run(summed, 3)[2]
claim("01.review-payload", payload, 12_000, unit="bytes")
claim("01.review-sent", sent, 16_000, unit="bytes")

# %% [markdown] name="cluster"
# ## Run it on your cluster
# What does a node of yours have, by its data sheet and by its driver? `minidist doctor` names the GPUs, and the peak that
# MFU will be reckoned with:
#
# ```
# minidist doctor --json
# ```
#
# Then measure: the same notebook, run there from top to bottom, measures the GPU in the next cell.
#
# ```
# jupyter execute 01_gpu.ipynb --inplace
# ```

# %% [markdown] name="gpu-text"
# ## On a GPU
# Live: what a launch costs and what the work takes, a copy from ordinary and from pinned memory, and products on the
# device's own roof.

# %% name="gpu"
if course.gpu():
    where = device.for_rank(0, 1)
    wait = partial(device.synchronize, where)
    half = {"device": where, "dtype": torch.bfloat16}
    left, right = torch.rand(4096, 4096, **half), torch.rand(4096, 4096, **half)
    job = [lambda: left @ right]
    [asked] = roofline.measure(job, sample_s=0)  # no synchronise: the asking
    [worked] = roofline.measure(job, sample_s=0, synchronize=wait)
    print(f"product of 4096: launched in {asked * 1e6:.0f} µs,", end=" ")
    print(f"done in {worked * 1e6:.0f} µs")
    plain, target = torch.rand(2**24), torch.empty(2**24, device=where)
    pinned = plain.pin_memory()
    copies = [
        lambda: target.copy_(plain),
        lambda: target.copy_(pinned, non_blocking=True),
    ]
    times = roofline.measure(copies, synchronize=wait)
    for what, s in zip(("ordinary", "pinned"), times, strict=True):
        print(f"host to device from {what} memory: {plain.nbytes / s / 1e9:.1f} GB/s")
    rows = [torch.rand(n, 4096, **half) for n in (1, 16, 64, 256, 1024, 4096)]
    products = [partial(torch.mm, x, left) for x in rows]
    taken = roofline.measure(products, synchronize=wait)
    asks = [roofline.matmul(len(x), 4096, 4096, 2) for x in rows]
    for x, work, s in zip(rows, asks, taken, strict=True):
        speed = figures.flops(work.flops / s)
        print(f"batch {len(x):4}: intensity {work.intensity:6.1f}, {speed}")
    if sheet := hardware.find(device.name_of(where)):
        found = {"(n, 4096) @ (4096, 4096)": list(zip(asks, taken, strict=True))}
        display(figures.roofline_figure(roofline.machine(sheet), found)[0])

# %% [markdown] name="next"
# ## Now you
# The [exercises](../exercises/01_gpu.ipynb): the intensity of six operations (25 minutes), and the bound of operations on three
# machines (20 minutes). No clock decides about a point. After that, lesson 2 counts where the memory goes, and lesson 5 leaves
# the single device behind.

# %% name="finish" tags=["check"]
torch.set_num_threads(threads_before)
course.finish("01")
