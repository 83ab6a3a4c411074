"""How the parent gets rank processes: from a zygote by fork, or one by one by spawn. Both connect back through one door.

Everything lives in one private folder: the socket, rendezvous files, boards, logs. The socket is the lifeline: when the
parent is gone, by exit or by kill -9, it closes, and zygote and ranks end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import minidist
from minidist.ranks.worker import KEY

OURS_IN_A_DUMP = ("/minidist/ranks/", "<frozen runpy>", "Extension modules: ")  # of a crash, written by faulthandler
START_S = 120.0  # for the zygote's imports or a spawned rank's, on a machine busy with other things


class Door:
    """The parent's listening socket in its private folder (mode 700), and the password that callers must know."""

    connection = Connection  # the class of what callers come by

    def __init__(self):
        roomy = len(tempfile.gettempdir()) < 60  # a socket's path has at most about 100 bytes
        self.folder = tempfile.mkdtemp(prefix="minidist-", dir=None if roomy else "/tmp")
        self.address = os.path.join(self.folder, "door")
        self.key = secrets.token_bytes(32)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.address)
        self.socket.listen(128)

    def accept(self, wait_s: float) -> tuple[Connection, tuple] | None:
        """The next caller and the first thing it says, or None if nobody comes in time."""
        if not select.select([self.socket], [], [], wait_s)[0]:
            return None
        connection = self.connection(self.socket.accept()[0].detach())
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            return connection, connection.recv()
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return None

    def path(self, name: str) -> str:
        """A file in the private folder."""
        return os.path.join(self.folder, name)

    def close(self) -> None:
        """Let nobody in any more and remove the folder."""
        self.socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Launcher:
    """What both ways have in common. `ended` maps a process id to its exit code, negative for a signal."""

    leaves: str | None = None  # the folder that ranks have to remove should this process be killed

    def __init__(self, door: Door):
        self.door, self.ended = door, {}
        self.pids: dict[str, int] = {}  # of the ticket's process
        self.early: dict[str, tuple[Connection, int]] = {}  # ranks that have called and were not asked for yet

    def rank(self, ticket: str, deadline: float) -> tuple[Connection, int]:
        """The connection and process id of the rank with this ticket, once it has called."""
        while ticket not in self.early:
            caller = self.door.accept(0.1)
            if caller:
                connection, (name, pid) = caller
                self.early[name] = connection, pid
            elif time.monotonic() > deadline:
                raise RuntimeError(f"no rank called within {START_S:.0f} s: {self.last_words(ticket)}")
            else:
                self.check()
                if self.pids.get(ticket) in self.ended:
                    raise RuntimeError(f"a rank ended before it could be used: {self.last_words(ticket)}")
        return self.early.pop(ticket)

    def check(self) -> None:
        """Learn which processes have ended. Raises RuntimeError if none can be started any more."""

    def last_words(self, ticket: str) -> str:
        """The end of a rank's log; "" if it wrote nothing below Python."""
        return tail(self.door.path(log_name(ticket)), skip=OURS_IN_A_DUMP)

    def abandon(self, tickets: list[str]) -> None:
        """End ranks whose start was given up, as soon as they are known."""
        deadline = time.monotonic() + 1.0
        with contextlib.suppress(RuntimeError):
            while not self.pids.keys() >= set(tickets) and time.monotonic() < deadline:
                self.check()
                time.sleep(0.005)
        self.signal([self.pids[ticket] for ticket in tickets if ticket in self.pids], signal.SIGKILL)

    def exit_code(self, pid: int, wait_s: float = 1.0) -> int | None:
        """Exit code of a process whose connection has closed; None if its end is not heard of in time."""
        deadline = time.monotonic() + wait_s
        while pid not in self.ended and time.monotonic() < deadline:
            try:
                self.check()
            except RuntimeError:
                break
            time.sleep(0.002)
        return self.ended.get(pid)


