"""Stragglers: drawn times with a known answer, and a real rank that is slowed down."""

import random
import time

import pytest
import torch
from torch import nn

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.faults.inject import Injector
from minidist.faults.straggler import Stopwatch, Stragglers, alike, slow_ranks
from minidist.faults.vocabulary import Fault


def drawn(n, steps, noise, slow=None, seed=0):
    """Compute times of `n` ranks: a step of 1 s that varies by `noise`; `slow` ranks take so many times as long."""
    draw = random.Random(seed)
    return [[draw.lognormvariate(0, noise) * (slow or {}).get(rank, 1) for rank in range(n)] for _ in range(steps)]


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_a_slow_rank_is_found_with_its_measure(n):
    for seed in range(20):
        found = slow_ranks(drawn(n, 20, 0.03, {1: 1.5}, seed))
        assert [one.rank for one in found] == [1]
        assert found[0].excess == pytest.approx(0.5, abs=0.06) and found[0].sigmas > 8
        assert (found[0].steps, found[0].window) == (20, 20)


def test_up_to_half_of_the_ranks_worst_first():
    assert [one.rank for one in slow_ranks(drawn(6, 20, 0.03, {0: 1.3, 4: 2.0, 5: 1.6}))] == [4, 5, 0]


@pytest.mark.parametrize(("n", "noise"), [(2, 0.05), (4, 0.05), (8, 0.2), (64, 0.3)])
def test_noise_alone_is_no_news(n, noise):
    for seed in range(30):
        assert slow_ranks(drawn(n, 20, noise, seed=seed)) == []


def test_a_rank_held_up_now_and_then_is_not_slow():
    seconds = drawn(4, 20, 0.03)
    for step in (3, 7, 11, 15, 19):
        seconds[step][2] *= 10
    assert slow_ranks(seconds) == []


def test_one_that_was_slow_and_is_not_any_more():
    assert slow_ranks(drawn(4, 12, 0.03, {2: 2.0}) + drawn(4, 8, 0.03)) == []


def test_steps_that_are_slow_everywhere_are_nobodys_fault():
    draw = random.Random(1)
    seconds = [[x * factor for x in step] for step in drawn(4, 20, 0.03) for factor in [draw.choice((1, 3))]]
    assert slow_ranks(seconds) == []


def test_stages_of_a_pipeline_are_not_compared():
    layout = Layout(pp=2, dp=2)
    assert alike(layout) == [[0, 1], [2, 3]]
    slow = {2: 1.6, 3: 1.6}  # the head is more work
    assert {one.rank for one in slow_ranks(drawn(4, 20, 0.03, slow))} == {2, 3}
    assert slow_ranks(drawn(4, 20, 0.03, slow), alike(layout)) == []
    assert [one.rank for one in slow_ranks(drawn(4, 20, 0.03, slow | {3: 2.4}), alike(layout))] == [3]


def test_nothing_to_compare():
    assert slow_ranks([]) == slow_ranks(drawn(1, 20, 0.1)) == slow_ranks(drawn(3, 1, 0.1)) == []


def test_it_is_said_once_and_taken_back_once():
    watch, said = Stragglers([range(3)], window=10), []
    for number, seconds in enumerate(drawn(3, 10, 0.02) + drawn(3, 20, 0.02, {1: 1.5}) + drawn(3, 20, 0.02)):
        said += [(number, line) for line in watch.step(seconds)]
    (at, slow), (later, back) = said
    assert slow.startswith("rank 1 is slow: ") and "more compute time than its peers, the median of 10 steps" in slow
    assert back == "rank 1 keeps pace again"
    assert 14 <= at <= 20 and 30 <= later <= 40


def paced(mesh, folder):
    """Twelve steps of 20 ms and an all-reduce; rank 1 is slowed by another 20 ms. Compute and wall seconds by step."""
    watch, injector, found = Stopwatch(mesh), Injector([Fault("slow", 1, 0, amounts={"seconds": 0.02})], mesh, folder), []
    for number in range(1, 13):
        began = time.monotonic()
        with watch.step(), injector.step(number, nn.Linear(1, 1)):
            time.sleep(0.02)
            comm.all_reduce(torch.ones(100), mesh.world)
        found.append((watch.seconds, time.monotonic() - began))
    injector.close()
    return found


def test_a_real_slow_rank_is_found_though_all_steps_last_the_same(tmp_path):
    rows = list(zip(*ranks.run(paced, 3, tmp_path), strict=True))
    assert [one.rank for one in slow_ranks([[compute for compute, _ in row] for row in rows])] == [1]
    assert slow_ranks([[wall for _, wall in row] for row in rows]) == []
