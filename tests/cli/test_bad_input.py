"""Bad input: exit code 2, one line with the key, the value and the remedy, no traceback, before any rank starts."""

import json

import pytest

from minidist import ranks
from minidist.train import launch


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(ranks, "run", started)
    monkeypatch.setattr(launch, "run", started)


def refused(said, *parts):
    assert said.code == 2, said
    assert said.out == "" and said.err.startswith("minidist: ") and said.err.count("\n") == 1, said
    for part in parts:
        assert part in said.err


TRAIN = {
    "a wrong key": (["--train.step=5"], ["--train.step", "did you mean --train.steps?"]),
    "a wrong section": (["--trian.steps=5"], ["trian", "did you mean train?"]),
    "a wrong type": (["--train.steps", "many"], ["--train.steps", '"many"', "a whole number"]),
    "no value": (["--train.steps", "--ranks", "2"], ["--train.steps", "missing"]),
    "a layout that does not multiply out": (["--layout.dp=3", "--ranks=2"], ["3 ranks, but 2", "layout.dp = 2"]),
    "more stages than layers": (["--layout.pp=5", "--ranks=5"], ["layout.pp = 5", "model.layers", "a stage needs a layer"]),
    "a schedule that is none": (["--layout.pp=2", "--ranks=2", "--layout.schedule=gpip"], ["'gpip'", "gpipe, 1f1b"]),
    "a global batch smaller than dp": (["--ranks=4", "--train.global_batch=3"], ["train.global_batch = 3", "dp = 4"]),
    "a product that disagrees": (["--train.accumulation=3"], ["1 x train.micro_batch 2 x train.accumulation 3 = 6", "= 5"]),
    "no rank": (["--ranks=0"], ["--ranks 0", "at least 1"]),
    "ranks that are no number": (["--ranks=two"], ["--ranks", "'two'"]),
    "an unknown option": (["--steps", "5"], ["--steps"]),
    "a missing corpus": (["--data.source=nowhere"], ["nowhere", "no such folder", "minidist data build"]),
    "a folder that is no corpus": (["--data.source=."], ["no such file", "minidist data build"]),
    "a corpus shorter than one sequence": (["--train.seq_len=100000"], ["train.seq_len", "100000", "use train.seq_len<="]),
    "another tokenizer than the corpus has": (["--data.tokenizer=bpe:300"], ["data.tokenizer", "bpe:300", "leave"]),
    "a tokenizer that does not exist": (["--data.source=stdlib", "--data.tokenizer=words"], ["words", "'byte'"]),
    "a vocabulary that is too small": (["--model.vocab=255"], ["model.vocab = 255", "use model.vocab = 256"]),
}


@pytest.mark.parametrize("case", TRAIN)
def test_train(minidist, recipe, case):
    words, parts = TRAIN[case]
    refused(minidist("train", recipe, *words), *parts)


def test_verbs_recipes_and_files(minidist, tmp_path):
    refused(minidist("trian"), "'trian'", "did you mean `minidist train`?")
    refused(minidist("zzz"), "'zzz'", "use one of lab, restore, progress, doctor, data")
    refused(minidist("train"), "RECIPE")
    refused(minidist("train", "tinny"), "did you mean tiny?")
    refused(minidist("train", "missing.toml"), "missing.toml", "no such file")
    (tmp_path / "broken.toml").write_text("[train\n")
    refused(minidist("train", "broken.toml"), "broken.toml", "not valid TOML")
    refused(minidist("doctor", "--jsno"), "--jsno")
    refused(minidist("grade", "missing.ipynb"), "missing.ipynb", "no such file")
    refused(minidist("lab", "--port", "99999"), "--port 99999")


def test_data(minidist, tmp_path, text):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "nothing").mkdir()
    refused(minidist("data", "build", "missing.txt", "--out", "c"), "missing.txt", "no such file")
    refused(minidist("data", "build", "empty.txt", "--out", "c"), "empty.txt", "no text")
    refused(minidist("data", "build", "nothing", "--out", "c"), "nothing", "no text")
    refused(minidist("data", "build", "binary.txt", "--out", "c"), "binary.txt", "UTF-8")
    refused(minidist("data", "build", text, "--out", "c", "--tokenizer", "bpe:9"), "bpe:9")
    refused(minidist("data", "build", text, "--out", "nothing"), "nothing", "already exists")
    refused(minidist("data", "build", text), "--out")
    refused(minidist("data", "show", "missing"), "missing", "no such folder")
    assert not (tmp_path / "c").exists()


def test_eval_generate_and_plot(minidist, tmp_path):
    (tmp_path / "run").mkdir()
    for verb in ("eval", "generate"):
        refused(minidist(verb, "missing"), "missing", "no such file or folder")
        refused(minidist(verb, "run"), "run", "no finished checkpoint")
    refused(minidist("plot", "run"), "metrics.jsonl")
    refused(minidist("generate", "run", "--tokens", "0"), "--tokens 0")
    refused(minidist("generate", "run", "--temperature", "-1"), "--temperature -1")
    refused(minidist("generate", "run", "--top-k", "-1"), "--top-k -1")
    refused(minidist("eval", "run", "--samples", "-1"), "--samples -1")


LAYOUTS = {
    "a wrong key": (["--layout.tpp=2"], ["--layout.tpp", "did you mean --layout.tp?"]),
    "a setting of the run": (["--train.micro_batch=1"], ["--train.micro_batch", "only its layout"]),
    "a wrong type": (["--layout.tp", "two"], ["--layout.tp", '"two"', "a whole number"]),
    "more than the ranks": (["--layout.pp=2", "--layout.tp=2", "--ranks=2"], ["4 ranks, but 2", "start 4"]),
    "layout but no ranks": (["--layout.tp=2"], ["2 ranks, but 1", "start 2"]),
    "no rank": (["--ranks=0"], ["--ranks 0", "at least 1"]),
    "heads that do not divide": (["--layout.tp=3", "--ranks=3"], ["layout.tp = 3", "model.heads = 4"]),
    "more stages than layers": (["--layout.pp=5", "--ranks=5"], ["layout.pp = 5", "model.layers", "a stage needs a layer"]),
    "a sequence that does not divide": (["--layout.cp=3", "--ranks=3"], ["train.seq_len = 16", "2 x cp = 6"]),
    "no experts": (["--layout.ep=2", "--ranks=2"], ["layout.ep = 2", "model.experts"]),
    "a schedule without stages": (["--layout.schedule=gpipe"], ["layout.schedule", "layout.pp > 1"]),
    "a schedule that is none": (["--layout.pp=2", "--ranks=2", "--layout.schedule=gpip"], ["'gpip'", "gpipe, 1f1b"]),
    "shards of nothing": (["--layout.dp=2", "--ranks=2", "--layout.shard=2"], ["layout.shard = 2", "layout.zero = 0"]),
}


@pytest.mark.parametrize("verb", ["eval", "generate"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_of_what_was_trained(minidist, trained, verb, case):
    words, parts = LAYOUTS[case]
    refused(minidist(verb, trained, *words), *parts)


def test_a_fault_of_ours_keeps_its_traceback(minidist, recipe, monkeypatch):
    def bug(*args):
        return json.loads("{")  # a ValueError, but not one that was written for the user

    monkeypatch.setattr(launch, "run", bug)
    said = minidist("train", recipe)
    assert said.code == 1 and "Traceback" in said.err and "JSONDecodeError" in said.err
