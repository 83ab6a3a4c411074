"""The model of a link and of overlap: by hand, against least squares of numpy, and against real runs on the delay line."""

import random
import time
from functools import partial

import numpy as np
import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.links import Delay, Link
from minidist.core.timeline import timeline
from minidist.plan.time import LinkModel, Overlap, bucket_timeline, fit, pack


def test_a_ring_pays_alpha_once_a_step_and_the_booked_bytes():
    link = LinkModel(1e-3, 1e6)
    assert link.message_s(500) == pytest.approx(1.5e-3)
    assert link.ring_all_reduce_s(1000, 4) == pytest.approx(6 * 1e-3 + 1500 / 1e6)  # 6 messages of 250 bytes
    assert link.ring_all_reduce_s(1000, 4) == pytest.approx(6 * link.message_s(250))
    assert link.ring_all_reduce_s(1000, 1) == 0
    assert link.delayed_all_reduce_s(1000, 4) == pytest.approx(1e-3 + 1500 / 1e6)
    assert link.delayed_all_reduce_s(1000, 1) == 0


@pytest.mark.parametrize("link", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_links_that_cannot_be(link):
    with pytest.raises(ValueError, match="give alpha >= 0"):
        LinkModel(*link)


def test_a_fit_finds_the_link_again_within_the_noise_and_is_the_least_squares_of_numpy():
    true, draw = LinkModel(40e-6, 2e9), random.Random(5)
    points = [(b, true.message_s(b) * (1 + 0.05 * draw.uniform(-1, 1))) for b in (0, 4_000, 64_000, 10**6, 10**7)]
    found = fit(points)
    assert found.alpha_s == pytest.approx(true.alpha_s, rel=0.1) and found.bytes_per_s == pytest.approx(2e9, rel=0.1)
    seconds = np.array([s for _, s in points])
    design = np.array([[1.0, b] for b, _ in points]) / seconds[:, None]
    (alpha, slope), *_ = np.linalg.lstsq(design * [1, 1e6], np.ones(len(points)), rcond=None)
    assert found.alpha_s == pytest.approx(alpha) and 1 / found.bytes_per_s == pytest.approx(slope * 1e6)


def test_alpha_is_never_negative():
    assert fit([(1000, 1e-3), (2000, 2.5e-3)]).alpha_s == 0.0


@pytest.mark.parametrize(
    ("points", "remedy"),
    [
        ([(8, 1.0), (8, 2.0)], "two sizes"),
        ([], "two sizes"),
        ([(8, 0.0), (80, 1.0)], "measure again"),
        ([(8, 2.0), (80, 1.0)], "larger ones"),
    ],
)
def test_points_that_tell_nothing(points, remedy):
    with pytest.raises(ValueError, match=remedy):
        fit(points)


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([], 10, []),
        ([4, 4, 4], 8, [[0, 1], [2]]),
        ([4, 4, 4], 0, [[0], [1], [2]]),
        ([4, 20, 4, 4], 8, [[0], [1], [2, 3]]),  # too large: alone, and what follows starts anew
        ([0, 4, 4], 4, [[0, 1], [2]]),
        ([4, 4, 4], 1000, [[0, 1, 2]]),
    ],
)
def test_packing(sizes, limit, buckets):
    assert pack(sizes, limit) == buckets


