"""A run that is stopped and goes on takes the steps that it would have taken: bit for bit at its own layout (C12, C19, C28)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minidist import checkpoint, ranks
from minidist.checkpoint import tensorfile
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice
from minidist.data import corpus
from minidist.model.config import ModelConfig
from minidist.parallel.config import Recompute
from minidist.train import resume
from minidist.train.build import build
from minidist.train.config import Config
from minidist.train.loop import train
from minidist.train.sections import Checkpoint, Data, Metrics, Optim, Precision, Run, Train

DENSE = ModelConfig(layers=4, width=48, heads=4, kv_heads=2, ffn=96, vocab=256, dropout=0.1)
EXPERTS = replace(DENSE, ffn=48, experts=4, top_k=2, bias_rate=0.01, balance_loss=0.01)
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def no_rank_left():
    yield
    ranks.stop()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(f"def f{i}(x):\n    return x + {i * i}\n" for i in range(60)))
    return str(corpus.build(folder / "text.txt", folder / "corpus").path)


def config(text, folder, layout=None, model=DENSE, **sections):
    parts = {
        "run": Run(name="run", dir=str(folder)),
        "data": Data(source=text),
        "train": Train(steps=STEPS, global_batch=6, micro_batch=2, seq_len=16, sample_tokens=0, eval_every=0),
        "optim": Optim(lr=0.01, warmup=3),
        "precision": Precision(),
        "recompute": Recompute(),
        "checkpoint": Checkpoint(every=2, keep=0),
        "metrics": Metrics(plot=False),
    }
    return Config(model=model, layout=layout or Layout(), **{**parts, **sections})


def run(cfg):
    many = cfg.layout.world_size > 1
    return ranks.run(train, cfg.layout.world_size, cfg, layout=cfg.layout)[0] if many else train(Mesh(cfg.layout), cfg)


def rows(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def tensors(folder):
    """Everything that a checkpoint holds, whole: weights and moments."""
    with checkpoint.Reader(folder) as reader:
        entries = reader.manifest.tensors
        return {name: reader.read(Slice.whole(name, entry.shape)) for name, entry in entries.items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def cut_short(cfg, folder, step):
    """The folder of a run that died some time after it had saved `step`, and the configuration that goes on with it."""
    shutil.copytree(cfg.run.folder, Path(folder) / "run")
    for path in (Path(folder) / "run/checkpoints").iterdir():
        if int(path.name[-6:]) > step:
            shutil.rmtree(path)
    return replace(cfg, run=replace(cfg.run, dir=str(folder)), checkpoint=replace(cfg.checkpoint, resume=True))


TOLD = ("step", "loss", "grad_norm", "lr", "tokens", "skipped", "loss_scale", "val_loss")
CASES = {
    "one rank": {},
    "zero 0": {"layout": Layout(dp=2)},
    "zero 1, narrow": {"layout": Layout(dp=2, zero=1), "precision": Precision(dtype="bfloat16", moments="bfloat16")},
    "zero 2, fp16": {
        "layout": Layout(dp=2, zero=2),
        "precision": Precision(dtype="float16", loss_scale=2.0**24, scale_window=2),
    },
    "zero 3, sgd": {"layout": Layout(dp=2, zero=3), "optim": Optim(name="sgd", momentum=0.9, lr=0.01, warmup=2)},
    "tp, sp, offload": {"layout": Layout(tp=2, sp=True), "optim": Optim(lr=0.01, offload=True)},
    "pipeline": {"layout": Layout(pp=2, schedule="zb-v", chunks=2)},
    "cp, tied": {"layout": Layout(cp=2), "model": replace(DENSE, tied=True)},
    "experts": {"layout": Layout(dp=2, ep=2, zero=1), "model": EXPERTS},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step", [2, 4])
def test_at_its_own_layout_a_run_goes_on_bit_for_bit(text, tmp_path, case, step):
    straight = config(text, tmp_path / "straight", **CASES[case])
    run(straight)
    again = cut_short(straight, tmp_path / "again", step)
    resume.check(again)
    run(again)
    then, now = rows(straight.run.folder), rows(again.run.folder)
    assert [[row.get(key) for key in TOLD] for row in now] == [[row.get(key) for key in TOLD] for row in then]
    for number in range(step + 2, STEPS + 1, 2):
        name = f"checkpoints/step-{number:06d}"
        same(tensors(again.run.folder / name), tensors(straight.run.folder / name))
    if case.endswith("fp16"):
        assert any(row["skipped"] for row in then), "the case is to move the scale"


def test_a_run_that_is_over_says_so_again(text, tmp_path):
    done = config(text, tmp_path)
    summary = run(done)
    again = run(replace(done, checkpoint=replace(done.checkpoint, resume=True)))
    for key in ("loss", "val_loss", "tokens", "checkpoint", "run"):
        assert again[key] == summary[key]


def test_what_was_never_begun_begins(text, tmp_path):
    cfg = config(text, tmp_path, checkpoint=Checkpoint(resume=True))
    resume.check(cfg)
    assert run(cfg)["run"] == str(tmp_path / "run") and len(rows(cfg.run.folder)) == STEPS
    assert "resume = false" in (cfg.run.folder / "config.toml").read_text(), "that file begins a run like this one"


def test_the_learning_rates_do_not_know_of_a_stop(text, tmp_path):  # C28
    many = Train(steps=10, global_batch=2, micro_batch=2, seq_len=16, sample_tokens=0, eval_every=0)
    straight = config(text, tmp_path / "straight", train=many, checkpoint=Checkpoint(every=1, keep=0))
    run(straight)
    rates = [row["lr"] for row in rows(straight.run.folder)]
    assert len(set(rates)) > 5
    for step in range(1, 10):
        again = cut_short(straight, tmp_path / str(step), step)
        run(again)
        assert [row["lr"] for row in rows(again.run.folder)] == rates
        same(tensors(again.run.folder / "checkpoints/step-000010"), tensors(straight.run.folder / "checkpoints/step-000010"))


def samples_of(mesh, cfg, first, last):
    """The samples that this rank's loader hands out in steps `first` to `last` - 1, by step."""
    with build(mesh, cfg).loader(first * cfg.train.global_batch) as loader:
        return [[i for batch in next(loader) for i in batch.samples.tolist() if i >= 0] for _ in range(first, last)]


