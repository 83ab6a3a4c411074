"""The roofline: what an operation can reach on a machine, from its arithmetic, its bytes and two numbers of the machine.

An operation of `flops` and `nbytes` takes at least `max(flops / peak, nbytes / bandwidth)`, so it reaches at most
`min(peak, bandwidth x intensity)` FLOP/s, with intensity = flops / nbytes (Williams, Waterman and Patterson, "Roofline",
Communications of the ACM 52(4), 2009). The convention for both counts: a multiply and an add are two FLOPs; every input is
read once and every output written once. Caches can make real traffic no smaller than that, and often leave it larger.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minidist.core import hardware

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Work:
    """What an operation asks for: arithmetic in FLOPs and memory traffic in bytes. Works add up."""

    flops: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.nbytes

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Machine:
    """A roof: peak arithmetic in FLOP/s of one dtype, memory bandwidth in bytes/s, and where the numbers come from."""

    name: str
    peak: float
    bandwidth: float
    source: str = ""

    @property
    def ridge(self) -> float:
        """The intensity, in FLOPs a byte, from which arithmetic and no longer memory is the limit."""
        return self.peak / self.bandwidth


def machine(device: hardware.Device, dtype: str = "bfloat16") -> Machine:
    """The roof of a data sheet for products in `dtype`; ValueError where the sheet has no peak for it."""
    if dtype not in device.peak:
        raise ValueError(f"{device.name} has no published peak for {dtype!r}: use one of {sorted(device.peak)}")
    return Machine(device.name, device.peak[dtype], device.bandwidth, device.source)


def matmul(m: int, k: int, n: int, itemsize: int) -> Work:
    """(m, k) @ (k, n): each of m n results takes k multiplies and k adds; three matrices cross the memory bus once."""
    return Work(2 * m * k * n, itemsize * (m * k + k * n + m * n))


def elementwise(elements: int, itemsize: int, reads: int = 2, writes: int = 1, flops: int = 1) -> Work:
    """`flops` operations for each element, `reads` tensors in, `writes` tensors out. The defaults are an add."""
    return Work(flops * elements, itemsize * (reads + writes) * elements)


def attainable(intensity: float, machine: Machine) -> float:
    """FLOP/s that an operation of this intensity can reach at best: the roof above it."""
    return min(machine.peak, machine.bandwidth * intensity)


def bound(work: Work, machine: Machine) -> str:
    """ "memory" left of the ridge, "compute" from the ridge on."""
    return "memory" if work.intensity < machine.ridge else "compute"


def seconds(work: Work, machine: Machine, launch_s: float = 0.0) -> float:
    """The least time: arithmetic, traffic and the launch of the next kernel run side by side, so the slowest decides."""
    return max(work.flops / machine.peak, work.nbytes / machine.bandwidth, launch_s)


def smallest_batch(k: int, n: int, itemsize: int, machine: Machine) -> int | None:
    """The smallest b for which (b, k) @ (k, n) is bound by compute; None if no batch is large enough.

    Intensity is 2bkn / (itemsize (bk + kn + bn)): close to 2b / itemsize while b is small beside k and n, and never above
    2kn / (itemsize (k + n)), however large b grows.
    """
    spare = 2 * k * n - machine.ridge * itemsize * (k + n)
    if spare <= 0:
        return None
    b = max(1, math.floor(machine.ridge * itemsize * k * n / spare))  # never too high: from here the smallest lies above
    while bound(matmul(b, k, n, itemsize), machine) == "memory":
        b += 1
    return b


def measure(
    calls: Sequence[Callable[[], object]],
    *,
    rounds: int = 9,
    sample_s: float = 2e-4,
    synchronize: Callable[[], object] = lambda: None,
) -> list[float]:
    """Median seconds of each call, timed so that neighbours cannot make one of them look bad.

    Each call is warmed up first and repeated until a sample lasts `sample_s`, well above the clock's grain. The rounds are
    interleaved: a burst of other work hits one sample of every call, and the median drops it. `synchronize` waits for the
    device before the clock is read; without it a launch would be timed, not the work.
    """
    repeats = []
    for call in calls:
        call()
        synchronize()
        repeats.append(max(1, round(sample_s / max(_timed(call, 1, synchronize), 1e-7))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times, found in zip(calls, repeats, samples, strict=True):
            found.append(_timed(call, times, synchronize) / times)
    return [statistics.median(found) for found in samples]


def _timed(call: Callable[[], object], times: int, synchronize: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    return time.perf_counter() - began
