"""The sandbox: the process that runs a job on fresh ranks and writes down what came back. It judges nothing.

No line of a submission runs here: ranks run it (`course.graded`), each is told its own inputs only, and what they send is
read as data. The walls are an empty folder, a process group that is ended afterwards, and the guard on each rank. They keep
mistakes and the plain ways of cheating from counting as answers (`tests/banks/threats`); they are no prison. Code that
rewrites its own process from inside, or native code, can lie about what its rank sent. For exams use a container.

`serve` is the nursery's loop: it imports what every attempt needs, computes nothing, and forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

from minidist import ranks
from minidist.course import graded
from minidist.course.crossing import PlainConnection, plain
from minidist.ranks import host, launch, session, wire, zygote
from minidist.ranks.pool import Pool

LATE_S = 8.0  # past the limit of a call: its hang report has been written by then
COURSE_PARTS = ("minidist.course", "minidist.course.recorder", "minidist.course.guard")


def serve() -> None:
    """Read jobs, one a line, until stdin closes. Say the sandbox's process id when it starts, its exit status when it ends."""
    forks = host.start_method() == "fork"
    if forks:
        for name in (*zygote.TORCH_PARTS, *zygote.OUR_PARTS, *COURSE_PARTS):
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        places = json.loads(line)
        pid = os.fork() if forks else 0
        if pid == 0:
            if not forks:  # this process is the sandbox, and the next job gets another
                print(os.getpid(), flush=True)
            _become(places, forks)
        print(pid, flush=True)
        status = _watch(pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        print(status, flush=True)


def _watch(pid: int) -> int:
    """Exit status of the sandbox, negative for a signal. Should the judge be gone meanwhile, end it all."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if select.select([sys.stdin], [], [], 0.01)[0]:  # nobody writes before we have answered: it is closed
            os.killpg(pid, signal.SIGKILL)
            os._exit(1)


def _become(places: dict, forked: bool) -> None:
    """Turn this process into the sandbox of one job, and never return."""
    code = 1
    try:
        if forked:
            os.setsid()
        os.chdir(places["folder"])
        zygote.log_to(places["output"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        door, pools = PlainDoor(), session.current()
        pools.launcher = ForkedZygote(door) if forked else launch.SpawnLauncher(door)
        job = json.loads(Path(places["job"]).read_bytes())  # now that the zygote is forked: ranks inherit none of it
        os.remove(places["job"])
        answer = json.dumps(run(job, pools))
        ranks.stop()  # so that nobody is left who could write in our place
        result = Path(job["result"])
        result.with_suffix(".part").write_text(answer)
        result.with_suffix(".part").rename(result)
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with contextlib.suppress(Exception):
            sys.__stdout__.flush()
            sys.__stderr__.flush()
        os._exit(code)


class ForkedZygote(launch.ZygoteLauncher):
    """The zygote of the sandbox's ranks: forked while this process has run nothing, so that it need not import again."""

    def __init__(self, door: launch.Door):
        launch.Launcher.__init__(self, door)
        self.connection = None
        me, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                os.setsid()
                zygote.die_with_parent(me)
                zygote.log_to(door.path("zygote.log"))
                door.socket.close()
                zygote.Zygote(door.address, door.key, door.folder).serve()
            finally:
                os._exit(0)
        self.process = Forked(pid)


class Forked:
    """A forked process with what a launcher asks of a Popen."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("zygote", timeout)
            time.sleep(0.005)
        return self.returncode

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class PlainDoor(launch.Door):
    """A door for ranks that run a stranger's code: what they say is read as data."""

    connection = PlainConnection


class Ledger:
    """The pipe in which the recorder of every rank writes what it launches, read as it comes."""

    def __init__(self, path: str):
        self.path = path
        os.mkfifo(path, 0o600)
        self._reading, self._lock, self._data = os.open(path, os.O_RDONLY | os.O_NONBLOCK), threading.Lock(), b""
        self._writing = os.open(path, os.O_WRONLY)  # so that the pipe stays open between ranks
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            select.select([self._reading], [], [])
            self._drain()
            time.sleep(0.01)

    def _drain(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            while data := os.read(self._reading, 65536):
                self._data += data

    def take(self, ranks: int) -> list[list[dict]]:
        """By rank, what was written since the last time."""
        self._drain()
        with self._lock:
            data, self._data = self._data, b""
        found: list[list[dict]] = [[] for _ in range(ranks)]
        for line in data.splitlines():
            record = json.loads(line)
            found[record.pop("rank")].append(record)
        return found


def run(job: dict, pools: session.Session) -> dict:
    """Run the job's cases until one ends badly: {"cases": [...], "note": why there are fewer than there should be}."""
    ledger, ready, cases = Ledger(pools.launcher.door.path("ledger")), {}, []
    for case in job["cases"]:
        try:
            pool = pools.pool(case["world_size"])
            pids = [member.pid for member in pool.members]
            if ready.get(pool) != pids:  # new ranks: they run the notebook's cells first
                note = _each(pool, graded.prepare, [_order(job, ledger)] * pool.ranks, job["start_s"])[0]
                if note:
                    return {"cases": cases, "note": str(note)}
                ready[pool] = pids
        except ranks.RanksError as error:
            why = "ran past their time" if isinstance(error, ranks.RankHang) else f"ended early: {error}"
            return {"cases": cases, "note": f"The notebook's cells {why}"}
        cases.append(run_case(job, case, pool, ledger))
        if cases[-1]["problem"]:
            break
    return {"cases": cases, "note": ""}


def _order(job: dict, ledger: Ledger) -> dict:
    names = ("cells", "function", "task", "drive", "refused", "allowed", "threads")
    return {name: job[name] for name in names} | {"ledger": ledger.path}


def _each(pool: Pool, function: object, orders: list[dict], limit_s: float) -> list:
    """Call a function of `graded` with its own order on each rank; what came back, as plain data."""
    payloads = [wire.dumps((function, (order,), {})) for order in orders]
    late = threading.Timer(limit_s + LATE_S, pool.launcher.signal, [[member.pid for member in pool.members], signal.SIGKILL])
    late.daemon = True
    late.start()  # a rank that sends half a message would have us wait for the rest
    try:
        packed = pool.call_each(payloads, session.options(None, pool.ranks, limit_s, True))
        return [json.loads(plain(answer)) for answer in packed]
    finally:
        late.cancel()


def _gathered(got: list[dict], ledger: Ledger, problem: dict) -> dict:
    """What all ranks sent, field by field."""
    if any(item.get("stub") for item in got):
        return {"values": [], "tapes": [], "problem": problem | {"kind": "stub"}}
    fields = {name + "s": [item[name] for item in got] for name in ("value", "tape", "input")}
    return fields | {"held": [int(item["held"]) for item in got], "ledgers": ledger.take(len(got)), "problem": None}


def run_case(job: dict, case: dict, pool: Pool, ledger: Ledger) -> dict:
    """One call on `world_size` ranks: encoded values, tapes, ledgers by rank, or the problem."""
    problem = {"kind": "error", "rank": None, "suspects": [], "text": ""}
    names = {"function": job["function"], "task": job["task"], "drive": job["drive"]}
    orders = [{**names, "inputs": inputs} for inputs in case["inputs"]]
    ledger.take(pool.ranks)
    try:
        got = _gathered(_each(pool, graded.call, orders, case["limit_s"]), ledger, problem)
    except ranks.RankHang as error:
        problem |= {"kind": "hang", "text": str(error), "suspects": error.ranks}
    except ranks.RankDied as error:
        problem |= {"kind": "died", "rank": error.rank, "text": str(error)}
    except ranks.RankError as error:
        kind = "mismatch" if error.kind == "CommMismatch" else "error"
        problem |= {"kind": kind, "rank": error.rank, "text": error.traceback}
    except Exception as error:  # what a rank sent cannot be read
        problem |= {"kind": "died", "text": f"A rank sent what no rank of ours sends: {error}"}
    else:
        return got
    return {"values": [], "tapes": [], "problem": problem}


if __name__ == "__main__":
    serve()
