"""How a bench measures: bytes held, counted by storage, and step times of two sides in interleaved pairs."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

COUNTED = 4  # steps in which bytes are counted

Side = Callable[[int], float]  # takes step number 0, 1, 2, ... of one engine and returns its loss


class Held(TorchDispatchMode):
    """Bytes of all CPU storages that are alive, looked at after every operation while this context is entered.

    A storage is found when an operation takes or returns a tensor on it, whoever made it (DDP's C++ makes its buckets where
    Python cannot see), counted once however many tensors view it, at its present size (both FSDP2 and our stage 3 free
    weights by resizing their storage to 0), until it dies. torch.profiler's memory events do not do: a storage whose last
    holder is a thread of gloo's counts as held for good there. What a kernel takes and gives back inside one operation is
    not seen.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        """most bytes held at once since `restart`, or since the beginning"""
        self._storages: dict[int, weakref.ref] = {}
        self._lock = threading.Lock()  # DDP and FSDP2 run operations on threads of their own, too

    @property
    def now(self) -> int:
        """Bytes held at this moment."""
        total = 0
        with self._lock:
            for key, ref in list(self._storages.items()):
                storage = ref()
                if storage is None:
                    del self._storages[key]
                else:
                    total += storage.nbytes()
        return total

    def restart(self) -> None:
        """Forget the peak so far, not what is held."""
        self.peak = self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its own operations on its local tensors follow, and are seen
        out = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, out)):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                with self._lock:
                    self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.now)
        return out


@dataclass
class Series:
    """What one rank saw of two sides, ours first."""

    warmups: int
    """steps of each side before the timed ones"""
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """of every timed step"""
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """of every step: warm-ups, timed ones, and those in which bytes were counted"""
    peaks: list[int] = field(default_factory=list)
    """most bytes that each side held at once during a step"""


def interleave(
    sides: Sequence[Side], *, pairs: int, warmups: int, meet: Callable[[], None], say: Callable[[str], None] = lambda text: None
) -> Series:
    """Take `warmups` untimed and `pairs` timed steps of each of two sides in turns, and then count the bytes they hold.

    Neighbours in time meet the same machine, and which side goes first alternates, so that neither always follows the other's
    cold caches. `meet` brings all ranks together before each step; `say` hears how far it is.
    """
    series = Series(warmups)
    for number in range(warmups + pairs):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            seconds, loss = _timed(sides[which], number, meet)
            series.losses[which].append(loss)
            if number >= warmups:
                series.seconds[which].append(seconds)
        if number >= warmups:
            ours, theirs = (side[-1] for side in series.seconds)
            say(f"pair {number - warmups + 1}/{pairs}  ours {ours:.4f} s  torch {theirs:.4f} s")
        else:
            say(f"warm-up {number + 1}/{warmups}")
    for which, side in enumerate(sides):
        peak, losses = held_in_a_step(side, warmups + pairs)
        series.peaks.append(peak)
        series.losses[which].extend(losses)
    say("bytes counted")
    return series


def held_in_a_step(side: Side, number: int) -> tuple[int, list[float]]:
    """(most bytes that this side held at once in a step, losses of the COUNTED steps it took for that).

    The first step makes known what there is. Of the others the leanest counts: a thread of gloo's lets go of a buffer whenever
    it comes to it, which on a busy machine is late.
    """
    gc.collect()  # what earlier steps left in cycles is not what a step needs
    peaks, losses = [], []
    with Held() as held:
        for k in range(COUNTED):
            held.restart()
            losses.append(side(number + k))
            peaks.append(held.peak)
    return min(peaks[1:]), losses


def _timed(side: Side, number: int, meet: Callable[[], None]) -> tuple[float, float]:
    meet()
    start = time.perf_counter()
    loss = side(number)
    return time.perf_counter() - start, loss
