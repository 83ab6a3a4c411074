"""The sample stream and the loader: cases C09-C13, exact resume, and a thread that never outlives its loader."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

from minidist.data import Batch, Loader, TokenFile, Windows, micro_batches, shares, validation_batches
from minidist.model.loss import IGNORE


@pytest.fixture
def windows(numbered):
    """windows(n, seed): a stream with exactly n windows of 4 + 1 tokens an epoch."""
    return lambda n, seed=0: Windows(numbered(n * 4 + 1), 4, seed)


def ids_of(step: list[Batch]) -> list[int]:
    """Sample ids of a rank's step, without the rows of empty micro-batches."""
    return [i for batch in step for i in batch.samples.tolist() if i >= 0]


def steps(windows, dp, global_batch, micro_batch, count, position=0) -> list[list[list[int]]]:
    """[step][rank] -> sample ids, from one loader a rank."""
    loaders = [Loader(windows, rank, dp, global_batch, micro_batch, position, prefetch=0) for rank in range(dp)]
    return [[ids_of(next(loader)) for loader in loaders] for _ in range(count)]


def test_every_epoch_is_a_permutation_named_by_seed_and_epoch(windows):
    """C11: 2 ranks, 20 ids, 3 epochs, seeds 1 and 2; no call tells the loader an epoch. Ranks are disjoint."""
    orders = {}
    for seed in (1, 2):
        got = steps(windows(20, seed), dp=2, global_batch=4, micro_batch=2, count=15)
        assert all(not set(a) & set(b) for a, b in got)
        stream = [i for step in got for rank in step for i in rank]
        for epoch in range(3):
            orders[seed, epoch] = tuple(stream[20 * epoch : 20 * epoch + 20])
            assert sorted(orders[seed, epoch]) == list(range(20))
    assert len(set(orders.values())) == 6


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_in_a_later_epoch(windows, prefetch):
    """C12: 20 samples, 2 ranks, batch 2; stopped two steps into epoch 1, the new process goes on with the same ids."""
    make = lambda position: [Loader(windows(20), r, 2, 2, 1, position, prefetch) for r in range(2)]  # noqa: E731
    through = make(0)
    whole = [[ids_of(next(loader)) for loader in through] for _ in range(40)]
    first = make(0)
    before = [[ids_of(next(loader)) for loader in first] for _ in range(12)]
    assert first[0].position == 24  # what was handed out, not what was read ahead
    again = make(first[0].position)
    after = [[ids_of(next(loader)) for loader in again] for _ in range(28)]
    assert before + after == whole
    for loader in (*through, *first, *again):
        loader.close()


def test_resume_on_other_world_sizes(windows):
    """C13: saved mid-epoch on 4 ranks, resumed on 2, then on 3; each step has the same set of ids as without a stop."""
    stream = windows(40)
    together = lambda got: [sorted(i for rank in step for i in rank) for step in got]  # noqa: E731
    whole = together(steps(stream, 1, 8, 8, count=12))
    position, pieces = 0, []
    for dp, micro, count in ((4, 2, 3), (2, 3, 2), (3, 1, 4), (8, 1, 3)):
        pieces += together(steps(stream, dp, 8, micro, count, position))
        position += 8 * count
    assert pieces == whole
    assert sorted(i for step in whole[:5] for i in step) == list(range(40))


def test_shares():
    """Sizes differ by at most one, larger ones first, and add up."""
    assert shares(9, 2) == [5, 4] and shares(24, 1) == [24] and shares(7, 7) == [1] * 7 and shares(11, 4) == [3, 3, 3, 2]


def test_a_batch_smaller_than_dp_is_refused(windows):
    """One line with key, value and remedy, when the loader is made and not in its thread."""
    with pytest.raises(ValueError, match=r"train.global_batch=3 is smaller than dp=4.*use train.global_batch>=4") as caught:
        Loader(windows(20), 0, 4, 3, 1)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"train.micro_batch=0"):
        Loader(windows(20), 0, 2, 4, 0)


def test_ranks_have_equally_many_micro_batches(windows):
    """C09: 5 and 4 samples in pieces of 1: five micro-batches on both, the last of rank 1 without a valid target."""
    loaders = [Loader(windows(20), rank, 2, 9, 1, prefetch=0) for rank in range(2)]
    ours = [next(loader) for loader in loaders]
    assert [len(step) for step in ours] == [5, 5]
    assert [[batch.valid for batch in step] for step in ours] == [[4] * 5, [4] * 4 + [0]]
    assert ours[1][4].samples.tolist() == [-1] and (ours[1][4].targets == IGNORE).all()
    for global_batch in range(3, 30):
        for micro in range(1, 8):
            plans = [micro_batches(2, rank, 3, global_batch, micro) for rank in range(3)]
            assert len({len(plan) for plan in plans}) == 1 and max(len(m) for plan in plans for m in plan) <= micro
            flat = [i for plan in plans for m in plan for i in m]
            assert flat == list(range(2 * global_batch, 3 * global_batch))


def test_windows_meet_without_gap_or_repeat(windows):
    """Every token but the first is a target exactly once an epoch; a sample is the window its id names."""
    stream = windows(11)
    targets = []
    for i in range(len(stream)):
        sample, tokens = stream.sample(i)
        assert tokens.tolist() == [sample * 4 + j + 1 for j in range(5)]
        targets += tokens[1:].tolist()
    assert sorted(targets) == list(range(2, 46))
    assert stream.sample(11)[0] in range(11)  # the stream does not end