def test_a_stop_in_a_later_epoch_repeats_and_skips_no_sample(text, tmp_path):  # C12, C13
    """Ranks, micro-batches and reading ahead change with every stop; each step has the samples that it would have had."""
    long = Train(steps=40, global_batch=9, micro_batch=3, seq_len=64, sample_tokens=0)
    cfg = config(text, tmp_path, train=long)
    straight = samples_of(Mesh(Layout()), cfg, 0, 40)
    stream, windows = [i for step in straight for i in step], len({i for step in straight for i in step})
    assert len(stream) > 2 * windows, "the run is to end in its third epoch or later"
    for epoch in range(len(stream) // windows):
        assert len(set(stream[epoch * windows : (epoch + 1) * windows])) == windows, "no id twice within an epoch"
    for first, last, dp, micro, prefetch in ((0, 13, 4, 2, 2), (13, 17, 2, 5, 0), (17, 40, 3, 1, 1)):
        train, data = replace(long, micro_batch=micro), replace(cfg.data, prefetch=prefetch)
        part = replace(cfg, train=train, data=data, layout=Layout(dp=dp))
        found = ranks.run(samples_of, dp, part, first, last, layout=part.layout)
        for place, step in enumerate(range(first, last)):
            assert sorted(i for rank in found for i in rank[place]) == sorted(straight[step])


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=["one", "tp2 pp2"])
def test_a_run_begins_with_the_weights_of_another_at_any_layout(text, tmp_path, layout):
    first = config(text, tmp_path, Layout(dp=2, zero=1))
    run(first)
    second = replace(
        config(text, tmp_path, layout, checkpoint=Checkpoint(init=str(first.run.folder))),
        train=replace(first.train, steps=1),
        optim=replace(first.optim, lr=0.0),
    )
    resume.check(second)
    summary = run(second)
    assert summary["run"].endswith("run-2") and summary["val_loss"] == pytest.approx(
        rows(first.run.folder)[-1]["val_loss"], 1e-6
    )
    now, then = (
        tensors(second.run.folder.with_name("run-2") / "checkpoints/step-000001"),
        tensors(first.run.folder / "checkpoints/step-000006"),
    )
    for name in now:
        if not name.startswith("moments/"):
            assert torch.equal(now[name], then[name]), name
    assert checkpoint.read_manifest(second.run.folder.with_name("run-2") / "checkpoints/step-000001").state["taken"] == 1


