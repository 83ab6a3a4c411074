"""Bytes held, as counted by storage; steps in turns; and what the ratios make of them."""

import threading
import time

import pytest
import torch

from minidist import ranks
from minidist.bench import report
from minidist.bench.measure import COUNTED, Held, Series, held_in_a_step, interleave

KB = 1024
FLOATS = KB // 4  # fp32 elements of a kilobyte


def test_views_of_a_storage_count_once():
    with Held() as held:
        x = torch.ones(4 * FLOATS)
        first, second = x[:FLOATS], x.view(4, FLOATS)
        assert held.now == 4 * KB
        first.add_(second[1])
    assert held.now == held.peak == 4 * KB


def test_a_view_is_as_large_as_the_storage_it_keeps_alive():
    x = torch.ones(4 * FLOATS)[:FLOATS]
    with Held() as held:
        x.add_(1)
    assert held.now == 4 * KB


def test_a_freed_storage_counts_no_more_and_stays_in_the_peak():
    with Held() as held:
        x = torch.ones(2 * FLOATS)
        y = x + 1
        assert held.now == 4 * KB
        del x
        assert held.now == 2 * KB
        y.add_(1)
        assert held.peak == 4 * KB
        del y
        assert (held.now, held.peak) == (0, 4 * KB)


def test_a_storage_lives_as_long_as_autograd_keeps_it():
    w = torch.ones(FLOATS, requires_grad=True)
    with Held() as held:
        loss = (w * 2).exp().sum()  # exp keeps its output, and Python holds no tensor on it
        assert held.now >= 2 * KB
        loss.backward()
        del loss
        assert held.now == 2 * KB  # w and its gradient


def test_a_resized_storage_counts_at_its_present_size():
    with Held() as held:
        x = torch.ones(2 * FLOATS)
        x.untyped_storage().resize_(0)
        assert held.now == 0
        x.untyped_storage().resize_(8 * KB)
        assert held.now == 8 * KB
        x.resize_(2 * FLOATS).fill_(1)
    assert held.peak == 8 * KB


def test_what_was_made_before_counts_from_its_first_use_on():
    x, unused = torch.ones(FLOATS), torch.ones(FLOATS)
    with Held() as held:
        assert held.now == 0
        x.add_(1)
        assert held.now == KB
    assert len(unused) == FLOATS


def test_restart_forgets_the_peak_and_not_what_is_held():
    with Held() as held:
        x = torch.ones(FLOATS)
        y = x + 1
        del y
        assert held.peak == 2 * KB
        held.restart()
        assert held.peak == KB
        x.mul(2)
    assert held.peak == 2 * KB


def test_an_address_that_is_used_again_counts_once():
    with Held() as held:
        for _ in range(20):
            x = torch.ones(FLOATS)
            del x
        x = torch.ones(FLOATS)
        assert held.now == KB == x.untyped_storage().nbytes()


def test_what_other_threads_made_counts_when_it_is_used():
    made = []
    with Held() as held:
        thread = threading.Thread(target=lambda: made.append(torch.ones(FLOATS)))
        thread.start()
        thread.join()
        made[0].add_(1)
    assert held.now == KB


def held_by_fsdp(mesh):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(FLOATS, 16, bias=False)  # 16 KB whole, 8 KB a shard on two ranks
    fully_shard(model, mesh=init_device_mesh("cpu", (mesh.world.size,)))
    x = torch.ones(1, FLOATS)
    with Held() as held:
        model(x)  # the root keeps its weights for backward
        gathered = held.now
        model.reshard()
        freed, deadline = held.now, time.monotonic() + 20
        while freed > 10 * KB and time.monotonic() < deadline:  # gloo's thread still holds what it gathered
            time.sleep(0.01)
            freed = held.now
        local = model.weight.to_local().untyped_storage().nbytes()
    return gathered, freed, local


def test_a_dtensor_counts_as_its_local_shard_and_gathered_weights_until_they_are_freed():
    for gathered, freed, local in ranks.run(held_by_fsdp, 2):
        assert gathered >= 16 * KB + freed
        assert (local, freed) == (8 * KB, 9 * KB)  # the shard and the input