def test_a_timeline_by_hand():
    """Three gradients of 10 bytes, ready at 1, 2 and 3 s, on a link of 10 bytes/s with 0.5 s latency."""
    link = LinkModel(0.5, 10.0)
    three = [(1.0, 10), (2.0, 10), (3.0, 10)]
    each = bucket_timeline(three, 10, link.message_s)
    assert [(b.launch_s, b.finish_s) for b in each.buckets] == [(1.0, 2.5), (2.0, 4.0), (3.0, 5.5)]
    assert each.exposed_s == 2.5 and each.hidden == pytest.approx(2.0 / 4.5)
    pairs = bucket_timeline(three, 20, link.message_s)
    assert [(b.payload, b.launch_s, b.finish_s) for b in pairs.buckets] == [(20, 2.0, 4.5), (10, 3.0, 6.0)]
    after = bucket_timeline(three, 10, link.message_s, overlap=False)
    assert [(b.launch_s, b.finish_s) for b in after.buckets] == [(3.0, 4.5), (3.0, 6.0), (3.0, 7.5)]
    assert after.hidden == 0.0 and after.end_s == 7.5
    late = bucket_timeline([(2.0, 10), (1.0, 10)], 10, link.message_s, backward_s=9.0)
    assert [b.launch_s for b in late.buckets] == [2.0, 2.0], "a bucket waits for its predecessors"
    assert late.exposed_s == 0.0 and late.hidden == 1.0
    assert bucket_timeline([], 10, link.message_s) == Overlap(0.0, ())


def test_a_prediction_is_drawn_like_a_run():
    tape = bucket_timeline([(1.0, 10), (2.0, 10)], 10, lambda b: 0.5).tape(rank=3, n=4)
    assert [(line.op, line.sent) for line in tape] == [("backward", 0), ("all_reduce", 15), ("all_reduce", 15)]
    assert "all_reduce from 1000.0 to 1500.0 ms" in timeline([tape]).alt
    waiting = bucket_timeline([(1.0, 10), (1.0, 10)], 10, lambda b: 0.5)
    assert [[line.launch for line in waiting.tape(on_wire=wire)[1:]] for wire in (False, True)] == [[1.0, 1.0], [1.0, 1.5]]


def program(mesh, naps_s, sizes, alpha_s, bytes_per_s):
    """A backward of naps with a reduction launched after each; moments (ready) and (launch, finish), from its start."""
    mesh.delay = Delay(Link(alpha_s, bytes_per_s))
    tensors = [torch.ones(size // 4) for size in sizes]
    for _ in range(3):  # the last counts; the first pay for connections
        comm.barrier(mesh.world)
        time.sleep(5 * alpha_s)
        first, works, ready, began = len(mesh.tape.lines), [], [], time.monotonic()
        for nap_s, x in zip(naps_s, tensors, strict=True):
            time.sleep(nap_s)
            ready.append(time.monotonic() - began)
            works.append(comm.all_reduce(x, mesh.world, async_op=True))
        for work in works:
            work.wait()
    return ready, [(line.launch - began, line.finish - began) for line in mesh.tape[first:]]


def noise():
    """The most that a reduction without a delay line took, seen now on this machine: what the model leaves out."""
    got = ranks.run(program, 2, [0.01] * 6, [4000] * 6, 0.0, float("inf"))
    return max(finish - launch for _, lines in got for launch, finish in lines)


def test_the_timeline_is_what_a_run_on_the_delay_line_does():
    naps, sizes = [0.03, 0.03, 0.01, 0.04, 0.02], [40_000, 80_000, 8_000, 120_000, 4_000]
    for _ in range(3):  # a machine that stalls in the wrong moment gets another try; the model never changes
        delta = max(noise(), 2e-3)
        link = LinkModel(10 * delta, 2_000_000)
        runs = ranks.run(program, 2, naps, sizes, link.alpha_s, link.bytes_per_s)
        ready = [max(moments) for moments in zip(*(run[0] for run in runs), strict=True)]  # the last to come sets the pace
        plan = bucket_timeline(list(zip(ready, sizes, strict=True)), 0, partial(link.delayed_all_reduce_s, n=2))
        lines = runs[0][1]
        assert sorted(range(5), key=lambda i: lines[i][0]) == sorted(range(5), key=lambda i: plan.buckets[i].launch_s)
        errors = [abs(finish - bucket.finish_s) for (_, finish), bucket in zip(lines, plan.buckets, strict=True)]
        if max(errors) < 3 * delta:
            return
    raise AssertionError(f"finish times off by {max(errors)} s, with noise of {delta} s")
