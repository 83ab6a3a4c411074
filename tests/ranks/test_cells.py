"""%%ranks in a real Jupyter kernel: output, values, errors, planted failures, the stop button, restart, kill -9."""

import os
import queue
import signal
import time

import pytest
from jupyter_client.manager import KernelManager
from ranks.processes import ROOT, gone


class Notebook:
    """A kernel, and what a cell run in it shows."""

    def __init__(self, environ):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environ)
        self.connect()

    def connect(self):
        """Talk to the kernel, which may be a new one."""
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext minidist.ranks\nfrom minidist import ranks")

    def start(self, source: str) -> str:
        return self.client.execute(source)

    def finish(self, message: str, seconds: float = 60) -> tuple[str, str, str]:
        """stdout, stderr and the error shown of an execution, the error as a reader sees it."""
        out, err, error, end = "", "", "", time.monotonic() + seconds
        while True:
            reply = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if reply["parent_header"].get("msg_id") != message:
                continue
            kind, content = reply["msg_type"], reply["content"]
            if kind == "stream" and content["name"] == "stdout":
                out += content["text"]
            elif kind == "stream":
                err += content["text"]
            elif kind == "error":
                error = content["ename"] + "|" + "\n".join(content["traceback"])
            elif kind == "execute_result":
                out += content["data"]["text/plain"] + "\n"
            elif kind == "status" and content["execution_state"] == "idle":
                return out, err, error

    def run(self, source: str) -> tuple[str, str, str]:
        return self.finish(self.start(source))

    def show(self, source: str) -> str:
        """stdout of a cell that must not fail."""
        out, _, error = self.run(source)
        assert not error, error
        return out

    def error(self, source: str) -> str:
        """The error of a cell that must fail."""
        error = self.run(source)[2]
        assert error, "the cell did not fail"
        return error

    def pids(self) -> list[int]:
        """Processes of two ranks and of the zygote."""
        shown = self.show(
            "from minidist.ranks import session\nprint(*ranks.run(lambda mesh: __import__('os').getpid(), 2), "
            "session.current().launcher.process.pid)"
        )
        return [int(word) for word in shown.split()]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    notebook = Notebook({**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)})
    yield notebook
    notebook.close()


def test_output_and_values_come_by_rank_and_names_are_kept(shared):
    first = shared.show(
        "%%ranks 3\nx = torch.full((2,), float(rank))\nprint('a', end=' ')\nprint('b')\ncomm.all_reduce(x, world)"
    )
    lines = [f"[{rank}] {text}" for rank in range(3) for text in ("a b", "tensor([3., 3.])")]
    assert first.splitlines()[-6:] == lines
    assert "3 ranks, 1 thread each" in first
    assert shared.show("%%ranks 3\n(rank, world_size, x.tolist(), len(tape), mesh.rank)").splitlines() == [
        f"[{rank}] ({rank}, 3, [3.0, 3.0], 0, {rank})" for rank in range(3)
    ]
    assert shared.show("%%ranks 3\nx;") == ""
    assert shared.show("ranks.push(y=7)\nranks.pull('x')[2].tolist()").strip() == "[3.0, 3.0]"
    assert shared.show("%%ranks 3\ny + rank") == "[0] 7\n[1] 8\n[2] 9\n"


def test_two_runs_of_a_cell_look_the_same(shared):
    cell = "%%ranks 3\nimport random, time\nfor i in range(20):\n    print(i)\n    time.sleep(random.random() / 100)"
    shown = shared.show(cell)
    assert shown == shared.show(cell)
    assert shown.splitlines() == [f"[{rank}] {i}" for rank in range(3) for i in range(20)]


def test_rank_0_is_heard_live_and_stream_hears_all(shared):
    cell = (
        "%%ranks 2 {}\nimport time\ncomm.barrier(world)\nif rank == 0: time.sleep(0.4)\nprint('first')\n"
        "comm.barrier(world)\ntime.sleep({})"
    )
    assert shared.show(cell.format("--stream", 0)).splitlines()[-2:] == ["[1] first", "[0] first"]
    message, began = shared.start(cell.format("", 1.5)), time.monotonic()
    while True:
        reply = shared.client.get_iopub_msg(timeout=10)
        if reply["msg_type"] == "stream" and "[0] first" in reply["content"]["text"]:
            break
    assert time.monotonic() - began < 1.5  # the cell itself takes 1.9 s
    shared.finish(message)


def test_an_error_shows_the_ranks_own_traceback_with_the_cells_lines(shared):
    shared.show("%%ranks 2\ndef helper(x):\n    return 1 / x")
    error = shared.error("%%ranks 2\nif rank == 1:\n    helper(0)\ncomm.barrier(world)")
    lines = error.splitlines()
    assert lines[0] == "RankError|rank 1 raised ZeroDivisionError: division by zero"
    assert next(line for line in lines if "File" in line).endswith("line 3, in <module>")
    assert "    helper(0)" in lines and "    return 1 / x" in lines and "ZeroDivisionError: division by zero" in lines
    assert lines[-2:] == [
        "Rank 0 was waiting in barrier #1 of world, and was freed.",
        "All ranks were started anew: variables of earlier cells are gone.",
    ]
    assert "minidist/ranks" not in error and len(lines) < 16
    hint = shared.error("%%ranks 2\nhelper(1)")
    assert "NameError: name 'helper' is not defined" in hint and "started anew after this: rank 1 raised ZeroDiv" in hint


