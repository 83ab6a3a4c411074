"""Doing it on purpose: faults as context managers for lessons and tests, and an `Injector` that lets stated ones strike a run.

    with faults.full_disk(after=100_000):     # the next checkpoint does not fit
        checkpoint.save(...)

Nothing is imitated that can be done: a killed rank gets SIGKILL, a stopped one SIGSTOP, a flipped byte is flipped on disk.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor, nn

from minidist.core import disk
from minidist.core.links import Delay, Link
from minidist.core.mesh import Mesh
from minidist.faults.vocabulary import Fault


@contextmanager
def full_disk(after: float) -> Iterator[None]:
    """The disk behind checkpoints takes `after` more bytes, over all files that this process opens, and then is full.

    As on a real one, what still fits is written, and then comes OSError (ENOSPC).
    """
    room = [int(after)]
    with disk.behind(lambda file, path: _Full(file, path, room)):
        yield


@contextmanager
def slow_disk(bytes_per_s: float) -> Iterator[None]:
    """The disk behind checkpoints takes so many bytes a second, over all files that this process opens."""
    way = Link(0.0, bytes_per_s)
    with disk.behind(lambda file, path: _Slow(file, path, way)):
        yield


@contextmanager
def slow_link(mesh: Mesh, latency_s: float = 0.0, bytes_per_s: float = float("inf")) -> Iterator[None]:
    """Everything this rank takes part in crosses a link of this latency and bandwidth (`core.links`)."""
    before, mesh.delay = mesh.delay, Delay(Link(latency_s, bytes_per_s))
    try:
        yield
    finally:
        mesh.delay = before


@contextmanager
def nan_gradient(parameter: nn.Parameter, value: float = float("nan")) -> Iterator[None]:
    """The first element of this parameter's gradient is `value` in every backward. Put it on one rank, and its batch alone is
    bad."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = value
        return grad

    handle = parameter.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still (SIGSTOP) while this lasts: all its threads, in the middle of whatever they do."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def flipped_bit(path: Path) -> Iterator[int]:
    """One bit of a file has turned while this lasts; gives the byte's place."""
    at = flip_bit(path)
    try:
        yield at
    finally:
        flip_bit(path, at)


def flip_bit(path: Path, at: int | None = None) -> int:
    """Turn the lowest bit of the byte at `at` (default: the last one, which in a tensor file is data). Returns its place."""
    with open(path, "r+b") as file:
        at = file.seek(0, os.SEEK_END) - 1 if at is None else at
        file.seek(at)
        byte = file.read(1)
        if not byte:
            raise ValueError(f"{path} has no byte {at}: there is nothing to flip")
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    return at


def kill_self() -> None:
    """End this process as the kernel ends one that has used up memory: no clean-up, no last word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self(seconds: float | None = None) -> None:
    """Stop this process, all its threads, for so many seconds; for ever without them."""
    if seconds is not None:  # somebody else has to wake a process that stands still
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


class Injector:
    """Lets faults strike one rank of a run. `attempt`: how often the job was started before; only this attempt's faults strike.

    A step of the caller lies in `with injector.step(number, model):`; `close` takes back what lasts.
    """

    def __init__(self, faults: Sequence[Fault], mesh: Mesh, checkpoints: Path, attempt: int = 0):
        self.mesh, self.checkpoints = mesh, checkpoints
        self.mine = [fault for fault in faults if (fault.rank, fault.attempt) == (mesh.rank, attempt)]
        self._lasting = ExitStack()
        self._naps: list[float] = []
        self._begin(0)

    @contextmanager
    def step(self, number: int, model: nn.Module) -> Iterator[None]:
        """Around step `number`, from 1: what is to happen as it begins happens, what is to last begins."""
        self._begin(number)
        with ExitStack() as within:
            for fault in self._at(number, "nan"):
                within.enter_context(nan_gradient(dense_parameter(model), fault.amounts.get("value", float("nan"))))
            for seconds in self._naps:
                time.sleep(seconds)
            yield

    def close(self) -> None:
        """Take back slow links and disks."""
        self._lasting.close()

    def _at(self, number: int, *kinds: str) -> list[Fault]:
        return [fault for fault in self.mine if fault.step == number and fault.kind in kinds]

    def _begin(self, number: int) -> None:
        for fault in self._at(number, "slow", "slow-link", "slow-disk", "full-disk"):
            self._last(fault.kind, fault.amounts)
        for _ in self._at(number, "flip"):
            flip_bit(newest_file(self.checkpoints, self.mesh.rank))
        for fault in self._at(number, "stop"):
            stop_self(fault.amounts.get("seconds"))
        for _ in self._at(number, "kill"):
            kill_self()

    def _last(self, kind: str, amounts: dict[str, float]) -> None:
        if kind == "slow":
            self._naps.append(amounts["seconds"])
        elif kind == "slow-link":
            latency, bandwidth = amounts.get("latency", 0.0), amounts.get("bandwidth", float("inf"))
            self._lasting.enter_context(slow_link(self.mesh, latency, bandwidth))
        elif kind == "slow-disk":
            self._lasting.enter_context(slow_disk(amounts["bytes_per_s"]))
        else:
            self._lasting.enter_context(full_disk(amounts["bytes"]))


def dense_parameter(model: nn.Module) -> nn.Parameter:
    """A trained parameter that has a gradient in every backward: a norm's, for an expert's may see no token."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and not hasattr(parameter, "over")]
    return next((parameter for parameter in trained if parameter.dim() == 1), trained[0])


def newest_file(checkpoints: Path, rank: int) -> Path:
    """The largest file of `rank` in the newest finished checkpoint. ValueError where there is none."""
    from minidist import checkpoint

    folder = checkpoint.latest(checkpoints) if checkpoints.is_dir() else None
    files = sorted(folder.glob(f"rank-{rank:05d}*"), key=lambda path: path.stat().st_size) if folder else []
    if not files:
        raise ValueError(f"{checkpoints}: rank {rank} has no file in a finished checkpoint yet, so none can be spoiled")
    return files[-1]


class _Behind:
    """An open file that passes on what it is not about."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path = file, path

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class _Full(_Behind):
    def __init__(self, file: BinaryIO, path: Path, room: list[int]):
        super().__init__(file, path)
        self.room = room

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        fits = min(len(data), self.room[0])
        self.file.write(data[:fits])
        self.room[0] -= fits
        if fits < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        return fits


class _Slow(_Behind):
    def __init__(self, file: BinaryIO, path: Path, way: Link):
        super().__init__(file, path)
        self.way = way

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        time.sleep(max(0.0, self.way.book(time.monotonic(), len(data)) - time.monotonic()))
        return self.file.write(data)
