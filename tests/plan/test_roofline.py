"""The roofline's arithmetic, against counts done another way; what fits on a multiprocessor, against a published example."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minidist.core import hardware
from minidist.plan import occupancy, roofline
from minidist.plan.roofline import Machine, Work

H100 = hardware.find("NVIDIA H100 80GB HBM3")
A100 = hardware.find("NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_counts_what_torch_counts_and_what_the_tensors_hold(dtype):
    a, b = torch.ones(3, 5, dtype=getattr(torch, dtype)), torch.ones(5, 7, dtype=getattr(torch, dtype))
    with FlopCounterMode(display=False) as counter:
        c = a @ b
    work = roofline.matmul(3, 5, 7, roofline.ITEMSIZE[dtype])
    assert work.flops == counter.get_total_flops() == 210
    assert work.nbytes == a.nbytes + b.nbytes + c.nbytes


def test_elementwise_counts_tensors_in_and_out():
    assert roofline.elementwise(1000, 4) == Work(1000, 12_000)
    assert roofline.elementwise(1000, 2, reads=1, writes=1, flops=8).intensity == 2.0
    assert roofline.elementwise(10, 4) + roofline.elementwise(10, 4) == Work(20, 240)


def test_the_roof_has_two_sides_and_a_ridge():
    machine = Machine("m", peak=100.0, bandwidth=10.0)
    assert machine.ridge == 10.0
    assert [roofline.attainable(i, machine) for i in (1, 10, 50)] == [10.0, 100.0, 100.0]
    assert roofline.bound(Work(9, 1), machine) == "memory"
    assert roofline.bound(Work(10, 1), machine) == "compute"
    assert roofline.seconds(Work(1000, 20), machine) == 10.0
    assert roofline.seconds(Work(100, 200), machine) == 20.0
    assert roofline.seconds(Work(100, 200), machine, launch_s=30.0) == 30.0


def test_attained_is_flops_over_least_seconds_everywhere():
    machine, draw = roofline.machine(H100), random.Random(1)
    for _ in range(200):
        work = Work(10 ** draw.uniform(3, 14), 10 ** draw.uniform(3, 11))
        assert work.flops / roofline.seconds(work, machine) == pytest.approx(roofline.attainable(work.intensity, machine))


def test_ridges_of_the_data_sheets():
    assert roofline.machine(H100).ridge == pytest.approx(295, rel=0.01)
    assert roofline.machine(A100).ridge == pytest.approx(153, rel=0.01)
    assert roofline.machine(H100, "float32").ridge == pytest.approx(20, rel=0.01)
    with pytest.raises(ValueError, match="no published peak for 'int4': use one of"):
        roofline.machine(H100, "int4")


def test_the_smallest_batch_is_where_the_bound_changes():
    draw = random.Random(2)
    found = 0
    for _ in range(300):
        k, n, itemsize = draw.randrange(8, 9000), draw.randrange(8, 9000), draw.choice([2, 4])
        machine = Machine("m", 10 ** draw.uniform(10, 15), 10 ** draw.uniform(9, 12.6))
        b = roofline.smallest_batch(k, n, itemsize, machine)
        if b is None:
            assert roofline.bound(roofline.matmul(10**9, k, n, itemsize), machine) == "memory"
            continue
        found += 1
        assert roofline.bound(roofline.matmul(b, k, n, itemsize), machine) == "compute"
        assert b == 1 or roofline.bound(roofline.matmul(b - 1, k, n, itemsize), machine) == "memory"
    assert 50 < found < 300
    assert roofline.smallest_batch(4096, 4096, 2, roofline.machine(H100)) == 346
    assert roofline.smallest_batch(4, 4, 2, Machine("m", 1.0, 1.0)) == 2  # exactly on the ridge


def test_measuring_is_interleaved_repeated_and_takes_the_median(monkeypatch):
    now, order = [0.0], []
    slow = iter([0.0] * 3 + [5.0] + [0.0] * 100)  # one burst of other work

    def call(name, cost):
        def run():
            order.append(name)
            now[0] += cost

        return run

    def burst():
        order.append("b")
        now[0] += 2.0 + next(slow)

    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now[0])
    assert roofline.measure([call("a", 1.0), burst], rounds=5) == [1.0, 2.0]
    assert order[4:] == ["a", "b"] * 5  # after a warm-up and a trial of each
    tiny = call("t", 1e-6)
    order.clear()
    assert roofline.measure([tiny], rounds=3) == pytest.approx([1e-6])
    assert len(order) == 2 + 3 * 200  # samples of 0.2 ms


def test_measuring_waits_for_the_device_before_it_reads_the_clock(monkeypatch):
    now, pending = [0.0], [0.0]

    def launch():
        now[0] += 0.01
        pending[0] += 1.0

    def synchronize():
        now[0] += pending[0]
        pending[0] = 0.0

    monkeypatch.setattr(roofline.time, "perf_counter", lambda: now[0])
    assert roofline.measure([launch], rounds=3) == pytest.approx([0.01])
    assert roofline.measure([launch], rounds=3, synchronize=synchronize) == pytest.approx([1.01])


def test_occupancy_of_published_examples():
    # modal.com/gpu-glossary/perf/occupancy has 19 blocks for 12 KB each; 17 once the system's 1 KB a block is counted
    assert occupancy.occupancy(H100.sm, 32, 8, 12 * 1024).blocks == 228 // 13
    assert occupancy.occupancy(H100.sm, 32, 8, 12 * 1024).limit == "shared memory"
    full = occupancy.occupancy(H100.sm, 256, 32)
    assert (full.blocks, full.warps, full.share, full.limit) == (8, 64, 1.0, "warps")
    greedy = occupancy.occupancy(H100.sm, 256, 128)
    assert (greedy.blocks, greedy.warps, greedy.share, greedy.limit) == (2, 16, 0.25, "registers")
    assert occupancy.occupancy(H100.sm, 32, 80).warps == 24  # room for 25, but four schedulers have as many each
    assert occupancy.occupancy(H100.sm, 32, 16).limit == "blocks"
    assert occupancy.occupancy(H100.sm, 32, 16).share == 0.5
    assert occupancy.occupancy(A100.sm, 128, 32, 160 * 1024).blocks == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2048,), "use 1 to 1024"),
        ((32, 300), "use 1 to 255"),
        ((32, 32, 228 * 1024), "use 0 to 232448"),
        ((1024, 128), "not fit"),
    ],
)
def test_a_block_that_no_multiprocessor_holds_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        occupancy.occupancy(H100.sm, *arguments)


def test_one_block_too_many_costs_a_whole_wave():
    assert occupancy.waves(132, 132) == occupancy.Waves(1, 132, 1.0)
    assert occupancy.waves(133, 132) == occupancy.Waves(2, 1, 133 / 264)
    assert occupancy.waves(264, 132, resident=2) == occupancy.Waves(1, 264, 1.0)
    assert occupancy.waves(1, 132).share == 1 / 132
    with pytest.raises(ValueError, match="have to be 1 or more"):
        occupancy.waves(0, 132)


def test_links_and_measured_peaks_are_below_what_they_hang_on():
    for device in hardware.DEVICES:
        assert device.link is None or device.link < device.bandwidth
        assert device.network is None or device.network < device.link
        assert device.measured is None or 0.5 * device.peak["bfloat16"] < device.measured < device.peak["bfloat16"]
    assert hardware.find("cpu") is None and hardware.find("Apple M2") is None  # presets, not data sheets to look up by driver
