"""ranks.run: results by rank, the latest code, one namespace, warm and fresh (cases C51, C52)."""

import os
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.ranks import host


def total(mesh, x, scale=1):
    return comm.all_reduce(x * scale + mesh.rank, mesh.world)


def test_results_come_by_rank_with_arguments():
    assert ranks.run(lambda mesh, a, b=0: (mesh.rank, a, b), 3, "a", b=2) == [(0, "a", 2), (1, "a", 2), (2, "a", 2)]
    for x in ranks.run(total, 3, torch.ones(2), scale=2):
        assert torch.equal(x, torch.full((2,), 9.0))


def test_one_rank_needs_no_group():
    assert torch.equal(ranks.run(total, 1, torch.ones(2))[0], torch.ones(2))


def test_layout_shapes_the_mesh_and_the_tape_starts_empty():
    def program(mesh):
        comm.all_reduce(torch.ones(2), mesh.group("tp"))
        return mesh.coordinates["tp"], [line.seq for line in mesh.tape], mesh.group("tp").size

    for _ in range(2):  # operations count from 1 in every run
        assert ranks.run(program, 4, layout=Layout(dp=2, tp=2)) == [(0, [1], 2), (1, [1], 2), (0, [1], 2), (1, [1], 2)]


def test_a_run_sets_the_checks_and_a_patience_longer_than_its_limit():
    def program(mesh):
        return mesh.wire.check, mesh.wire.timeout_s > 7

    assert ranks.run(program, 2, timeout_s=7) == [(True, True)] * 2
    assert ranks.run(program, 2, timeout_s=70, check=False) == [(False, True)] * 2


def test_changed_code_runs_five_times_with_an_error_in_between():
    namespace = {"__name__": "__main__"}  # as a cell would define it
    for version in range(5):
        exec(f"def program(mesh):\n    return mesh.rank + helper()\ndef helper():\n    return {version} * 10", namespace)
        assert ranks.run(namespace["program"], 4) == [10 * version + rank for rank in range(4)]
        if version == 2:
            with pytest.raises(ranks.RankError):
                ranks.run(lambda mesh: 1 / 0, 4)


def test_warm_runs_hold_threads_and_descriptors_steady():
    def held(mesh):
        comm.barrier(mesh.world)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    ranks.run(held, 2)
    first = ranks.run(held, 2)
    for _ in range(5):
        ranks.run(held, 2)
    assert ranks.run(held, 2) == first


def test_warm_and_fresh_ranks_are_quick():
    def median(times, **kwargs):
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            ranks.run(total, 4, torch.ones(2), **kwargs)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    median(1)
    warm, fresh = median(30), median(5, fresh=True)
    print(f"4 ranks with an all-reduce: warm {warm * 1e3:.1f} ms, fresh {fresh * 1e3:.0f} ms")
    assert warm < 0.1 and fresh < 1.0  # 5 and 70 ms on a quiet machine; a spawned start takes 3 s


def test_fresh_ranks_are_new_and_leave_the_warm_ones_alone():
    pids = ranks.run(lambda mesh: os.getpid(), 2)
    fresh = ranks.run(lambda mesh: os.getpid(), 2, fresh=True)
    assert not set(pids) & set(fresh)
    assert ranks.run(lambda mesh: os.getpid(), 2) == pids


def test_pushed_variables_reach_ranks_that_start_later():
    ranks.push(a=1, b=2)
    ranks.push(b=3)

    def names(mesh):
        import __main__

        return __main__.a, __main__.b

    assert ranks.run(names, 2, fresh=True) == [(1, 3), (1, 3)]
    ranks.run(names, 2)
    ranks.push(a=5)
    assert ranks.run(names, 2) == [(5, 3), (5, 3)]
    assert ranks.pull("a") == [5, 5]


def test_local_files_and_modules_are_found_where_the_caller_stands(tmp_path, monkeypatch):
    (tmp_path / "beside_the_notebook.py").write_text("value = 1\ndef f():\n    return value\n")
    (tmp_path / "data.txt").write_text("hello")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside_the_notebook

    assert ranks.run(lambda mesh: (Path("data.txt").read_text(), beside_the_notebook.f()), 2) == [("hello", 1)] * 2
    beside_the_notebook.value = 2  # as after an edit and a reload
    assert ranks.run(lambda mesh: beside_the_notebook.f(), 2) == [2, 2]

    def by_import(mesh):
        import beside_the_notebook

        return beside_the_notebook.f()

    assert ranks.run(by_import, 2) == [1, 1]


def test_threads_share_the_cores_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr(host, "cores", lambda: 8)
    assert [host.threads_per_rank(n, {}) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert host.threads_per_rank(8, {"OMP_NUM_THREADS": "3"}) == 3
    assert host.threads_per_rank(8, {"OMP_NUM_THREADS": "none"}) == 1
    monkeypatch.undo()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks.run(lambda mesh: torch.get_num_threads(), 8, fresh=True) == [max(1, host.cores() // 8)] * 8
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert ranks.run(lambda mesh: torch.get_num_threads(), 3, fresh=True) == [2] * 3


def test_ranks_are_not_those_of_a_launcher_around_us(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("SOMETHING_ELSE", "7")

    def program(mesh):
        return os.environ.get("RANK"), os.environ.get("SOMETHING_ELSE"), mesh.rank

    assert ranks.run(program, 2, fresh=True) == [(None, "7", 0), (None, "7", 1)]


def test_ranks_talk_over_loopback_only(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^docker0")  # a pattern that suits NCCL and breaks gloo

    def peers(mesh):
        import psutil

        comm.barrier(mesh.world)
        return {c.laddr.ip for c in psutil.Process().net_connections("inet")}

    assert ranks.run(peers, 2, fresh=True) == [{"127.0.0.1"}] * 2


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ranks.run(total, 0), "0 ranks: give a whole number from 1"),
        (lambda: ranks.run(total, "4"), "'4' ranks: give a whole number"),
        (lambda: ranks.run(total, 4, layout=Layout(tp=3)), "3 ranks, but 4 were started"),
        (lambda: ranks.run(total, 2, timeout_s=0), "timeout_s = 0"),
        (lambda: ranks.run(total, 2, threading.Lock()), "cannot be sent to the ranks"),
        (lambda: ranks.pull("no_such_name"), "no variable 'no_such_name'"),
    ],
)
def test_a_slip_is_answered_in_one_line(call, words):
    ranks.run(total, 2, torch.ones(1))
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_result_that_cannot_travel_is_an_error_of_that_rank():
    with pytest.raises(ranks.RankError, match="rank 0 raised TypeError: cannot pickle"):
        ranks.run(lambda mesh: (i for i in range(3)), 2)


def test_ranks_do_not_start_ranks():
    def program(mesh):
        from minidist import ranks

        return ranks.run(lambda mesh: 1, 2)

    with pytest.raises(ranks.RankError, match="already runs on a rank"):
        ranks.run(program, 2)


def test_status_tells_what_ranks_do():
    ranks.run(total, 2, torch.ones(1))
    for rank, seen in enumerate(ranks.status()):
        assert (seen.rank, seen.state, seen.last) == (rank, "idle", "all_reduce #1 of world")
