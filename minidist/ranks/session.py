"""What a notebook or test has running: one way to launch, one pool for each number of ranks, the variables pushed so far."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from minidist.core.hang import collective
from minidist.core.layout import Layout
from minidist.ranks import host, wire
from minidist.ranks.errors import UsageError
from minidist.ranks.launch import Door, Launcher, SpawnLauncher, ZygoteLauncher
from minidist.ranks.pool import Pool, check_layout

MOST_RANKS = 64  # of one host; more would be a slip of the finger


@dataclass
class RankStatus:
    """One rank as the rank strip shows it."""

    rank: int
    pid: int | None
    state: str
    """down, idle, running (Python or arithmetic) or waiting (in a collective)"""
    last: str | None
    """the last collective it launched in this run, such as "all_reduce #2 of world" """
    seconds: float
    """in this state"""


class Session:
    """The pools of this process. Nothing starts before it is needed."""

    def __init__(self, start: str | None = None):
        self.method = start or host.start_method()
        self.owner = os.getpid()
        self.launcher: Launcher | None = None
        self.pools: dict[int, Pool] = {}
        self.latest: Pool | None = None
        self.pushed: list[tuple[set[str], bytes]] = []  # names and packed values
        atexit.register(self.stop)

    def warm_up(self) -> Launcher:
        """Start the zygote, which imports torch while this process goes on."""
        if not hasattr(socket, "AF_UNIX"):
            raise UsageError("ranks need Linux or macOS: on Windows, run this inside WSL 2")
        if self.launcher is None or not self.launcher.alive:
            self._close()
            self.launcher = (ZygoteLauncher if self.method == "fork" else SpawnLauncher)(Door())
        return self.launcher

    def pool(self, ranks: int) -> Pool:
        """The pool of that many ranks, up and running."""
        check_count(ranks)
        launcher = self.warm_up()
        pool = self.pools.get(ranks)
        if pool is None or pool.launcher is not launcher:
            pool = self.pools[ranks] = Pool(launcher, ranks)
        pool.start([data for _, data in self.pushed])
        self.latest = pool
        return pool

    def run(self, fn, ranks, args, kwargs, *, layout, timeout_s, check, fresh) -> list[Any]:
        """See minidist.ranks.run."""
        check_count(ranks)
        context = options(layout, ranks, timeout_s, check)
        payload = pack((fn, args, kwargs), f"the function {getattr(fn, '__name__', fn)!r}")
        if not fresh:
            return self.pool(ranks).call(payload, context)
        pool = Pool(self.warm_up(), ranks)
        pool.start([data for _, data in self.pushed])
        try:
            return pool.call(payload, context)
        finally:
            pool.kill()

    def push(self, variables: dict[str, Any]) -> None:
        """Set variables on all ranks there are, and on those that start later."""
        payload = pack(variables, "what you push")
        names = set(variables)
        self.pushed = [(old, data) for old, data in self.pushed if not old <= names]  # all set anew: no need to keep them
        self.pushed.append((names, payload))
        for pool in self.pools.values():
            pool.push(payload)

    def pull(self, name: str) -> list[Any]:
        """The values of a variable on the ranks used last."""
        if self.latest is None:
            raise UsageError(f"no ranks are running, so there is no {name!r} to pull: run a %%ranks cell first")
        return self.pool(self.latest.ranks).pull(name)

    def status(self) -> list[RankStatus]:
        """The ranks used last."""
        if self.latest is None:
            return []
        found = []
        for member, state in self.latest.states():
            last = collective(state.history[-1]) if state.history else None
            found.append(RankStatus(member.rank, member.pid, state.status, last, time.monotonic() - state.since))
        return found or [RankStatus(rank, None, "down", None, 0.0) for rank in range(self.latest.ranks)]

    def stop(self) -> None:
        """End all ranks and forget what was pushed. The next run starts new ones."""
        if os.getpid() == self.owner:  # a forked child of this process owns no ranks
            self._close()
            self.pushed = []

    def _close(self) -> None:
        for pool in self.pools.values():
            pool.kill()
        self.pools, self.latest = {}, None
        if self.launcher:
            self.launcher.close()
            self.launcher.door.close()
            self.launcher = None


def options(layout: Layout | None, ranks: int, timeout_s: float, check: bool) -> dict[str, Any]:
    """What the ranks have to know of a run. Raises UsageError for what cannot be."""
    if not timeout_s > 0:
        raise UsageError(f"timeout_s = {timeout_s!r}: give the seconds after which a run counts as hanging, such as 60")
    return {"layout": check_layout(layout, ranks), "timeout_s": float(timeout_s), "check": check}


def check_count(ranks: int) -> None:
    """Refuse a number of ranks that cannot be."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"{ranks!r} ranks: give a whole number from 1 to {MOST_RANKS}")
    if "minidist.ranks.worker" in sys.modules and sys.modules["minidist.ranks.worker"].inside:
        raise UsageError("this code already runs on a rank: call minidist.ranks from the notebook or script that started it")


def pack(value: Any, what: str) -> bytes:
    """Pickle for the ranks, or say in one line which object cannot be."""
    try:
        return wire.dumps_by_value(value)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError, RecursionError, NotImplementedError) as error:
        raise UsageError(
            f"{what} cannot be sent to the ranks ({str(error).splitlines()[0]}): make such objects inside the function or cell"
        ) from None


_session: Session | None = None


def current() -> Session:
    """The session of this process, made at first use."""
    global _session
    if _session is None or _session.owner != os.getpid():
        _session = Session()
    return _session
