"""A launched operation: how it is waited for, when it gives up, and what it says then."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from minidist.core.tape import Line

if TYPE_CHECKING:
    from minidist.core.mesh import Group

SPIN_S = 200e-6  # on two busy cores, spinning this long made small all-reduces of 2 and 4 ranks 1.4 times faster than blocking
REST_S = 5e-3  # then a rank sleeps until it is told, and looks this often at the deadline and at what its peers called

# gloo can neither poll a transfer or a reduce-scatter nor time a transfer out and go on (its pair is closed for good), so
# these are waited for on threads.
_waiters = futures.ThreadPoolExecutor(max_workers=256, thread_name_prefix="minidist-transfer")


class CommTimeout(RuntimeError):
    """An operation did not complete within the mesh's `timeout_s`. The message says which, with whom, and launched where."""


class CommMismatch(RuntimeError):
    """Ranks called different collectives (operation, shape or dtype). The message shows each rank's call and its place."""


class CommLost(RuntimeError):
    """A peer's connection broke while this rank waited for it: this rank is a victim, the cause is elsewhere."""


class Handle(Protocol):
    """What a backend leaves us to hold: something that completes."""

    polls: bool
    """whether waiting means asking `done` until it is so"""

    def done(self) -> bool: ...

    def rest(self, seconds: float) -> None:
        """Where it polls: sleep until it completes, at most so long."""

    def finish(self) -> None:
        """Raise the backend's error, if any; on a backend with streams, order them."""


class PolledHandle:
    """A gloo collective: asked whether it is done, so that Ctrl-C, deadlines and mismatches are noticed while waiting."""

    polls = True

    def __init__(self, work: dist.Work, on_done: Callable[[], None]):
        self._work, self._on_done, self._lock, self._over = work, on_done, threading.Lock(), threading.Event()
        work.get_future().add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        with self._lock:  # told by the backend's thread, or by whoever asks first
            tell, self._on_done = self._on_done, None
            if tell:
                tell()
                self._over.set()

    def done(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._tell()
        return completed

    def rest(self, seconds: float) -> None:
        self._over.wait(seconds)

    def finish(self) -> None:
        self._work.wait()


class ThreadedHandle:
    """A gloo transfer or reduce-scatter, waited for by a thread."""

    polls = True

    def __init__(self, work: dist.Work, timeout_s: float, on_done: Callable[[], None]):
        def wait():
            work.wait(timedelta(seconds=timeout_s))
            on_done()

        self._future = _waiters.submit(wait)

    def done(self) -> bool:
        return self._future.done()

    def rest(self, seconds: float) -> None:
        futures.wait([self._future], seconds)

    def finish(self) -> None:
        self._future.result()


class StreamHandle:
    """An operation of a backend with streams of its own (NCCL), or of the fake one: waiting only orders streams."""

    polls = False

    def __init__(self, work: dist.Work | None, on_done: Callable[[], None]):
        self._work, self._on_done = work, on_done

    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._on_done()


class Work:
    """A launched operation. `wait()` returns its result; `is_completed()` never blocks."""

    def __init__(
        self,
        line: Line,
        number: int,
        group: Group,
        start: Callable[[Callable[[], None]], Handle] | None,
        result: Callable[[], Any],
    ):
        self.line = line
        self._group, self._result = group, result
        self._number = number  # of its entry on the board
        self._finished, self._value = False, None
        self._handle = start(self._completed) if start else None
        if self._handle is None:
            self._completed()

    def _completed(self) -> None:
        """The real operation is over (maybe told by a backend's thread): cross the delay line, then note the time."""
        now, wire, line = time.monotonic(), self._group.wire, self.line
        if wire.delay and self._group.handle is not None:
            ends = line.ranks if line.peer is None or line.op in ("broadcast", "gather") else (wire.rank, line.peer)
            ready = wire.delay.link(ends).book(now, line.payload if line.op == "recv" else line.sent)
            line.delay, now = ready - now, ready
        line.finish = now

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""
        if self._finished or self._handle is None:
            return True
        return self._handle.done() and time.monotonic() >= (self.line.finish or 0.0)

    def wait(self) -> Any:
        """Block until the operation is complete and return its result.

        Raises CommTimeout past the deadline, CommLost where a peer has gone, and CommMismatch when teaching mode finds that
        peers called something else.
        """
        if self._finished:
            return self._value
        if self._handle is not None:
            self._block()
        self._value, self._finished = self._result(), True
        return self._value

    def _block(self) -> None:
        wire, began = self._group.wire, time.monotonic()
        if wire.board:
            wire.board.wait(wire.rank, self._number)
        if self._handle.polls:
            self._poll(began)
        try:
            self._handle.finish()
        except RuntimeError as error:
            if "imed out" in str(error):  # gloo's own clock ran out, on a thread
                raise CommTimeout(self._story(f"waited {time.monotonic() - began:.0f} s")) from None
            raise CommLost(self._story("lost its connection") + f" (backend: {str(error).splitlines()[0]})") from None
        left = (self.line.finish or 0.0) - time.monotonic()
        if left > 0:  # still on the delay line
            time.sleep(left)
        self.line.waited = time.monotonic() - began
        if wire.board:
            wire.board.leave(wire.rank)

    def _poll(self, began: float) -> None:
        from minidist.core.check import compare

        wire = self._group.wire
        while not self._handle.done():
            now = time.monotonic()
            if now - began < SPIN_S:
                time.sleep(0)
                continue
            if now - began > wire.timeout_s:
                raise CommTimeout(self._story(f"waited {now - began:.0f} s"))
            if wire.check:
                compare(self.line, self._group)
            self._handle.rest(REST_S)

    def _story(self, what: str) -> str:
        line = self.line
        peers = f"peer {line.peer}" if line.peer is not None else f"ranks {list(line.ranks)}"
        return (
            f"rank {self._group.wire.rank} {what} in {line.op} #{line.seq} of {line.group} ({peers}; {list(line.shape)} "
            f"{line.dtype}), launched at {line.where}. A peer died, is still computing, or called something else: look at "
            f"the other ranks first. If they are only slow, give a longer timeout_s."
        )


def caller() -> str:
    """file:line of the nearest frame outside minidist.core and torch: what a learner would call "my line"."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("minidist.core.", "torch.")):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@functools.cache
def _short(path: str) -> str:
    return path if path.startswith("<") else "/".join(Path(path).parts[-2:])