CHANGES = {
    "model.width": lambda cfg: replace(cfg, model=replace(cfg.model, width=96)),
    "model.dropout": lambda cfg: replace(cfg, model=replace(cfg.model, dropout=0.2)),
    "run.seed": lambda cfg: replace(cfg, run=replace(cfg.run, seed=2)),
    "train.seq_len": lambda cfg: replace(cfg, train=replace(cfg.train, seq_len=32)),
    "optim.name": lambda cfg: replace(cfg, optim=Optim(name="sgd")),
}


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    cfg = config(text, tmp_path_factory.mktemp("done"))
    run(cfg)
    return replace(cfg, checkpoint=replace(cfg.checkpoint, resume=True))


@pytest.mark.parametrize("key", CHANGES)
def test_what_would_make_it_another_run_is_refused_by_name(done, key):
    with pytest.raises(ValueError, match=rf"{key} = .*would not be the same run") as caught:
        resume.check(CHANGES[key](done))
    assert "\n" not in str(caught.value) and "run.name" in str(caught.value)


def test_what_may_change_is_said_where_it_changes_the_run(done):
    manifest = checkpoint.read_manifest(checkpoint.latest(done.run.folder / "checkpoints"))
    assert resume.compare(done, manifest) == []
    free = replace(done, layout=Layout(dp=2), train=replace(done.train, micro_batch=1), data=replace(done.data, prefetch=0))
    assert resume.compare(free, manifest) == []
    slower = replace(done, optim=replace(done.optim, lr=0.5), train=replace(done.train, global_batch=12))
    assert resume.compare(slower, manifest) == [
        "train.global_batch is 12 from here on, it was 6",
        "optim.lr is 0.5 from here on, it was 0.01",
    ]


def test_another_text_is_refused(done, tmp_path):
    (tmp_path / "text.txt").write_text("other words\n" * 50)
    other = str(corpus.build(tmp_path / "text.txt", tmp_path / "corpus").path)
    with pytest.raises(ValueError, match=r"data\.source"):
        resume.check(replace(done, data=Data(source=other)))


def test_a_checkpoint_of_weights_alone_is_for_a_new_run(done, tmp_path):
    """As version 1 wrote them: still read, not gone on from."""
    shutil.copytree(done.run.folder, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints").glob("*/manifest.json"):
        raw = json.loads(path.read_text())
        raw["format_version"] = 1
        for key in ("state", "order", "finite", "block_bytes"):
            del raw[key]
        raw["tensors"] = {name: entry for name, entry in raw["tensors"].items() if not name.startswith("moments/")}
        for entry in raw["tensors"].values():
            for piece in entry["pieces"]:
                (piece["sha256"],) = piece["sha256"]
        path.write_text(json.dumps(raw))
    old = replace(done, run=replace(done.run, dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"weights alone.*--checkpoint\.init"):
        resume.check(old)
    folder = checkpoint.latest(tmp_path / "run/checkpoints")
    weights = checkpoint.load(folder)[1]
    assert all(torch.equal(weights[name].flatten(), x) for name, x in tensors(folder).items()) and len(weights) > 10


def fail_the_second_save(mesh, cfg):
    """Train where the disk is full when step 4 is saved."""
    write, full = tensorfile.write, []

    def filling(path, *args):
        if "step-000004" in str(path):
            full.append(path)
            raise OSError(28, "No space left on device")
        return write(path, *args)

    tensorfile.write = filling
    try:
        return train(mesh, cfg)
    except OSError as error:
        return str(error)
    finally:
        tensorfile.write = write
        assert full


@pytest.mark.parametrize("background", [True, False], ids=["background", "at once"])
@pytest.mark.parametrize("goes_on", [True, False], ids=["continue", "stop"])
def test_a_full_disk_ends_the_run_or_not_as_it_says(text, tmp_path, background, goes_on, capsys):  # C27
    settings = Checkpoint(every=2, keep=1, background=background, on_error="continue" if goes_on else "stop")
    said = fail_the_second_save(Mesh(Layout()), config(text, tmp_path, checkpoint=settings))
    folder = tmp_path / "run/checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000006" if goes_on else "step-000002"]
    assert len(tensors(checkpoint.latest(folder))) > 10
    words = capsys.readouterr().out if goes_on else said
    assert "step-000004: the checkpoint was not written, rank 0 failed" in words and "No space left" in words
    assert ("goes on without it" in words) is goes_on