def test_peak_of_a_step_is_that_of_the_leanest_after_the_first():
    seen, sizes = [], {5: 2, 6: 8, 7: 4, 8: 6}  # the first does not count: it has still to find what there is

    def side(number):
        seen.append(number)
        x = torch.ones(sizes[number] * FLOATS)
        return float(x[0])

    assert held_in_a_step(side, 5) == (4 * KB, [1.0, 1.0, 1.0, 1.0])
    assert seen == [5, 6, 7, 8]


def test_steps_are_taken_in_turns_whose_order_alternates():
    said, steps = [], []

    def side(name):
        def step(number):
            steps.append((name, number))
            return float(number)

        return step

    meet = lambda: steps.append("meet")  # noqa: E731
    series = interleave([side("a"), side("b")], pairs=2, warmups=2, meet=meet, say=said.append)
    order = [step for step in steps if step != "meet"]
    timed = [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("b", 3), ("a", 3)]
    assert order == [*timed, *((name, number) for name in "ab" for number in range(4, 4 + COUNTED))]
    assert steps[:16] == [item for step in timed for item in ("meet", step)]  # all ranks together before every one of them
    assert [len(seconds) for seconds in series.seconds] == [2, 2]
    assert series.losses == ([float(number) for number in range(4 + COUNTED)],) * 2
    assert len(series.peaks) == 2 and len(said) == 5


def seen(ours, theirs, losses=((2.0, 1.0), (2.0, 1.0)), peaks=(30, 20)):
    return Series(0, (ours, theirs), tuple(list(side) for side in losses), list(peaks))


def row(*series):
    return report.row("stage 9", "peer", "small", series, 1e-4)


def test_ratios_are_medians_over_pairs_and_not_ratios_of_medians():
    one = row(seen([1.0, 9.0, 3.0], [2.0, 3.0, 3.0]))  # pairs 0.5, 3, 1
    assert one.time_ratio == 1.0 and (one.ours_s, one.peer_s) == (3.0, 3.0)
    assert (one.time_ratio_low, one.time_ratio_high) == (0.75, 2.0)
    assert row(seen([1.0, 1.0, 5.0], [4.0, 2.0, 3.0])).time_ratio == 0.5  # medians: 1 / 3


def test_a_step_lasts_as_long_as_its_slowest_rank_and_bytes_are_those_of_the_fullest():
    one = row(seen([1.0, 4.0], [1.0, 1.0], peaks=(30, 20)), seen([2.0, 2.0], [1.0, 1.0], peaks=(10, 40)))
    assert one.ours_s == 3.0 and one.time_ratio == 3.0
    assert (one.ours_bytes, one.peer_bytes, one.bytes_ratio) == (30, 40, 0.75)
    assert (one.ranks, one.pairs) == (2, 2)


def test_unequal_losses_are_refused_before_any_time():
    same = seen([1.0], [1.0])
    assert row(same, seen([1.0], [1.0], losses=((2.0, 1.00009), (2.0, 1.0)))).loss_difference == pytest.approx(9e-5)
    for bad in (1.00011, 0.99989, float("nan")):
        with pytest.raises(report.Unequal, match=r"stage 9 and peer .* step 1 .* more than 1e-04.*parity"):
            row(same, seen([1.0], [1.0], losses=((2.0, bad), (2.0, 1.0))))


def test_the_verdict_names_every_loss_and_only_losses():
    good = row(seen([1.0], [1.0], peaks=(20, 20)))
    assert report.verdict([good]).startswith("We lose nowhere")
    slow = row(seen([2.0, 2.1], [1.0, 1.0], peaks=(20, 20)))
    unsure = row(seen([1.2, 0.9, 1.1], [1.0, 1.0, 1.0], peaks=(21, 20)))
    lines = report.verdict([good, slow, unsure]).splitlines()
    assert lines[0] == "Where we lose:" and len(lines) == 4
    assert "slower" in lines[1] and "2.050" in lines[1] and "spread" not in lines[1]
    assert "slower" in lines[2] and "1.100" in lines[2] and "within the spread" in lines[2]
    assert "larger" in lines[3] and "1.050" in lines[3]


def test_the_table_has_a_line_a_row_and_aligned_columns():
    lines = report.table([row(seen([1.0], [2.0])), row(seen([1.0], [200.0]))]).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert "0.500" in lines[1] and "1.500" in lines[1]
