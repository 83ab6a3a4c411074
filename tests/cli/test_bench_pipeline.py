"""`minidist bench pipeline`, from words to rows: one schedule against torch's, on two ranks, at a size for trying."""

import json

import pytest


def test_one_schedule_as_a_row(minidist):
    said = minidist("bench", "pipeline", "--schedule", "zb-h1", "--sizes", "tiny", "--pairs", 1, "--json")
    assert said.code == 0, said.err
    (row,) = map(json.loads, said.out.splitlines())
    assert (row["name"], row["peer"], row["size"]) == ("zb-h1", "ScheduleInterleavedZeroBubble", "tiny")
    assert {"time_ratio", "bytes_ratio", "loss_difference"} <= set(row)
    assert "zb-h1, tiny: pair 1/1" in said.err and "zb-h1, tiny: bytes counted" in said.err


def test_sides_that_differ_fail_and_no_time_is_told(minidist, monkeypatch):
    from minidist.bench import pipeline

    monkeypatch.setattr(pipeline, "LOSS_BOUND", -1.0)  # no difference is small enough
    said = minidist("bench", "pipeline", "--schedule", "1f1b", "--sizes", "tiny", "--pairs", 1)
    assert said.code == 1 and said.out == ""
    assert "1f1b and Schedule1F1B do not compute the same" in said.err and "Traceback" not in said.err


BAD = {
    ("--ranks", 1): "--ranks 1: give at least 2",
    ("--ranks", 5): "--ranks 5: with two stages each, the model of size small is for 4 at most",
    ("--schedule", "ring"): "--schedule ring: use one of gpipe, 1f1b",
    ("--sizes", "huge"): "no size 'huge'",
}


@pytest.mark.parametrize("words", BAD, ids=lambda words: " ".join(map(str, words)))
def test_bad_options_are_refused_in_one_line(minidist, words):
    said = minidist("bench", "pipeline", *words)
    assert said.code == 2 and said.out == ""
    assert BAD[words] in said.err and said.err.count("\n") == 1
