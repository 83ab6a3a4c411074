"""`minidist bench tensor`: every way computes what DTensor computes, and gets a row."""

import json

import pytest


def test_every_way_computes_what_dtensor_computes_and_gets_a_row(minidist):
    said = minidist("bench", "tensor", "--sizes", "tiny", "--pairs", 1, "--json")
    assert said.code == 0, said.err
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["name"] for row in rows] == ["tp", "tp, sp kept", "tp, sp"]
    for row in rows:
        assert "DTensor" in row["peer"]
        assert 0 <= row["loss_difference"] <= row["loss_bound"] == 1e-4
        assert row["ours_s"] > 0 and row["peer_s"] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--ranks", 1), "--ranks 1: give at least 2"),
        (("--pairs", 0), "--pairs 0: give at least 1"),
        (("--sizes", "huge"), "no size 'huge'"),
        (("--ranks", 3), "layout.tp = 3 does not divide model.heads"),
    ],
)
def test_bad_options_are_refused_in_one_line(minidist, words, text):
    said = minidist("bench", "tensor", *words)
    assert said.code == 2 and said.out == ""
    assert text in said.err and said.err.count("\n") == 1
