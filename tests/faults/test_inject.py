"""Faults on purpose: each does what it says, to whom it says, when it says, and is gone afterwards."""

import errno
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch import nn

from minidist import ranks
from minidist.core import comm, disk
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.faults import inject
from minidist.faults.inject import Injector
from minidist.faults.vocabulary import Fault


def write(path, *pieces):
    with disk.open_for_write(path) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())  # whatever stands in the way, a file is a file
    return path.read_bytes()


def test_a_file_opened_through_the_door_is_a_file(tmp_path):
    assert write(tmp_path / "a", b"one", b"two") == b"onetwo"


def test_a_full_disk_takes_what_fits_and_then_says_so(tmp_path):
    with inject.full_disk(after=10):
        assert write(tmp_path / "a", b"123456") == b"123456"
        with pytest.raises(OSError) as caught:
            write(tmp_path / "b", b"1234567890")
        assert caught.value.errno == errno.ENOSPC and str(tmp_path / "b") in str(caught.value)
        assert (tmp_path / "b").read_bytes() == b"1234"  # torn, as by a real disk
    assert write(tmp_path / "c", b"x" * 100) == b"x" * 100


def test_a_slow_disk_takes_its_time_over_all_files(tmp_path):
    began = time.monotonic()
    with inject.slow_disk(bytes_per_s=1000):
        write(tmp_path / "a", torch.zeros(10).numpy())  # 40 bytes: a buffer is counted in bytes
        assert write(tmp_path / "b", b"x" * 60) == b"x" * 60
    assert time.monotonic() - began >= 0.1
    with pytest.raises(ValueError, match="bandwidth > 0"), inject.slow_disk(0):
        pass


def test_a_bit_flips_and_flips_back(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with inject.flipped_bit(path) as at:
        assert (at, path.read_bytes()) == (2, b"abb")
    assert path.read_bytes() == b"abc"
    inject.flip_bit(path, 0)
    assert path.read_bytes() == b"`bc"
    with pytest.raises(ValueError, match="has no byte 9"):
        inject.flip_bit(path, 9)


def test_a_stopped_process_stands_still_and_goes_on():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with inject.stopped(process.pid):
            assert _is(process.pid, psutil.STATUS_STOPPED)
        assert _is(process.pid, psutil.STATUS_SLEEPING)
    finally:
        process.kill()
        process.wait()


def _is(pid, status):
    end = time.monotonic() + 5
    while psutil.Process(pid).status() != status and time.monotonic() < end:
        time.sleep(0.01)
    return psutil.Process(pid).status() == status


def test_a_nan_in_one_gradient():
    layer = nn.Linear(2, 2)
    with inject.nan_gradient(layer.weight):
        layer(torch.ones(1, 2)).sum().backward()
    assert torch.isnan(layer.weight.grad).tolist() == [[True, False], [False, False]]
    assert torch.isfinite(layer.bias.grad).all()
    layer.weight.grad = None
    layer(torch.ones(1, 2)).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_the_spoiled_parameter_sees_every_token():
    model = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False), "expert": nn.LayerNorm(2), "norm": nn.LayerNorm(2)})
    for parameter in model["expert"].parameters():
        parameter.over = "experts"
    assert inject.dense_parameter(model) is model["norm"].weight
    model["norm"].requires_grad_(False)
    assert inject.dense_parameter(model) is model["head"].weight


def test_the_injector_strikes_its_rank_in_its_step_of_its_attempt(tmp_path):
    layer = nn.Linear(2, 2)
    mesh = Mesh(Layout())

    def bad_steps(*faults, attempt=0):
        found, injector = [], Injector(faults, mesh, tmp_path, attempt)
        for number in (1, 2, 3):
            layer.bias.grad = None
            with injector.step(number, layer):
                layer(torch.ones(1, 2)).sum().backward()
            if not torch.isfinite(layer.bias.grad).all():
                found.append((number, layer.bias.grad[0].item()))
        injector.close()
        return found

    inf = float("inf")
    assert bad_steps(Fault("nan", 0, 2, amounts={"value": inf})) == [(2, inf)]
    assert [number for number, _ in bad_steps(Fault("nan", 0, 3), Fault("nan", 0, 1))] == [1, 3]
    assert bad_steps(Fault("nan", 1, 2)) == []
    assert bad_steps(Fault("nan", 0, 2), attempt=1) == []
    assert bad_steps(Fault("nan", 0, 2, 1, {"value": inf}), attempt=1) == [(2, inf)]


def test_what_lasts_begins_at_its_step_and_ends_with_the_run(tmp_path):
    mesh = Mesh(Layout())
    faults = [Fault("slow-link", 0, 2, amounts={"latency": 0.5}), Fault("full-disk", 0, 0, amounts={"bytes": 4.0})]
    injector = Injector([*faults, Fault("slow", 0, 2, amounts={"seconds": 0.05})], mesh, tmp_path)
    times = []
    for number in (1, 2, 3):
        began = time.monotonic()
        with injector.step(number, nn.Linear(1, 1)):
            times.append((time.monotonic() - began >= 0.05, mesh.delay and mesh.delay.inside.latency_s))
    assert times == [(False, None), (True, 0.5), (True, 0.5)]
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", b"12345")
    injector.close()
    assert mesh.delay is None and write(tmp_path / "a", b"12345") == b"12345"


def test_no_checkpoint_no_flip(tmp_path):
    with pytest.raises(ValueError, match="rank 0 has no file in a finished checkpoint yet"):
        Injector([Fault("flip", 0, 0)], Mesh(Layout()), tmp_path / "checkpoints")


def struck(mesh, faults, folder):
    """Three steps of an all-reduce under these faults; when each began and ended on this rank."""
    injector, times = Injector(faults, mesh, folder), []
    for number in (1, 2, 3):
        with injector.step(number, nn.Linear(1, 1)):
            began = time.monotonic()
            comm.all_reduce(torch.ones(1), mesh.world)
            times.append(time.monotonic() - began)
    injector.close()
    return times


def test_a_killed_rank_is_gone(tmp_path):
    with pytest.raises(ranks.RankDied) as caught:
        ranks.run(struck, 3, [Fault("kill", 1, 2)], tmp_path)
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)


def test_a_stopped_rank_is_waited_for_and_comes_back(tmp_path):
    others, stopped = ranks.run(struck, 2, [Fault("stop", 1, 2, amounts={"seconds": 0.4})], tmp_path)
    assert others[1] >= 0.35 > max(others[0], others[2], *stopped)