class ZygoteLauncher(Launcher):
    """Ranks forked by a zygote, in milliseconds. The zygote's imports run while the parent goes on."""

    def __init__(self, door: Door):
        super().__init__(door)
        self.process = start_python("minidist.ranks.zygote", [door.address, door.folder], door, "zygote.log")
        self.connection: Connection | None = None

    def start(self, tickets: list[str], modules: list[str]) -> None:
        """Ask for one rank a ticket, which has imported `modules`."""
        try:
            self._meet(time.monotonic() + START_S)
        except BaseException:
            self.process.kill()  # an interrupt may have come in the middle of the greeting
            self.process.wait()
            raise
        self._tell("fork", modules, {ticket: self.door.path(log_name(ticket)) for ticket in tickets})

    def _meet(self, deadline: float) -> None:
        """Wait until the zygote has called, which it does once it has imported torch."""
        while self.connection is None:
            caller = self.door.accept(0.1)
            if caller:
                self.connection = caller[0]
            elif self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ranks cannot start: {tail(self.door.path('zygote.log')) or 'their log is empty'}")

    def signal(self, pids: list[int], number: int) -> None:
        """Send a signal to ranks that still run."""
        with contextlib.suppress(RuntimeError):  # without the zygote there are no ranks
            self._tell("kill", pids, number)

    def _tell(self, *message) -> None:
        try:
            self.connection.send(message)
        except (OSError, AttributeError):
            raise RuntimeError("the process that forks ranks is gone") from None

    def check(self) -> None:
        """Read the zygote's news."""
        try:
            while self.connection is not None and self.connection.poll():
                what, *rest = self.connection.recv()
                if what == "ended":
                    self.ended[rest[0]] = rest[1]
                elif what == "forked":
                    self.pids.update(rest[0])
        except (OSError, EOFError):
            raise RuntimeError("the process that forks ranks is gone") from None

    @property
    def alive(self) -> bool:
        """Whether it can start ranks."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the zygote, which takes its ranks along."""
        if self.connection:
            self.connection.close()
        else:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()


class SpawnLauncher(Launcher):
    """Ranks that import torch themselves, for hosts where fork is unsafe: seconds, not milliseconds."""

    alive = True

    def __init__(self, door: Door):
        super().__init__(door)
        self.leaves = door.folder
        self.processes: dict[int, subprocess.Popen] = {}

    def start(self, tickets: list[str], modules: list[str]) -> None:
        """Start one process a ticket; what it needs of `modules` it imports when it does."""
        for ticket in tickets:
            process = start_python("minidist.ranks.worker", [self.door.address, ticket], self.door, log_name(ticket))
            self.processes[process.pid], self.pids[ticket] = process, process.pid

    def signal(self, pids: list[int], number: int) -> None:
        """Send a signal to ranks that still run."""
        for pid in pids:
            self.processes[pid].send_signal(number)

    def check(self) -> None:
        """Collect exit codes."""
        for pid, process in self.processes.items():
            if process.poll() is not None:
                self.ended[pid] = process.returncode

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def start_python(module: str, arguments: list[str], door: Door, log: str) -> subprocess.Popen:
    """Start `python -m module` in a session of its own, with none of our streams.

    With a Jupyter kernel's pipes inherited, the kernel's graceful shutdown took 2.6 s in place of 0.2 s.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(minidist.__file__)))
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    with open(door.path(log), "a+") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],  # -P: a learner's file called random.py stays out
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, KEY: door.key.hex(), "PYTHONPATH": path},
        )


def log_name(ticket: str) -> str:
    """File for what a rank writes below Python's streams."""
    return f"log-{ticket}"


def tail(path: str, lines: int = 20, skip: tuple[str, ...] = ()) -> str:
    """The last lines of a log, without blank ones and those that contain one of `skip`."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        text = [line.rstrip() for line in file if line.strip() and not any(part in line for part in skip)]
        return "\n".join(text[-lines:])
    return ""
