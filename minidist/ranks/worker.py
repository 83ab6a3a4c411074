"""One rank: a process that joins the others, keeps a namespace, and runs what its parent sends until the parent is gone."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Client, Connection
from types import ModuleType
from typing import Any

from minidist.ranks import wire
from minidist.ranks.cell import compile_cell, describe, remember, run_cell
from minidist.ranks.streams import LogTail, RankStream

KEY = "MINIDIST_RANKS_KEY"  # environment variable with the socket's password, in hex
inside = False  # whether this process is a rank
MESHES_KEPT = 4  # layouts whose groups stay open
SLACK_S = 30.0  # a rank's own deadline comes this much later than its parent's, whose report knows all ranks


def main(address: str, key: bytes, ticket: str) -> None:
    """Connect to the parent, take the orders for this rank, and serve. Returns only if the ranks cannot join."""
    global inside
    inside = True
    connection = Client(address, family="AF_UNIX", authkey=key)
    connection.send((ticket, os.getpid()))
    Rank(connection, connection.recv()).serve()


class Rank:
    """The state of a rank: its connection, its meshes (one a layout) and its namespace, the module `__main__`."""

    def __init__(self, connection: Connection, orders: dict[str, Any]):
        self.connection, self.orders = connection, orders
        self.rank, self.world_size = orders["rank"], orders["world_size"]
        self.launcher = os.getppid()
        self.job = 0  # number of the run in progress
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.meshes: dict[Any, Any] = {}
        self.traffic: dict[tuple, int] = {}  # of the last run
        self.main = sys.modules["__main__"] = ModuleType("__main__")
        self.log = LogTail(2)
        self.out, self.err = (RankStream(name, fd, self._say) for name, fd in (("stdout", 1), ("stderr", 2)))
        sys.stdout, sys.stderr = self.out, self.err

    def serve(self) -> None:
        """Do what arrives, one message at a time. SIGINT frees the rank from a run and is nothing between runs."""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._settle()
        except Exception as error:
            self._send("error", describe(error), {})
            return
        self._send("result", None, {})
        while True:
            try:
                what, *rest = self.inbox.get()
                getattr(self, f"_{what}")(*rest)
            except KeyboardInterrupt:
                continue

    def _read(self) -> None:
        """The lifeline: the socket closes when the parent is gone, however it went, and then this process ends too."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGINT})
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (OSError, EOFError):
            if folder := self.orders["folder"]:  # spawned: nobody else is there to clean up
                time.sleep(0.1)  # a killed parent's connections close before it is gone
                if os.getppid() != self.launcher:
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)  # whatever ended this thread: a rank that nobody can reach must not stay

    def _settle(self) -> None:
        """Set up the process as ordered and join the process group."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background would have us ignore it
        orders = self.orders
        os.environ.clear()
        os.environ.update(orders["environ"])
        os.environ["GLOO_SOCKET_IFNAME"] = orders["interface"]
        self.stacks = open(orders["stacks"], "w")  # noqa: SIM115  # faulthandler needs it for good
        faulthandler.enable(2, all_threads=False)  # a segmentation fault says where, as this rank's last words
        faulthandler.register(signal.SIGUSR1, self.stacks, all_threads=False)
        self._go_to(orders["cwd"], orders["path"])

        import torch

        from minidist.core import device, mesh
        from minidist.core.board import Board

        torch.set_num_threads(orders["threads"])
        self.board = Board.open(orders["board"])
        if self.world_size > 1:
            mesh.connect(self.rank, self.world_size, f"file://{orders['rendezvous']}", timeout_s=24 * 3600.0)
        self.device = device.for_rank(self.rank, self.world_size)
        self.main.__dict__.update(rank=self.rank, world_size=self.world_size, torch=torch)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # forked ranks would all draw the same numbers

    def _go_to(self, cwd: str, path: list[str]) -> None:
        """Work where the parent works: relative paths and local modules are then the same."""
        with contextlib.suppress(OSError):  # the folder may have been removed meanwhile
            os.chdir(cwd)
        sys.path[:] = path

    # What the parent can ask for ------------------------------------------------------------------------------------

    def _cell(self, job: int, context: dict[str, Any], source: str, filename: str) -> None:
        """Run a cell in the kept namespace."""

        def body(mesh):
            names = self.main.__dict__
            names.update(mesh=mesh, world=mesh.world, tape=mesh.tape, comm=_comm())
            if text := run_cell(compile_cell(source, filename), names):
                self.out.write(text + "\n")

        self._run(job, context, body)

    def _call(self, job: int, context: dict[str, Any], payload: bytes) -> None:
        """Call a function as fn(mesh, *args, **kwargs)."""

        def body(mesh):
            fn, args, kwargs = wire.loads(payload)
            delay, mesh.delay = mesh.delay, None  # a delay line that a cell has set is for cells
            try:
                return wire.dumps(fn(mesh, *args, **kwargs))
            finally:
                mesh.delay = delay

        self._run(job, context, body)

    def _push(self, payload: bytes) -> None:
        self.main.__dict__.update(wire.loads(payload))

    def _pull(self, job: int, context: dict[str, Any], name: str) -> None:
        """Send a variable's value, packed; None if there is no such variable."""
        self.job = job
        try:
            known = name in self.main.__dict__
            self._send("result", wire.dumps(self.main.__dict__[name]) if known else None, self.traffic)
        except Exception as error:
            self._send("error", {**describe(error), "time": time.monotonic()}, self.traffic)

    def _run(self, job: int, context: dict[str, Any], body) -> None:
        """Run `body(mesh)` and report how it ended: its result, or what it raised."""
        self.job, mesh = job, None
        self.board.reset(self.rank)
        try:
            self._go_to(context["cwd"], context["path"])
            for filename, source in context["sources"].items():
                remember(filename, source)
            if context["renumber"]:
                for made in self.meshes.values():
                    made.renumber()
            mesh = self._mesh(context)
            outcome = "result", body(mesh)
        except BaseException as error:  # SystemExit and KeyboardInterrupt end the run, not the rank
            outcome = "error", {**describe(error), "time": time.monotonic()}
        self.board.leave(self.rank, "idle")
        for stream in (self.out, self.err):
            stream.rest()
        if below := self.log.new():
            self._say("stderr", below if below.endswith("\n") else below + "\n")
        self.traffic = traffic(mesh.tape) if mesh else {}
        self._send(*outcome, self.traffic)

    def _mesh(self, context: dict[str, Any]):
        """The mesh of a layout, made once and kept while it is among the last few that were asked for.

        All ranks get the same orders in the same order, so they make and close the same ones.
        """
        from minidist.core.mesh import Mesh

        layout, wait_s = context["layout"], context["timeout_s"] + SLACK_S
        mesh = self.meshes.pop(layout, None)
        while mesh is None and len(self.meshes) >= MESHES_KEPT:
            self.meshes.pop(next(iter(self.meshes))).close()
        self.meshes[layout] = mesh = mesh or Mesh(layout, self.rank, device=self.device, board=self.board)
        mesh.wire.check, mesh.wire.timeout_s = context["check"], wait_s
        mesh.tape.clear()
        return mesh

    # What the parent hears ------------------------------------------------------------------------------------------

    def _say(self, stream: str, text: str) -> None:
        self._send("out", stream, text)

    def _send(self, what: str, *rest: Any) -> None:
        """Send one message. SIGINT waits meanwhile: half a message would cost the parent the connection."""
        mine = threading.current_thread() is threading.main_thread()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if mine else None
        try:
            with self.sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.connection.send((what, self.job, *rest))
        finally:
            if mine:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _comm() -> ModuleType:
    from minidist.core import comm

    return comm


def traffic(tape) -> dict[tuple, int]:
    """Operations launched, by what has to match on the other ranks: (members) of a collective, (from, to) of a message."""
    counts: dict[tuple, int] = {}
    for line in tape.lines:
        me = tape.rank
        key = {"send": ("sent", me, line.peer), "recv": ("received", line.peer, me)}.get(line.op, ("group", *line.ranks))
        counts[key] = counts.get(key, 0) + 1
    return counts


if __name__ == "__main__":
    password = bytes.fromhex(os.environ.pop(KEY))
    main(sys.argv[1], password, sys.argv[2])
