"""`minidist bench attention`, from words to rows: each way against torch's SDPA, on two ranks, at a size for trying."""

import json

import pytest


def test_every_way_computes_what_torch_computes_and_gets_a_row(minidist):
    said = minidist("bench", "attention", "--sizes", "tiny", "--pairs", 2, "--json")
    assert said.code == 0, said.err
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["name"] for row in rows] == ["ring", "gather", "ulysses"]
    for row in rows:
        assert (row["peer"], row["size"], row["ranks"], row["pairs"]) == ("SDPA, one process", "tiny", 2, 2)
        assert 0 <= row["loss_difference"] <= row["loss_bound"] == 1e-5
        assert 0 < row["time_ratio_low"] <= row["time_ratio"] <= row["time_ratio_high"]
        assert row["ours_bytes"] > 10_000 and row["bytes_ratio"] == row["ours_bytes"] / row["peer_bytes"] < 1
    assert "ring, tiny: pair 2/2" in said.err and "ulysses, tiny: bytes counted" in said.err


def test_a_wrong_gradient_shows_in_the_losses():
    """Each step's loss depends on the gradients of those before, so the bench cannot call equal what is not."""
    import torch

    from minidist.bench.attention import LOSS_BOUND, SIZES, descent, problem, torchs

    def half_the_gradient(q, k, v):
        out, _ = torchs(q, k, v)
        return (out + out.detach()) / 2, None

    right, wrong = (descent(way, *problem(SIZES["tiny"], torch.device("cpu"))) for way in (torchs, half_the_gradient))
    first, *others = ((right(number), wrong(number)) for number in range(3))
    assert first[0] == first[1]
    assert all(abs(a - b) > 1000 * LOSS_BOUND * a for a, b in others) and others[-1][0] < first[0]


def test_sides_that_differ_fail_and_no_time_is_told(minidist, monkeypatch):
    from minidist.bench import attention

    monkeypatch.setattr(attention, "LOSS_BOUND", -1.0)  # no difference is small enough
    said = minidist("bench", "attention", "--way", "gather", "--sizes", "tiny", "--pairs", 1)
    assert said.code == 1 and said.out == ""
    assert "gather and SDPA, one process do not compute the same" in said.err and "Traceback" not in said.err


BAD = {
    ("--ranks", 1): "--ranks 1: the 12 heads and the sequences divide by 2, 3, 4, 6, 12, use one",
    ("--pairs", 0): "--pairs 0: give at least 1",
    ("--way", "star"): "--way star: use one of ring, gather, ulysses",
    ("--sizes", "huge"): "no size 'huge', use some of tiny, small, large",
}


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(map(str, words)))
def test_bad_options_are_refused_in_one_line(minidist, words):
    said = minidist("bench", "attention", *words)
    assert said.code == 2 and said.out == ""
    assert BAD[words] in said.err and said.err.count("\n") == 1
