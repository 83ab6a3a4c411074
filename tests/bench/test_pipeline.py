"""`minidist bench pipeline`: each schedule computes what torch's does, and gets a row; what cannot be compared is refused."""

import json
from dataclasses import replace

import pytest

from minidist import ranks
from minidist.bench import pipeline, report, zero
from minidist.parallel.pipeline import schedules
from minidist.train.build import runtime
from minidist.train.step import Step


def test_every_schedule_computes_what_torchs_computes_and_gets_a_row():
    rows = pipeline.run(2, 1, "tiny")
    assert [one.name for one in rows] == list(schedules.NAMES)
    assert len({one.peer for one in rows}) == len(rows)
    for one in rows:
        assert (one.size, one.ranks, one.pairs) == ("tiny", 2, 1)
        assert 0 <= one.loss_difference <= one.loss_bound == 1e-5
        assert one.time_ratio > 0 and one.ours_s > 0 and one.peer_s > 0
        assert one.ours_bytes > 100_000 and one.bytes_ratio == one.ours_bytes / one.peer_bytes
    assert [json.loads(line)["name"] for line in report.to_json(rows).splitlines()] == list(schedules.NAMES)


STEPS = 3


def both(mesh, config, limit):
    """Losses and norms of gradients of a few steps: ours, and those of a peer that clips at another limit."""
    batches, norms, clip = [zero.batch_of(config, 0, number) for number in range(STEPS)], [], pipeline.clip
    step, theirs = Step(runtime(mesh, config), mesh, config), replace(config, optim=replace(config.optim, clip=limit))
    done = [step.run([batch.rows(k, k + 1) for k in range(pipeline.MICRO_BATCHES)]) for batch in batches]
    pipeline.clip = lambda *given: norms.append(float(clip(*given)))
    try:
        side = pipeline.torchs(mesh, theirs, batches)
        losses = [side(number) for number in range(STEPS)]
    finally:
        pipeline.clip = clip
    return [one.loss for one in done], losses, [one.grad_norm for one in done], norms


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])  # the last stage on the last rank, and on the first
def test_gradients_are_the_same_and_wrong_ones_would_show(name):
    """Each step's loss depends on the gradients of those before; AdamW hardly sees their scale, so their norms are compared."""
    config = pipeline.config_of({"pp": 2, "schedule": name}, pipeline.SIZES["tiny"], 2, STEPS, pipeline.MICRO_BATCHES)
    for limit, same in ((config.optim.clip, True), (1e-9, False)):  # so small a gradient AdamW's eps does see
        seen = ranks.run(both, 2, config, limit, layout=config.layout, check=False)
        ours, theirs = seen[0][0], [sum(parts) / 2 for parts in zip(*(one[1] for one in seen), strict=True)]
        apart = [abs(a - b) / a for a, b in zip(ours, theirs, strict=True)]
        assert apart[0] < 1e-6, "the first loss comes before any update"
        assert all(off < pipeline.LOSS_BOUND if same else off > 10 * pipeline.LOSS_BOUND for off in apart[1:])
        for _, _, norms, others in seen:
            assert norms[0] == pytest.approx(others[0], rel=1e-5), "the peer's gradients are sums, as ours"


BAD = {
    (1, 1, "tiny", None): "--ranks 1: give at least 2",
    (2, 0, "tiny", None): "--pairs 0: give at least 1",
    (2, 1, "small,huge", None): "no size 'huge', use some of tiny, small, large",
    (2, 1, "small", "2f2b"): "--schedule 2f2b: use one of gpipe, 1f1b, interleaved, bfs, zb-h1, zb-v, dualpipe-v",
    (4, 1, "small,tiny", None): "--ranks 4: with two stages each, the model of size tiny is for 2 at most",
    (5, 1, "small", "1f1b"): "--ranks 5: with two stages each, the model of size small is for 4 at most",
}


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(map(str, words)))
def test_what_cannot_be_measured_is_refused_before_any_rank_starts(words):
    with pytest.raises(ValueError, match=BAD[words]):
        pipeline.check(*words)
    pipeline.check(4, 1, "small,large")
