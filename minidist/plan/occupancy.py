"""Occupancy: how many warps fit on one multiprocessor (SM), and how many waves of blocks a kernel takes on all of them.

A kernel is a grid of blocks; a block is up to 32 warps of 32 threads and stays on one SM until it ends. The SM hides the
latency of one warp's memory access behind the instructions of others, so it wants many resident ("occupancy"). What limits
them is whatever runs out first: warp slots, block slots, registers or shared memory. Limits: NVIDIA's C++ programming guide,
compute capabilities 8.0 and 9.0, and its Hopper Tuning Guide, section on occupancy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minidist.core.hardware import SM

THREADS = 32  # in a warp
PER_WARP = 256  # registers are handed to a warp in pieces of this many
MOST_THREADS = 1024  # in a block


@dataclass(frozen=True)
class Occupancy:
    """What fits on one SM: blocks, their warps, the share of all warp slots, and the resource that ran out."""

    blocks: int
    warps: int
    share: float
    limit: str
    """"warps", "blocks", "registers" or "shared memory" """


def occupancy(sm: SM, threads: int, registers: int = 32, shared: int = 0) -> Occupancy:
    """Blocks of `threads` threads resident at once, each thread with `registers`, each block with `shared` bytes.

    ValueError for a block that no SM of this kind could hold.
    """
    if not 1 <= threads <= MOST_THREADS:
        raise ValueError(f"a block of {threads} threads: use 1 to {MOST_THREADS}")
    if not 1 <= registers <= 255:
        raise ValueError(f"{registers} registers a thread: use 1 to 255")
    if not 0 <= shared <= sm.shared - sm.reserved:
        raise ValueError(f"{shared} bytes of shared memory a block: use 0 to {sm.shared - sm.reserved}")
    warps = math.ceil(threads / THREADS)
    by_registers = sm.registers // (math.ceil(registers * THREADS / PER_WARP) * PER_WARP)
    fits = {
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
        "registers": by_registers // 4 * 4 // warps,  # four schedulers share the warps evenly
        "shared memory": sm.shared // (shared + sm.reserved),
    }
    limit = min(fits, key=lambda name: fits[name])
    if fits[limit] == 0:
        raise ValueError(f"a block of {threads} threads with {registers} registers each does not fit: use fewer of either")
    return Occupancy(fits[limit], fits[limit] * warps, fits[limit] * warps / sm.warps, limit)


@dataclass(frozen=True)
class Waves:
    """How a grid fills the machine: full waves and the blocks left for a last one."""

    waves: int
    last: int
    """blocks of the last wave"""
    share: float
    """block slots used over all waves, of those there were: the efficiency that rounding up leaves"""


def waves(blocks: int, sms: int, resident: int = 1) -> Waves:
    """A grid of `blocks` equal blocks on `sms` multiprocessors that hold `resident` each at a time."""
    if min(blocks, sms, resident) < 1:
        raise ValueError(f"blocks={blocks}, sms={sms}, resident={resident}: all have to be 1 or more")
    slots = sms * resident
    count = math.ceil(blocks / slots)
    return Waves(count, blocks - (count - 1) * slots, blocks / (count * slots))