def test_validation_without_repeats_or_drops(numbered):
    """C10: 10 windows with values 0..9 on 4 ranks, 3 on 8 ranks: means 4.5 and 1.0, and equally many batches a rank."""
    for count, dp, mean in ((10, 4, 4.5), (3, 8, 1.0)):
        ranks = [list(validation_batches(numbered(count * 4 + 1), 4, 1, rank, dp)) for rank in range(dp)]
        assert len({len(batches) for batches in ranks}) == 1
        weighted = [(b.samples.clamp_min(0) * b.valid, b.valid) for batches in ranks for b in batches]
        assert float(sum(w for w, _ in weighted)) / sum(n for _, n in weighted) == mean


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_validation_covers_every_token_once(numbered, dp, micro_batch):
    """The last window is short (27 = 6 x 4 + 2 targets): what lies past the end does not count, what is there does."""
    file = numbered(27)
    batches = [b for rank in range(dp) for b in validation_batches(file, 4, micro_batch, rank, dp)]
    targets = torch.cat([b.targets.flatten() for b in batches])
    assert sorted(targets[targets != IGNORE].tolist()) == list(range(2, 28))
    assert min(int(b.tokens.min()) for b in batches) >= 0  # a batch of one row: marking its targets left its tokens alone
    few = [b for rank in range(dp) for b in validation_batches(file, 4, micro_batch, rank, dp, limit=3)]
    assert sorted(i for b in few for i in b.samples.tolist() if i >= 0) == [0, 2, 4]
    assert max(i for b in validation_batches(file, 4, 2, limit=99) for i in b.samples.tolist()) == 6


def test_documents_and_positions(tmp_path):
    """Positions restart at a separator; documents are numbered; None when no second document begins inside a row."""
    windows = np.array([[5, 6, 0, 7, 8, 0, 0, 9, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0]], np.uint8)
    batch = Batch.of(windows, np.array([3, 1]), separator=0)
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1], list(range(8))]
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1, 2, 3, 3], [1] * 8]
    assert batch.targets.tolist() == windows[:, 1:].tolist() and batch.tokens.tolist() == windows[:, :-1].tolist()
    assert all(x.dtype == torch.int64 for x in vars(batch).values())
    plain = Batch.of(windows[1:], np.array([1]), separator=0)  # a separator first or as the last target is none inside
    assert plain.documents is None and plain.positions.tolist() == [list(range(8))]
    row = batch.rows(1, 2)
    assert row.samples.tolist() == [1] and row.index.tolist() == list(range(8)) and row.documents.tolist() == [[1] * 8]
    assert Batch.empty(2, 8).valid == 0 and batch.valid == 16 and plain.to("cpu").documents is None


def test_an_error_of_the_thread_reaches_the_consumer(windows, monkeypatch):
    """It is raised by next, after the steps that were read before it; the loader is closed then."""
    stream, real = windows(20), Windows.read
    calls = []

    def failing(self, ids):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("disk gone")
        return real(self, ids)

    monkeypatch.setattr(Windows, "read", failing)
    loader = Loader(stream, 0, 1, 4, 4, prefetch=2)
    next(loader), next(loader)
    with pytest.raises(OSError, match="disk gone"):
        next(loader)
    assert loader.position == 8 and not threads()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "minidist-loader"]


def test_no_thread_is_left(windows):
    """Closed, left by `with`, or forgotten: the thread ends; and it reads ahead no further than `prefetch` (+1 in hand)."""
    stream = windows(20)
    with Loader(stream, 0, 1, 4, 4) as loader:
        next(loader)
        assert len(threads()) == 1
    assert not threads()
    loader.close()
    forgotten = Loader(stream, 0, 1, 4, 4)
    next(forgotten)
    del forgotten
    gc.collect()
    assert not threads()
    Loader(stream, 0, 1, 4, 4)  # made and never used
    assert not threads()


def test_reading_ahead_is_bounded(windows, monkeypatch):
    """prefetch=2: after the first step at most 1 + 2 in the queue + 1 in the thread's hand have been read."""
    reads, real = [], Windows.read
    monkeypatch.setattr(Windows, "read", lambda self, ids: reads.append(1) or real(self, ids))
    with Loader(windows(20), 0, 1, 4, 4, prefetch=2) as loader:
        next(loader)
        deadline = time.monotonic() + 5
        while len(reads) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(reads) == 4


def test_too_short_for_one_sequence(tmp_path):
    """The remedy has the largest seq_len that fits."""
    TokenFile.build(tmp_path / "t", [np.arange(1, 7)], vocab=256, separator=0)
    with pytest.raises(ValueError, match=r"8 tokens are fewer.*train.seq_len=8.*use train.seq_len<=7"):
        Windows(TokenFile(tmp_path / "t"), 8, 0)
    assert len(Windows(TokenFile(tmp_path / "t"), 7, 0)) == 1
    with pytest.raises(ValueError, match=r"train\.seq_len=0"):
        Windows(TokenFile(tmp_path / "t"), 0, 0)
    TokenFile.build(tmp_path / "none", [], vocab=256, separator=0)
    with pytest.raises(ValueError, match="held-out tokens are too few"):
        validation_batches(TokenFile(tmp_path / "none"), 8, 1)
