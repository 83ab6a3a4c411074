"""The sandbox: the fresh process in which a submission runs. Takes a job, writes results as JSON, judges nothing.

Today's walls: an empty folder, a process group that is ended afterwards, values reduced to plain JSON before they leave.
It keeps honest mistakes from counting as answers; it is no prison. For exams use a container.

`serve` is the nursery's loop: it imports what every attempt needs, computes nothing, and forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from minidist.ranks import host, launch, zygote


def serve() -> None:
    """Read jobs, one a line, until stdin closes. Say the sandbox's process id when it starts, its exit status when it ends."""
    forks = host.start_method() == "fork"
    if forks:
        for name in (*zygote.TORCH_PARTS, *zygote.OUR_PARTS):
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        pid = os.fork() if forks else 0
        if pid == 0:
            if not forks:  # this process is the sandbox, and the next job gets another
                print(os.getpid(), flush=True)
            _become(job, forks)
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


def _become(job: dict, forked: bool) -> None:
    """Turn this process into the sandbox of one job, and never return."""
    code = 1
    try:
        if forked:
            os.setsid()
        os.chdir(job["folder"])
        zygote.log_to(job["output"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run(job, forked)
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


def run(job: dict, forked: bool) -> None:
    """Run the job's cells in order, then its cases until one ends badly, and write what came of it."""
    from minidist import ranks
    from minidist.ranks import session

    if forked:
        session.current().launcher = ForkedZygote(launch.Door())
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    note = run_cells(job["cells"], namespace)
    function = namespace.get(job["function"])
    cases = []
    if function is None:
        note = note or f"{job['function']} is not there after running all cells in order from a fresh start."
    elif not callable(function):
        note, function = f"{job['function']} is not a function but {function!r:.60}", None
    for case in job["cases"] if function is not None else []:
        cases.append(run_case(job, case, function))
        if cases[-1]["problem"]:
            break
    result = Path(job["result"])
    result.with_suffix(".part").write_text(json.dumps({"cases": cases, "note": note}))
    result.with_suffix(".part").rename(result)
    ranks.stop()


def run_cells(cells: list, namespace: dict) -> str:
    """Execute (id, source) pairs in order. An error ends its cell only; the first one is returned in words."""
    from minidist.ranks.cell import remember

    note = ""
    for number, (name, source) in enumerate(cells, 1):
        if source.lstrip().startswith("%%"):
            continue  # cell magics are demonstrations
        name = name or f"number {number}"
        remember(f"<cell {name}>", source)  # so that tracebacks show its lines, on the ranks too
        try:
            exec(compile(without_magics(source), f"<cell {name}>", "exec"), namespace)
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f" at line {where.lineno}" if where.filename.startswith("<cell") else ""
            text = f"Cell {name}{at}, run from a fresh start, raised {type(error).__name__}: {error}"
            note = note or text
    return note


def without_magics(source: str) -> str:
    """The source with line magics, shell lines and help lines turned into comments."""
    return re.sub(r"^(\s*)([%!?].*|.*[^\s#?]\?{1,2})$", r"\1pass", source, flags=re.MULTILINE)


def run_case(job: dict, case: dict, function: object) -> dict:
    """One call on `world_size` ranks: encoded values and tapes by rank, or the problem."""
    from minidist import ranks

    problem = {"kind": "error", "rank": None, "suspects": [], "text": ""}
    try:
        work = (function, job.get("drive"), case["inputs"], job["task"])
        got = ranks.run(call, case["world_size"], *work, timeout_s=job["limit_s"])
    except ranks.RankHang as error:
        problem |= {"kind": "hang", "text": str(error), "suspects": error.ranks}
    except ranks.RankDied as error:
        problem |= {"kind": "died", "rank": error.rank, "text": str(error)}
    except ranks.RankError as error:
        kind = "mismatch" if error.kind == "CommMismatch" else "error"
        problem |= {"kind": kind, "rank": error.rank, "text": error.traceback}
    except Exception as error:  # not a function, or one that cannot travel to the ranks
        problem |= {"text": f"{type(error).__name__}: {error}"}
    else:
        if any(item.get("stub") for item in got):
            return {"values": [], "tapes": [], "problem": problem | {"kind": "stub"}}
        return {name + "s": [item[name] for item in got] for name in ("value", "tape", "input")} | {"problem": None}
    return {"values": [], "tapes": [], "problem": problem}


def call(mesh, function, drive: str | None, inputs: list[list], task: str) -> dict:
    """On a rank: call the submission (or have its task's `drive` use it), return what it said and what it sent."""
    start, mine = len(mesh.tape.lines), [decode(value) for value in inputs[mesh.rank]]
    try:
        if drive:
            module, _, name = drive.partition(":")
            value = getattr(importlib.import_module(module), name)(mesh, function, *mine)
        else:
            value = function(mesh, *mine)
    except NotImplementedError as error:
        if error.args == (task,):
            return {"stub": True}
        raise
    tape = [asdict(line) for line in mesh.tape.lines[start:]]
    return {"value": encode(value), "tape": tape, "input": [encode(value) for value in mine]}


def decode(value: object) -> object:
    """An input as the submission gets it: {"tensor": ..., "dtype": ...} becomes a tensor, inside lists and dicts too.

    A tensor without elements says its "shape" as well.
    """
    import torch

    if isinstance(value, dict) and {"tensor", "dtype"} <= set(value):
        made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
        return made.view(value.get("shape", made.shape))
    if isinstance(value, dict):
        return {name: decode(item) for name, item in value.items()}
    return [decode(item) for item in value] if isinstance(value, list) else value


def encode(value: object) -> object:
    """A value as JSON. Plain scalars and lists stand for themselves; all else becomes a dict that names its kind.

    Exact types only: an object of a subclass (one that equals everything, say) crosses as its name.
    """
    import torch

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if type(value) is torch.Tensor:
        flat = value.detach().cpu()
        return {"tensor": flat.tolist(), "dtype": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape)}
    return {"object": type(value).__name__}


if __name__ == "__main__":
    serve()
