"""Which processes still run, and one that hears Ctrl-C."""

import signal
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


def alive(pids: list[int]) -> list[int]:
    """Those of these processes that run. A zombie has ended and waits for its parent to notice."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all these processes end within that time."""
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pids)


def hear_ctrl_c() -> None:
    """As a child's `preexec_fn`: what a shell starts in the background ignores SIGINT, and so does all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
