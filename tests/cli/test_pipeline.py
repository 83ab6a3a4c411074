"""Pipelines from the command line: the same losses as one rank, what is said of them, and schedules from files."""

import json
from pathlib import Path

import pytest

from minidist import ranks
from minidist.parallel.pipeline import schedules, text


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    yield
    ranks.stop()


def losses(name):
    return [json.loads(line)["loss"] for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]


def test_two_stages_train_like_one_rank_and_say_what_they_leave_idle(minidist, recipe):
    assert minidist("train", recipe, "--run.name=one").code == 0
    for number, (said, *settings) in enumerate(
        (
            ("1f1b on 2 ranks, stages of 1, 1 layers, micro-batches a step: 3. With equal stages 33.3% of ideal",),
            ("zb-h1 on 2 ranks", "--layout.schedule=zb-h1"),
            ("by rank: 3, 3", "--layout.schedule=gpipe"),
            ("3 times the gradient bytes of stage 1, and weights are gathered", "--layout.zero=3"),
        )
    ):
        name = f"--run.name=two{number}"
        done = minidist("train", recipe, name, "--ranks=2", "--layout.pp=2", *settings)
        assert done.code == 0 and said in done.out
        assert losses(f"two{number}") == pytest.approx(losses("one"), rel=1e-4)


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_a_schedule_from_a_file(minidist, recipe, tmp_path, suffix):
    plan = schedules.make("gpipe", 2, 3)
    file = tmp_path / f"mine.{suffix}"
    file.write_text(text.to_csv(plan) if suffix == "csv" else text.dumps(plan))
    options = ["train", recipe, "--ranks=2", "--layout.pp=2", f"--layout.schedule={file}"]
    assert minidist(*options, "--run.name=file").code == 0
    assert minidist("train", recipe, "--run.name=one").code == 0
    assert losses("file") == pytest.approx(losses("one"), rel=1e-4)
    refused = minidist(*options, "--train.micro_batch=1")
    assert refused.code == 2 and "written for 3 micro-batches, a step of this run has 5" in refused.err


def test_a_schedule_that_deadlocks_is_refused_before_any_rank_starts(minidist, recipe, tmp_path):
    file = tmp_path / "bad.txt"
    file.write_text("F0 B0 F1 F2 B1 B2\nF1 F0 B0 B1 F2 B2\n")
    refused = minidist("train", recipe, "--ranks=2", "--layout.pp=2", f"--layout.schedule={file}")
    assert refused.code == 2 and f"layout.schedule = {file}: " in refused.err
    assert "B0 (number 2 of rank 0's list) waits for B0" in refused.err and not refused.out


@pytest.mark.full
def test_eight_ranks_on_three_axes_lie_on_one_ranks_curve(minidist):
    """The shipped corpus and recipe: pp 2 x tp 2 x dp 2 with ZeRO 1."""
    short = ["--train.steps=20", "--train.eval_every=0", "--train.sample_tokens=0", "--metrics.plot=false"]
    axes = ["--ranks=8", "--layout.pp=2", "--layout.tp=2", "--layout.dp=2", "--layout.zero=1", "--train.micro_batch=3"]
    for name, settings in (("one", []), ("eight", axes)):
        assert minidist("train", "tiny", f"--run.name={name}", *short, *settings).code == 0
    assert losses("eight") == pytest.approx(losses("one"), rel=1e-4)