def test_a_function_of_another_cell_is_named_as_the_notebook_names_it(shared):
    shared.show("def program(mesh):\n    assert mesh.rank == 0, 'not zero'")
    error = shared.error("ranks.run(program, 2)")
    assert "assert mesh.rank == 0, 'not zero'" in error and "Cell In[" in error


def test_planted_failures_are_shown_and_must_happen(shared):
    boom = "if rank == 1: raise ValueError('boom')"
    assert "rank 1 raised ValueError: boom" in shared.show(f"%%ranks 2 --expect error --rank 1\n{boom}")
    assert "but it ended so:" in shared.error(f"%%ranks 2 --expect error --rank 0\n{boom}")
    assert "all ranks finished" in shared.error("%%ranks 2 --expect error\nrank")
    assert "but it ended so:" in shared.error(f"%%ranks 2 --expect mismatch\n{boom}")
    assert "but it ended so:" in shared.error(f"%%ranks 2 --expect hang\n{boom}")
    skip = "if rank: comm.barrier(world)"
    shown = shared.show(f"%%ranks 2 --expect hang --rank 0\n{skip}")
    assert "rank 1 waits for rank 0, which has finished." in shown and ":2: if rank: comm.barrier(world)" in shown
    assert "but it ended so:" in shared.error(f"%%ranks 2 --expect error\n{skip}")
    shape = "comm.all_reduce(torch.ones(3 + rank), world)"
    assert "ranks differ in shape" in shared.show(f"%%ranks 2 --expect mismatch\n{shape}")
    assert "but it ended so:" in shared.error(f"%%ranks 2 --expect error\n{shape}")


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "needs the number of ranks, for example %%ranks 4"),
        ("four", "not a number of ranks"),
        ("0", "0 ranks: give a whole number from 1"),
        ("2 --expect miracle", "invalid choice: 'miracle'"),
        ("2 --bogus", "unrecognized arguments: --bogus"),
        ("2 --rank 1", "--rank 1 goes with --expect"),
        ("2 --timeout -1", "timeout_s = -1.0"),
        ("4 --layout tp=3", "3 ranks, but 4 were started"),
        ("4 --layout px=3", "its axes are pp, dp, cp, tp"),
    ],
)
def test_a_slip_in_the_magic_is_answered_in_one_line(shared, line, words):
    error = shared.error(f"%%ranks {line}\n1")
    assert error.startswith("UsageError|ValueError: ") and words in error and "\n" not in error


def test_a_cell_that_is_not_python_reaches_no_rank(shared):
    error = shared.error("%%ranks 2 --expect error\nx = 1\ny = (")
    assert "line 3" in error and "SyntaxError: '(' was never closed" in error and len(error.splitlines()) == 4


def test_layout_of_a_cell(shared):
    assert shared.show("%%ranks 2 --layout tp=2\nmesh.group('tp').size, mesh.group('dp').size").splitlines()[-1] == "[1] (2, 1)"


def test_the_stop_button_frees_ranks_and_keeps_their_variables(shared):
    shared.show("%%ranks 2\nz = rank + 5")
    message = shared.start("%%ranks 2\nimport time\nprint('on my way')\ntime.sleep(100)")
    with pytest.raises(queue.Empty):
        while True:  # until it says no more
            shared.client.get_iopub_msg(timeout=1)
    began = time.monotonic()
    shared.manager.interrupt_kernel()
    error = shared.finish(message)[2]
    assert error.startswith("KeyboardInterrupt|") and time.monotonic() - began < 1.0
    assert shared.show("ranks.pull('z')").strip() == "[5, 6]"


def test_the_stop_button_frees_ranks_in_a_collective(shared):
    message = shared.start("%%ranks 2 --timeout 100\nimport time\nif rank: comm.barrier(world)\ntime.sleep(100)")
    time.sleep(1.0)
    began = time.monotonic()
    shared.manager.interrupt_kernel()
    _, err, error = shared.finish(message)
    assert error.startswith("KeyboardInterrupt|") and time.monotonic() - began < 1.5
    assert "variables of earlier cells are gone" in err
    assert shared.show("%%ranks 2\ncomm.barrier(world)\nrank") == "[0] 0\n[1] 1\n"


def test_no_process_is_left_by_a_restart_or_a_kill(shared):
    pids = shared.pids()
    shared.start("ranks.run(lambda mesh: mesh.rank and __import__('time').sleep(100), 2)")
    time.sleep(0.3)
    shared.client.stop_channels()
    shared.manager.restart_kernel(now=True)  # the restart button, in the middle of a run
    assert gone(pids)
    shared.connect()
    pids = shared.pids()
    began = time.monotonic()
    shared.client.stop_channels()
    shared.manager.restart_kernel(now=False)  # a restart that lets the kernel clean up
    assert time.monotonic() - began < 10 and gone(pids)
    shared.connect()
    pids = shared.pids()
    assert not gone(pids, 0.1)
    shared.manager.signal_kernel(signal.SIGKILL)
    assert gone(pids)
