"""Facts of this host that ranks depend on: cores, threads a rank, the loopback interface, whether fork is safe."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping


def cores() -> int:
    """Cores this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int, environ: Mapping[str, str] = os.environ) -> int:
    """Threads for each of `ranks` ranks: an equal share of the cores, at least 1; a user's OMP_NUM_THREADS wins.

    Ranks with a thread for each core fight for them: two threads on a busy core pair ran 2-7 times slower than one.
    """
    wanted = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return max(1, cores() // ranks)


def loopback_interface() -> str:
    """Name of the loopback interface (lo, lo0), so that gloo never picks a VPN's or one that resolves to nowhere."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.rstrip("0") == "lo"), "lo")


def start_method() -> str:
    """ "fork" where forking a process that has imported torch is safe (Linux), else "spawn"."""
    return "fork" if sys.platform == "linux" else "spawn"
