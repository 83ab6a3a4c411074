"""`minidist ckpt` and `minidist train --resume`, as a person uses them, bad input included."""

import json
import shutil

import pytest
import torch

from minidist import checkpoint
from minidist.core.slices import Slice


@pytest.fixture
def run(trained, tmp_path):
    """A run of one step, of our own."""
    shutil.copytree(trained, tmp_path / "runs/small")
    return tmp_path / "runs/small"


def tensors(path):
    with checkpoint.Reader(checkpoint.resolve(path)) as reader:
        entries = reader.manifest.tensors
        return {name: reader.read(Slice.whole(name, entry.shape)) for name, entry in entries.items()}


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_show(minidist, run):
    said = minidist("ckpt", "show", run)
    assert said.code == 0 and "step 1," in said.out and "one rank" in said.out and "moments/exp_avg_sq" in said.out
    found = json.loads(minidist("ckpt", "show", run, "--json").out)
    assert found["bytes"]["weights"] == 4 * found["parameters"] == found["bytes"]["moments/exp_avg"]
    assert sum(found["bytes"].values()) < found["files"]["rank-00000.safetensors"]["bytes"]
    assert found["state"]["taken"] == 1 and found["finite"] is True and found["cut_short"] == []
    said = minidist("ckpt", "show", run, "--names", "^norm").out
    assert "norm.weight [" in said and "rank-00000.safetensors: [0:" in said
    assert "no tensor's name matches" in minidist("ckpt", "show", run, "--names", "nothing").out


def test_show_draws_who_holds_what(minidist, run, tmp_path):
    minidist("ckpt", "reshard", run, "--out", "two", "--ranks=2", "--layout.zero=1")
    assert minidist("ckpt", "show", "two", "--plot", "who.png").code == 0
    from PIL import Image

    with Image.open(tmp_path / "who.png") as picture:
        assert picture.width > 300 and picture.height > 500
        assert "embedding: 50% in rank-00000.safetensors, 50% in rank-00001.safetensors" in picture.info["Description"]


def test_verify(minidist, run):
    said = minidist("ckpt", "verify", run)
    assert said.code == 0 and "whole" in said.out
    flip(next(run.glob("checkpoints/*/rank-00000.safetensors")))
    said = minidist("ckpt", "verify", run)
    assert said.code == 1 and "is not what was written" in said.out
    found = json.loads(minidist("ckpt", "verify", run, "--json").out)
    assert len(found["damaged"]) == 1 and found["pieces"] > 10


def test_reshard_changes_only_who_holds_what(minidist, run):
    said = minidist("ckpt", "reshard", run, "--out", "four", "--ranks=4", "--layout.tp=2", "--layout.zero=3", "--json")
    assert said.code == 0, said.err
    manifest = checkpoint.read_manifest(checkpoint.resolve(run.parent.parent / "four"))
    assert str(manifest.folder).endswith(json.loads(said.out)["checkpoint"])
    assert len(manifest.files) == 4 and manifest.raw["layout"]["tp"] == 2 == manifest.raw["layout"]["dp"]
    then, now = tensors(run), tensors(run.parent.parent / "four")
    assert then.keys() == now.keys() and all(torch.equal(then[name], now[name]) for name in then)
    assert json.loads(minidist("eval", "four", "--json").out)["step"] == 1
    again = minidist("train", "four", "--resume", "--train.steps=2", "--ranks=4", "--layout.tp=2", "--layout.zero=3")
    assert again.code == 0 and "goes on after step 1 from" in again.out and "train.steps is 2" in again.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "nowhere"), "no such file or folder"),
        (("show", "RUN", "--names", "("), "not a regular expression"),
        (("verify", "."), "no finished checkpoint"),
        (("reshard", "RUN"), "--out"),
        (("reshard", "RUN", "--out", "RUN"), "give another folder"),
        (("reshard", "RUN", "--out", "x", "--ranks=5", "--layout.tp=5"), "heads"),
        (("reshard", "RUN", "--out", "x", "--train.steps=5"), "only its layout"),
    ],
)
def test_bad_input_is_one_line(minidist, run, words, says):
    said = minidist("ckpt", *(run if word == "RUN" else word for word in words))
    assert said.code == 2 and says in said.err and said.err.count("\n") == 1


def test_resume_from_the_run_folder_or_the_recipe(minidist, recipe, tmp_path):
    minidist("train", recipe, "--checkpoint.every=2", "--checkpoint.keep=0")
    folder = tmp_path / "runs/small"
    straight, rows = tensors(folder), (folder / "metrics.jsonl").read_text().splitlines()
    for source in (folder, recipe):
        shutil.rmtree(folder / "checkpoints/step-000004")
        said = minidist("train", source, "--resume", "--json")
        assert said.code == 0, said.err
        assert json.loads(said.out.splitlines()[-1])["run"].endswith("runs/small")
        assert "goes on after step 2 from" in said.out and "step 3/4" in said.out and "step 2/4" not in said.out
        assert all(torch.equal(x, straight[name]) for name, x in tensors(folder).items())
        again = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["loss"] for row in again] == [json.loads(row)["loss"] for row in rows]
    assert json.loads(minidist("train", recipe, "--json").out.splitlines()[-1])["run"].endswith("small-2"), "else a new run"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--resume", "--run.seed=5"), "run.seed = 5"),
        (("--resume", "--model.width=64"), "model.width = 64"),
        (("--checkpoint.init=nowhere",), "no such file"),
        (("--checkpoint.init=runs/small", "--model.layers=3"), "missing"),
        (("--checkpoint.every=-1",), "at least 0"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_before_it_starts(minidist, recipe, tmp_path, trained, words, says):
    shutil.copytree(trained, tmp_path / "runs/small")
    said = minidist("train", recipe, *words)
    assert said.code == 2 and says in said.err and said.err.count("\n") == 1


def test_a_damaged_last_checkpoint_is_refused_and_the_one_before_offered(minidist, recipe, tmp_path):
    minidist("train", recipe, "--checkpoint.every=2")
    flip(tmp_path / "runs/small/checkpoints/step-000004/rank-00000.safetensors")
    said = minidist("train", recipe, "--resume", "--train.steps=5")
    assert said.code in (1, 2) and "step-000004" in said.err and "step-000002 is whole" in said.err
