"""`minidist bench zero`, from words to rows: every stage against torch's own, on two ranks, at a size for trying."""

import json

import pytest

KEYS = {
    *("name", "peer", "size", "ranks", "pairs", "time_ratio", "time_ratio_low", "time_ratio_high", "ours_s", "peer_s"),
    *("bytes_ratio", "ours_bytes", "peer_bytes", "loss_difference", "loss_bound"),
}


def test_every_stage_computes_what_torch_computes_and_gets_a_row(minidist):
    said = minidist("bench", "zero", "--sizes", "tiny", "--pairs", 2, "--json")
    assert said.code == 0, said.err
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["name"] for row in rows] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert len({row["peer"] for row in rows}) == 4
    for row in rows:
        assert set(row) == KEYS
        assert (row["size"], row["ranks"], row["pairs"]) == ("tiny", 2, 2)
        assert 0 <= row["loss_difference"] <= row["loss_bound"] == 1e-4
        assert row["time_ratio_low"] <= row["time_ratio"] <= row["time_ratio_high"]
        assert row["time_ratio_low"] > 0 and row["ours_s"] > 0 and row["peer_s"] > 0
        assert row["ours_bytes"] > 100_000 and row["bytes_ratio"] == row["ours_bytes"] / row["peer_bytes"]
    assert "stage 0, tiny: pair 2/2" in said.err and "stage 3, tiny: bytes counted" in said.err


def test_one_stage_as_a_table_that_ends_with_where_we_lose(minidist):
    said = minidist("bench", "zero", "--stage", 3, "--sizes", "tiny", "--pairs", 1)
    assert said.code == 0, said.err
    head, line, empty, *verdict = said.out.splitlines()
    assert "time ratio" in head and "bytes ratio" in head
    assert line.split()[:3] == ["stage", "3", "tiny"] and "FSDP2" in line
    assert empty == "" and verdict[0].startswith(("We lose nowhere", "Where we lose:"))


def test_sides_that_differ_fail_and_no_time_is_told(minidist, monkeypatch):
    from minidist.bench import zero

    monkeypatch.setattr(zero, "LOSS_BOUND", -1.0)  # no difference is small enough
    said = minidist("bench", "zero", "--stage", 0, "--sizes", "tiny", "--pairs", 1)
    assert said.code == 1 and said.out == ""
    assert "do not compute the same" in said.err and "Traceback" not in said.err


BAD = {
    ("--ranks", 1): "--ranks 1: give at least 2",
    ("--ranks", 65): "from 1 to 64",
    ("--pairs", 0): "--pairs 0: give at least 1",
    ("--stage", 4): "--stage 4: ZeRO has stages 0, 1, 2 and 3",
    ("--sizes", "small,huge"): "no size 'huge', use some of tiny, small, large",
    ("--sizes", ""): "no size ''",
    ("--stages", 1): "see `minidist",
}


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(map(str, words)))
def test_bad_options_are_refused_in_one_line(minidist, words):
    said = minidist("bench", "zero", *words)
    assert said.code == 2 and said.out == ""
    assert BAD[words] in said.err and said.err.count("\n") == 1


def test_help_names_the_options_and_the_kinds(minidist):
    said = minidist("bench", "zero", "--help")
    assert said.code == 0
    for word in ("--ranks", "--pairs", "--sizes", "--stage", "--json", "small", "large"):
        assert word in said.out
    said = minidist("bench")
    assert said.code == 2 and "zero" in said.out
