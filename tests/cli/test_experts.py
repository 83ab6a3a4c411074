"""A model with experts from the command line: one rank and two train alike, and its selection bias is in its files."""

import json
from pathlib import Path

import pytest

from minidist import checkpoint, ranks

EXPERTS = [
    f"--model.{setting}"
    for setting in ("experts=4", "ffn=16", "shared_ffn=8", "balance_loss=0.01", "z_loss=0.001", "bias_rate=0.05")
]


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    yield
    ranks.stop()


def rows(name):
    return [json.loads(line) for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", ["--layout.ep=2", "--layout.pp=2"])
def test_one_rank_and_two_train_alike_and_evaluate_from_their_files(minidist, recipe, layout):
    assert minidist("train", recipe, "--run.name=one", *EXPERTS).code == 0
    assert minidist("train", recipe, "--run.name=two", "--ranks=2", layout, *EXPERTS).code == 0
    for a, b in zip(rows("one"), rows("two"), strict=True):
        for key in ("loss", "grad_norm", "balance_loss", "z_loss", "busiest"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
        assert a["dropped"] == 0 and 0.8 < a["balance_loss"] < 2 and 1 <= a["busiest"] <= 4
    biases = []
    for name in ("one", "two"):
        _, tensors = checkpoint.load(checkpoint.resolve(Path("runs") / name))
        biases.append([tensors[f"blocks.{layer}.ffn.router.bias"].tolist() for layer in range(2)])
        said = json.loads(minidist("eval", f"runs/{name}", "--json").out)
        assert said["loss"] == pytest.approx(rows(name)[-1]["val_loss"], rel=1e-6)
    assert biases[0] == biases[1] and any(any(bias) for bias in biases[0])
    spoken = [minidist("generate", f"runs/{name}", "--tokens=8", "--temperature=0").out for name in ("one", "two")]
    assert spoken[0] == spoken[1]
