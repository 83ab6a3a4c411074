"""Figures of the whole job, and the file they go to: right at the edges, whole lines only."""

import json
import math

import pytest

from minidist.train import metrics


def test_loss_and_perplexity_come_from_the_whole_sums():  # C35: 3.794, not 7.389 (mean of ranks) nor 11.40 (mean of exps)
    loss_sum, tokens = 10 + 6, 10 + 2
    assert metrics.perplexity(loss_sum, tokens) == pytest.approx(3.794, abs=5e-4)
    assert metrics.mean_loss(loss_sum, tokens) == pytest.approx(16 / 12)
    assert metrics.mean_loss(0.0, 0) is None and metrics.perplexity(0.0, 0) is None
    assert metrics.perplexity(1e6, 1) == math.inf


def test_mfu_counts_the_jobs_tokens_against_all_devices_or_says_nothing():
    assert metrics.mfu(1000, 6e6, 2.0, 4, 1e9) == pytest.approx(0.75)
    assert metrics.mfu(1000, 6e6, 2.0, 4, None) is None
    assert metrics.tokens_per_s(300, 1.5) == 200


def test_rows_are_visible_at_once_and_odd_numbers_stay_valid_json(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = metrics.Writer(path)
    row = {"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "mfu": None, "skipped": True}
    writer.write(row)
    line = path.read_text()
    assert line.endswith("\n")
    read = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert math.isnan(float(read["loss"])) and float(read["grad_norm"]) == math.inf and float(read["lr"]) == -math.inf
    assert read["mfu"] is None and read["skipped"] is True
    writer.write({"step": 2})
    assert [row["step"] for row in metrics.read(path)] == [1, 2]
    writer.close()


def test_a_torn_last_line_is_left_out_and_damage_elsewhere_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert list(metrics.read(path)) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2: damaged"):
        list(metrics.read(path))
