"""One rank fails: it is blamed, the others are freed, the report can be read, the pool heals (cases C47, C48)."""

import os
import signal
import time

import pytest
import torch

from minidist import ranks
from minidist.core import comm

pytestmark = pytest.mark.usefixtures("impatient")


def works(n: int) -> bool:
    """Whether the pool can be used."""
    return [x.item() for x in ranks.run(lambda mesh: comm.all_reduce(torch.ones(1), mesh.world), n)] == [n] * n


def raises_on_one(mesh):
    comm.all_reduce(torch.ones(3), mesh.world)
    if mesh.rank == 1:
        raise ValueError("boom")
    comm.all_reduce(torch.ones(3), mesh.world)


def test_the_raising_rank_is_blamed_ten_times_out_of_ten():
    for _ in range(10):
        with pytest.raises(ranks.RankError) as caught:
            ranks.run(raises_on_one, 3)
        error = caught.value
        assert (error.rank, error.kind) == (1, "ValueError")
        lines = str(error).splitlines()
        assert lines[0] == "rank 1 raised ValueError: boom"
        assert 'raise ValueError("boom")' in error.traceback and "minidist/ranks" not in error.traceback
        assert "Ranks 0 and 2 were waiting in all_reduce #2 of world, and were freed." in lines
    assert works(3)


@pytest.mark.parametrize("how, code", [("exit", 0), ("exit", 3), ("signal", -signal.SIGTERM), ("signal", -signal.SIGKILL)])
def test_a_dead_rank_is_blamed_and_not_its_victims(how, code):
    def dies(mesh):
        comm.all_reduce(torch.ones(3), mesh.world)
        if mesh.rank == 1:
            if how == "exit":
                os._exit(code)
            os.kill(os.getpid(), -code)
        comm.all_reduce(torch.ones(3), mesh.world)

    for _ in range(3):
        ranks.run(lambda mesh: None, 3)
        began = time.monotonic()
        with pytest.raises(ranks.RankDied) as caught:
            ranks.run(dies, 3)
        assert (caught.value.rank, caught.value.exit_code) == (1, code)
        assert time.monotonic() - began < 2
    words = f"exit code {code}" if how == "exit" else signal.Signals(-code).name
    assert words in str(caught.value).splitlines()[0]
    assert works(3)


