"""C60: every documented setting changes something observable, or is refused. A setting missing here fails the test."""

import dataclasses
import json
import re
import threading
from pathlib import Path

import pytest

from minidist.data import corpus
from minidist.data.corpus import Document
from minidist.train import config as configs
from minidist.train.settings import get_type_hints

# setting -> (value, where the change must show, overrides on both sides). "refused": exit code 2 instead.
# where: rows (of metrics.jsonl), weights, files, saves (names of checkpoints), out (what is printed), folder, threads, or
# FILE::TEST, where the change takes more than one run to be seen
SGD = ("--optim.name=sgd",)
EXPERTS = ("--model.experts=4",)
FIELDS = {
    "run.name": ("other", "folder", ()),
    "run.dir": ("elsewhere", "folder", ()),
    "run.seed": ("2", "rows", ()),
    "model.layers": ("1", "rows", ()),
    "model.width": ("32", "rows", ()),
    "model.heads": ("2", "rows", ()),
    "model.kv_heads": ("1", "rows", ()),
    "model.ffn": ("40", "rows", ()),
    "model.vocab": ("300", "rows", ()),
    "model.tied": ("true", "rows", ()),
    "model.dropout": ("0.3", "rows", ()),
    "model.rope_theta": ("10", "rows", ()),
    "model.norm_eps": ("0.1", "rows", ()),
    "model.experts": ("4", "rows", ()),
    "model.top_k": ("1", "rows", EXPERTS),
    "model.shared_ffn": ("16", "rows", EXPERTS),
    "model.capacity": ("0.5", "rows", EXPERTS),
    "model.balance_loss": ("0.1", "rows", EXPERTS),
    "model.z_loss": ("0.1", "rows", EXPERTS),
    "model.bias_rate": ("0.1", "rows", EXPERTS),
    "data.source": ("stdlib", "rows", ()),
    "data.tokenizer": ("bpe:300", "rows", ("--data.source=stdlib", "--model.vocab=300")),
    "data.prefetch": ("0", "threads", ()),
    "layout.pp": ("2", "refused", ()),
    "layout.dp": ("2", "refused", ()),  # with one rank; what it does with two is shown in test_train.py
    "layout.cp": ("2", "refused", ()),
    "layout.tp": ("2", "refused", ()),
    "layout.ep": ("2", "refused", ()),
    "layout.shard": ("1", "refused", ()),
    "layout.bucket": ("0", "refused", ("--layout.zero=1",)),  # what it does at stage 0 is shown in test_traffic.py
    "layout.sp": ("true", "refused", ()),  # with one rank; what it does with two, and sp_regather, test_tensor.py shows
    "layout.sp_regather": ("false", "refused", ()),
    "layout.cp_attention": ("gather", "refused", ()),  # test_context.py
    "layout.schedule": ("gpipe", "refused", ()),  # tests/parallel/pipeline, and so on
    "layout.chunks": ("2", "refused", ()),
    "layout.split": ("cost", "refused", ()),
    "layout.zero": ("2", "out", ()),
    "layout.reshard": ("false", "out", ("--layout.zero=3",)),
    "train.steps": ("3", "rows", ()),
    "train.global_batch": ("4", "rows", ()),
    "train.micro_batch": ("5", "weights", ()),  # another order of the same sums: the last bits
    "train.accumulation": ("2", "refused", ()),
    "train.seq_len": ("15", "rows", ()),
    "train.eval_every": ("1", "rows", ()),
    "train.eval_samples": ("3", "rows", ()),
    "train.sample_tokens": ("0", "out", ()),
    "train.sample_prompt": ("class", "out", ()),
    "optim.name": ("sgd", "rows", ()),
    "optim.lr": ("0.02", "rows", ()),
    "optim.warmup": ("3", "rows", ()),
    "optim.min_lr_ratio": ("1", "rows", ()),
    "optim.betas": ("0.5,0.5", "rows", ()),
    "optim.eps": ("0.1", "rows", ()),
    "optim.momentum": ("0.9", "rows", SGD),
    "optim.weight_decay": ("0.9", "rows", ()),
    "optim.clip": ("0.1", "rows", ()),
    "optim.offload": ("true", "out", ()),
    "precision.dtype": ("float64", "weights", ()),
    "precision.reduce": ("bfloat16", "weights", ()),
    "precision.accumulate": ("bfloat16", "weights", ()),
    "precision.moments": ("bfloat16", "weights", ()),
    "precision.loss_scale": ("2", "rows", ()),
    "precision.scale_window": ("1", "rows", ("--precision.dtype=float16",)),
    "recompute.mode": ("full", "out", ()),
    "recompute.select": ("blocks", "out", ("--recompute.mode=selective",)),
    "recompute.every": ("3", "out", ("--recompute.mode=selective", "--recompute.select=blocks")),
    "recompute.offload": ("true", "out", ()),
    "checkpoint.every": ("1", "saves", ()),
    "checkpoint.keep": ("1", "saves", ("--checkpoint.every=1",)),
    "checkpoint.background": ("false", "threads", ()),
    "checkpoint.on_error": ("continue", "train/test_resume.py::test_a_full_disk_ends_the_run_or_not_as_it_says", ()),
    "checkpoint.resume": ("true", "train/test_resume.py::test_at_its_own_layout_a_run_goes_on_bit_for_bit", ()),
    "checkpoint.init": ("PATH", "train/test_resume.py::test_a_run_begins_with_the_weights_of_another_at_any_layout", ()),
    "metrics.print_every": ("1", "out", ()),
    "metrics.plot": ("false", "files", ()),
    "metrics.peak_tflops": ("1", "rows", ()),
    "metrics.trace": ("2", "files", ()),
}
CLOCK = re.compile(r"[\d,.]+ tokens/s.*|in \d+ s|/\S+|^small(-\d+)?:")


