"""The zygote: a process that has imported torch, has run none of it, and forks ranks in milliseconds.

A clean `import torch` can be forked safely; a process that has run one multi-threaded operation cannot (its children
hang at their first). So this process imports and waits, and never computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import shutil
import signal
import sys
import traceback
from multiprocessing.connection import Client, Connection

from minidist.ranks import worker

# What ranks would otherwise import one by one, at seconds each: torch.optim pulls in torch._dynamo at its first step,
# functional collectives pull in DTensor at their first call.
TORCH_PARTS = (
    "torch",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch.distributed.nn.functional",
    "torch.utils.checkpoint",
    "torch._dynamo",
)
OUR_PARTS = (
    "minidist.core.mesh",
    "minidist.core.comm",
    "minidist.core.comm_grad",
    "minidist.core.slices",
    "minidist.core.random",
)
PR_SET_PDEATHSIG = 1


class Zygote:
    """Forks ranks when told, reports the ends of their processes, and takes them along when its parent is gone."""

    def __init__(self, address: str, key: bytes, folder: str):
        self.address, self.key, self.folder = address, key, folder
        self.parent: Connection = Client(address, family="AF_UNIX", authkey=key)
        self.children: set[int] = set()

    def serve(self) -> None:
        """Wait for the parent's words and for children's deaths, until the parent closes the connection."""
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe hears of it
        selector = selectors.DefaultSelector()
        selector.register(self.parent, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        try:
            self.parent.send(("zygote", os.getpid()))
            while True:
                for found, _ in selector.select():
                    if found.fileobj == woken:  # some child has ended
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, 4096)
                        self._reap()
                    else:
                        self._obey(*self.parent.recv(), close=(woken, waker, selector))
        except (EOFError, OSError):
            self._kill(self.children, signal.SIGKILL)
            for pid in self.children:
                os.waitpid(pid, 0)  # whoever sees this process gone shall see them gone
            shutil.rmtree(self.folder, ignore_errors=True)  # a parent that was killed could not

    def _obey(self, what: str, *rest, close: tuple) -> None:
        if what == "fork":
            modules, logs = rest
            for name in modules:
                with contextlib.suppress(Exception):  # a module that does not import tells the rank that needs it
                    importlib.import_module(name)
            self.parent.send(("forked", {ticket: self._fork(ticket, log, close) for ticket, log in logs.items()}))
        elif what == "kill":
            self._kill(*rest)

    def _kill(self, pids, number: int) -> None:
        """Signal those that are still our children: a number of a process that has ended may be somebody else's by now."""
        for pid in self.children.intersection(pids):
            os.kill(pid, number)

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.children.discard(pid)
            self.parent.send(("ended", pid, os.waitstatus_to_exitcode(status)))

    def _fork(self, ticket: str, log: str, close: tuple) -> int:
        """Fork one rank; returns its process id here and never in the rank."""
        me = os.getpid()
        pid = os.fork()
        if pid:
            self.children.add(pid)
            return pid
        code = 1
        try:
            die_with_parent(me)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            woken, waker, selector = close
            selector.close()
            self.parent.close()
            os.close(woken)
            os.close(waker)
            log_to(log)
            worker.main(self.address, self.key, ticket)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            with contextlib.suppress(Exception):
                sys.__stderr__.flush()
            os._exit(code)  # past everything that belongs to the zygote


def die_with_parent(parent: int) -> None:
    """Linux: the kernel ends this process when its parent ends. Elsewhere the lifeline of worker.py does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def log_to(path: str) -> None:
    """Send what is written below Python's streams to a file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def main(address: str, folder: str) -> None:
    """Call the parent, import, then serve."""
    try:
        zygote = Zygote(address, bytes.fromhex(os.environ.pop(worker.KEY)), folder)
    except OSError:  # the parent did not live to hear the call
        shutil.rmtree(folder, ignore_errors=True)
        return
    for name in (*TORCH_PARTS, *OUR_PARTS):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the children's collector then leaves the shared pages alone
    zygote.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