def test_last_words_below_python_are_shown():
    def aborts(mesh):
        if mesh.rank == 0:
            os.write(2, b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
            os.abort()

    with pytest.raises(ranks.RankDied, match="SIGABRT") as caught:
        ranks.run(aborts, 2)
    assert "gloo::EnforceNotMet" in str(caught.value)


def test_a_segmentation_fault_says_where():
    def crashes(mesh):
        import ctypes

        if mesh.rank == 1:
            ctypes.string_at(0)

    with pytest.raises(ranks.RankDied, match="SIGSEGV") as caught:
        ranks.run(crashes, 2)
    assert "test_failures.py" in str(caught.value) and "in crashes" in str(caught.value)
    print(caught.value)
    assert "minidist/ranks/" not in str(caught.value)


def test_a_slip_on_all_ranks_keeps_them_and_names_all():
    pids = ranks.run(lambda mesh: os.getpid(), 4)
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(lambda mesh: undefined_name, 4)  # noqa: F821
    assert caught.value.ranks == [0, 1, 2, 3]
    assert "Ranks 1, 2 and 3 raised the same." in str(caught.value)
    assert ranks.run(lambda mesh: os.getpid(), 4) == pids


def test_an_error_behind_the_last_collective_keeps_the_ranks():
    def late(mesh):
        comm.all_reduce(torch.ones(1), mesh.world)
        if mesh.rank == 2:
            raise KeyError("late")

    pids = ranks.run(lambda mesh: os.getpid(), 4)
    with pytest.raises(ranks.RankError, match="rank 2 raised KeyError"):
        ranks.run(late, 4)
    assert ranks.run(lambda mesh: os.getpid(), 4) == pids and works(4)


def test_groups_out_of_step_are_not_used_again():
    def ahead(mesh):
        if mesh.rank == 1:
            comm.send(torch.ones(1), mesh.world, 0, async_op=True)
            raise KeyError("unsent")

    pids = ranks.run(lambda mesh: os.getpid(), 2)
    with pytest.raises(ranks.RankError, match="rank 1 raised KeyError"):
        ranks.run(ahead, 2)
    assert not set(pids) & set(ranks.run(lambda mesh: os.getpid(), 2)) and works(2)


def test_exit_in_a_run_ends_the_run_and_not_the_rank():
    def leaves(mesh):
        raise SystemExit(0)

    with pytest.raises(ranks.RankError, match="rank 0 raised SystemExit"):
        ranks.run(leaves, 2)
    assert works(2)


@pytest.mark.parametrize("what", ["shape", "dtype", "operation"])
def test_a_mismatch_is_told_by_both_ranks_with_both_calls(what):
    def differs(mesh):
        x = torch.ones(
            3 if what == "shape" and mesh.rank else 4, dtype=torch.float64 if what == "dtype" and mesh.rank else None
        )
        if what == "operation" and mesh.rank:
            return comm.broadcast(x, mesh.world, 0)
        return comm.all_reduce(x, mesh.world)

    with pytest.raises(ranks.RankError) as caught:
        ranks.run(differs, 2)
    report = str(caught.value)
    assert caught.value.kind == "CommMismatch" and caught.value.ranks == [0, 1]
    assert f"ranks differ in {what}" in report and "rank 0: all_reduce [4] float32" in report and "test_failures.py:" in report
    assert "work.py" not in caught.value.traceback  # the place is the user's call
    assert works(2)


def stalls(mesh):
    comm.all_reduce(torch.ones(4), mesh.world)
    if mesh.rank == 1:
        time.sleep(100)
    comm.all_reduce(torch.ones(2, 3), mesh.world)


def test_a_hang_is_reported_at_the_limit():
    began = time.monotonic()
    with pytest.raises(ranks.RankHang) as caught:
        ranks.run(stalls, 3, timeout_s=1.0)
    assert 1.0 <= time.monotonic() - began < 3.0
    report, error = str(caught.value), caught.value
    assert error.rank == 1
    assert report.splitlines()[0].endswith("ranks 0 and 2 wait for rank 1.")
    waits = [line for line in report.splitlines() if "all_reduce #2 of world [0, 1, 2], float32 [2, 3]" in line]
    assert [line.split(":")[0].strip() for line in waits] == ["rank 0", "rank 2"]
    assert all("comm.all_reduce(torch.ones(2, 3), mesh.world)" in line and "test_failures.py:" in line for line in waits)
    assert any(line.startswith("  rank 1: in no collective") and "time.sleep(100)" in line for line in report.splitlines())
    assert "First divergence of the tapes: call #2 of world" in report and "  rank 1 called nothing" in report
    assert works(3)


def test_a_deadlock_is_seen_long_before_the_limit():
    def skips(mesh):
        if mesh.rank:
            comm.all_reduce(torch.ones(4), mesh.world)

    began = time.monotonic()
    with pytest.raises(ranks.RankHang, match="no rank can go on") as caught:
        ranks.run(skips, 3, timeout_s=60)
    assert time.monotonic() - began < 5
    assert caught.value.rank == 0 and "wait for rank 0, which has finished." in str(caught.value)
    assert works(3)


def test_a_slow_rank_is_no_deadlock():
    def slow(mesh):
        if mesh.rank == 1:
            time.sleep(1.2)  # six times as long as a deadlock takes to be certain
        return comm.all_reduce(torch.ones(1), mesh.world).item()

    assert ranks.run(slow, 3) == [3.0] * 3


def test_ranks_that_only_compute_are_reported_at_the_limit():
    def spins(mesh):
        while True:
            pass

    with pytest.raises(ranks.RankHang, match="no rank waits for another") as caught:
        ranks.run(spins, 2, timeout_s=0.5)
    assert caught.value.rank is None and str(caught.value).count("in no collective") == 2
    assert works(2)


def test_output_comes_by_rank_before_the_error(capfd):
    def speaks(mesh):
        print("one\ntwo", end="")
        os.system("echo below")
        if mesh.rank == 1:
            raise ValueError("boom")

    with pytest.raises(ranks.RankError):
        ranks.run(speaks, 2)
    seen = capfd.readouterr()
    assert seen.out == "[0] one\n[0] two\n[1] one\n[1] two\n"
    assert seen.err == "[0] below\n[1] below\n"
