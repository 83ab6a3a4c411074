"""No process is left, however the parent or the zygote goes; Ctrl-C frees at once; ranks can be spawned as well as forked."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks.processes import alive, gone

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.ranks import session

START = """
import os, time, torch
from minidist import ranks
from minidist.core import comm
from minidist.ranks import session

{setup}
def pid(mesh):
    comm.barrier(mesh.world)
    return os.getpid()

def stuck(mesh):
    comm.barrier(mesh.world)
    if mesh.rank:
        comm.barrier(mesh.world)
    time.sleep(1000)

launcher = session.current().warm_up()
pids = ranks.run(pid, 2)
print(*pids, *([launcher.process.pid] if hasattr(launcher, "process") else []), flush=True)
"""
SPAWN = "session._session = session.Session(start='spawn')\n"


def read_pids(process) -> list[int]:
    return [int(word) for word in process.stdout.readline().split()]


def leftovers(environ, seconds: float = 5.0) -> list[str]:
    """Files left in the temporary folder; removing them may take the last process a moment."""
    end = time.monotonic() + seconds
    while (
        found := [name for name in os.listdir(environ["TMPDIR"]) if name.startswith("minidist-")]
    ) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def test_nothing_is_left_when_the_parent_is_killed(script, environ):
    process = script(START.format(setup="") + "ranks.run(stuck, 2)")
    pids = read_pids(process)
    time.sleep(0.3)
    assert len(pids) == 3 and not gone(pids, 0.1) and leftovers(environ, 0.0)
    process.send_signal(signal.SIGKILL)
    assert gone(pids) and leftovers(environ) == []


def test_nothing_is_left_when_the_parent_is_killed_while_its_zygote_imports(script, environ):
    process = script(
        "import os, time\nfrom minidist.ranks import session\nprint(session.current().warm_up().process.pid, flush=True)\n"
        "time.sleep(100)"
    )
    pids = read_pids(process)
    process.send_signal(signal.SIGKILL)
    assert gone(pids, 20) and leftovers(environ) == []


def test_ctrl_c_frees_at_once_and_an_exit_leaves_nothing(script, environ):
    process = script(
        START.format(setup="")
        + "try:\n    ranks.run(stuck, 2)\nexcept KeyboardInterrupt:\n    print('freed', flush=True)\n"
        + "print(*ranks.run(pid, 2), flush=True)\nranks.run(stuck, 2)\n"
    )
    pids = read_pids(process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.stdout.readline() == "freed\n"
    assert time.monotonic() - began < 1.5
    again = read_pids(process)
    assert not set(again) & set(pids[:2]) and gone(pids[:2], 0.5)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) != 0
    assert "KeyboardInterrupt" in process.stdout.read()
    assert alive([*pids, *again]) == [] and leftovers(environ) == []


def test_the_zygote_computes_nothing():
    """One thread: a process that has run a multi-threaded operation must not be forked."""
    ranks.run(lambda mesh: None, 2)
    assert len(os.listdir(f"/proc/{session.current().launcher.process.pid}/task")) == 1


def test_a_zygote_killed_during_a_run_is_an_error_at_once():
    def kills_it(mesh):
        comm.barrier(mesh.world)
        if mesh.rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)

    pids = ranks.run(lambda mesh: os.getpid(), 2)
    folder = session.current().launcher.door.folder
    began = time.monotonic()
    with pytest.raises(ranks.RankDied):
        ranks.run(kills_it, 2)
    assert time.monotonic() - began < 5 and gone(pids)
    assert ranks.run(lambda mesh: mesh.rank, 2) == [0, 1] and not os.path.exists(folder)


def test_stop_leaves_nothing_and_the_next_run_starts_anew():
    pids = [*ranks.run(lambda mesh: os.getpid(), 2), *ranks.run(lambda mesh: os.getpid(), 3)]
    launcher = session.current().launcher
    ranks.stop()
    assert alive([*pids, launcher.process.pid]) == [] and not os.path.exists(launcher.door.folder)
    assert ranks.status() == []


def test_spawned_ranks_do_the_same(script, environ):
    process = script(
        START.format(setup=SPAWN)
        + """
def fails(mesh):
    if mesh.rank:
        raise ValueError("boom")

def dies(mesh):
    if mesh.rank:
        os._exit(7)

for program in fails, dies:
    try:
        ranks.run(program, 2)
    except ranks.RanksError as error:
        print(str(error).splitlines()[0], flush=True)
print(*ranks.run(pid, 2), flush=True)
ranks.run(stuck, 2)
"""
    )
    pids = read_pids(process)
    assert process.stdout.readline() == "rank 1 raised ValueError: boom\n"
    assert process.stdout.readline() == "rank 1 died: its process ended with exit code 7\n"
    assert gone(pids)
    pids = read_pids(process)
    time.sleep(0.3)
    assert len(pids) == 2 and not gone(pids, 0.1)
    process.send_signal(signal.SIGKILL)
    assert gone(pids) and leftovers(environ) == []


def held(mesh):
    """Threads and open files of this rank, once its groups have talked."""
    for name in ("world", "dp", "tp"):
        comm.all_reduce(torch.ones(2), mesh.group(name))
    mesh.twin("dp")
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="Linux tells threads and files of a process there")
def test_layouts_that_were_used_long_ago_hold_nothing():
    """Each gloo group has three threads and some files: a pool that has run a hundred layouts must not keep those of all."""
    layouts = [Layout(dp=2, bucket=size) for size in range(1, 25)] + [Layout(tp=2), Layout(dp=2)]
    found = [ranks.run(held, 2, layout=layout) for layout in layouts]
    assert [max(rank[i] for rank in found[-1]) <= 2 * max(rank[i] for rank in found[3]) for i in (0, 1)] == [True, True]
    assert ranks.run(held, 2, layout=layouts[0]), "one that was closed is made anew"