@pytest.fixture
def observe(minidist, recipe, monkeypatch, tmp_path):
    """Train with overrides; all that can be seen of the run but the clock."""
    documents = [Document(f"d{i}.py", f"class C{i}:\n    def m{i}(self): return {i * i}\n" * 3) for i in range(30)]
    monkeypatch.setattr(corpus, "read_stdlib", lambda: documents)
    started = []

    def start(thread, start=threading.Thread.start):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def run(*overrides):
        started.clear()
        said = minidist("train", recipe, "--json", *overrides)
        if said.code:
            return {"refused": said.code}
        *lines, summary = said.out.splitlines()
        summary = json.loads(summary)
        folder = tmp_path / summary["run"]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        manifest = json.loads(next(folder.glob("checkpoints/*/manifest.json")).read_text())
        return {
            "rows": [{**row, "step_s": 0, "tokens_per_s": 0, "mfu": row["mfu"] is not None} for row in rows],
            "weights": [piece["sha256"] for entry in manifest["tensors"].values() for piece in entry["pieces"]],
            "files": sorted(path.name for path in folder.iterdir()),
            "out": [CLOCK.sub("", line) for line in lines],
            "saves": sorted(path.name for path in folder.glob("checkpoints/*")),
            "folder": re.sub(r"-\d+$", "", str(folder)),
            "threads": [name.removesuffix("_0") for name in started if name.startswith(("minidist-loader", "minidist-saver"))],
        }

    return run


def test_every_setting_is_listed():
    sections = get_type_hints(configs.Config)
    documented = {f"{s}.{f.name}" for s, section in sections.items() for f in dataclasses.fields(section)}
    assert set(FIELDS) == documented


def test_the_same_settings_show_the_same(observe):
    assert observe() == observe()


@pytest.mark.parametrize("key", FIELDS)
def test_a_setting_changes_what_it_says(observe, key):
    value, where, both = FIELDS[key]
    if "::" in where:
        file, name = where.split("::")
        assert f"def {name}(" in (Path(__file__).parent.parent / file).read_text()
        return
    changed = observe(*both, f"--{key}={value}")
    if where == "refused":
        assert changed == {"refused": 2}
    else:
        assert changed[where] != observe(*both)[where]
