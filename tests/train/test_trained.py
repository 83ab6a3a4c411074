"""A checkpoint loaded at any layout: the loss and the text of one process, whatever layout trained it."""

import random
import shutil
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from minidist import checkpoint, ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.data import corpus
from minidist.model.config import ModelConfig
from minidist.parallel.config import Recompute
from minidist.train.config import Config
from minidist.train.loop import train
from minidist.train.sections import Checkpoint, Data, Metrics, Optim, Precision, Run, Train
from minidist.train.trained import evaluate_trained, generate_trained, load, open_trained

DENSE = ModelConfig(layers=4, width=48, heads=4, kv_heads=2, ffn=96, vocab=256)
EXPERTS = replace(DENSE, layers=2, ffn=24, experts=4, shared_ffn=24, balance_loss=0.01, z_loss=0.001, bias_rate=0.3)
ONE = Layout()
LAYOUTS = [
    Layout(dp=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, tp=2, sp=True),
    Layout(pp=2, schedule="zb-v"),
    Layout(pp=2, schedule="interleaved", split="1,1,1,1"),
    Layout(cp=2),
    Layout(cp=2, cp_attention="ulysses"),
    Layout(dp=2, zero=3),
    Layout(dp=2, pp=2, zero=2),
]
MOE_LAYOUTS = [Layout(dp=2, ep=2), Layout(pp=2), Layout(tp=2, sp=True), Layout(dp=2, ep=2, zero=3), Layout(pp=2, cp=2, ep=2)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Two would fight with whatever else the tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(40):
        lines = [f"def f{draw.randrange(99)}(x):\n    return x + {draw.randrange(9)}\n" for _ in range(3)]
        (folder / f"m{i}.py").write_text("\n".join(lines))
    return str(corpus.build(folder, tmp_path_factory.mktemp("built") / "corpus").path)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A function: (model, dtype, layout) -> the folder of a run of 3 steps, made once; its summary."""
    made = {}

    def run(model=DENSE, dtype="float64", layout=ONE):
        key = (model, dtype, layout)
        if key not in made:
            cfg = Config(
                run=Run(name="run", dir=str(tmp_path_factory.mktemp("runs"))),
                model=model,
                data=Data(source=text),
                layout=layout,
                train=Train(steps=3, global_batch=6, micro_batch=3, seq_len=16, sample_tokens=0, accumulation=2 // layout.dp),
                optim=Optim(lr=0.01, warmup=0),
                precision=Precision(dtype=dtype),
                recompute=Recompute(),
                checkpoint=Checkpoint(),
                metrics=Metrics(plot=False),
            )
            many = layout.world_size > 1
            made[key] = ranks.run(train, layout.world_size, cfg, layout=layout)[0] if many else train(Mesh(ONE), cfg)
        return Path(made[key]["run"]), made[key]

    yield run
    ranks.stop()


def words(layout):
    """The layout as it is stated on a command line."""
    stated = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    return [f"--layout.{key}={str(value).lower()}" for key, value in stated.items() if value != getattr(ONE, key)]


@cache
def loss(run, layout=ONE, **options):
    """Nats a token, and tokens."""
    found = evaluate_trained(run, overrides=words(layout), ranks=layout.world_size, **options)
    assert found["ranks"] == layout.world_size and found["layout"]["tp"] == layout.tp
    return found["loss"], found["tokens"]


@cache
def speak(run, layout=ONE, tokens=20, temperature=0.0, seed=0):
    options = {"tokens": tokens, "temperature": temperature, "top_k": 0, "seed": seed}
    return generate_trained(run, "def f", overrides=words(layout), ranks=layout.world_size, **options)["text"]


def agree(run, layout, bound):
    alone, tokens = loss(run)
    assert loss(run, layout) == (pytest.approx(alone, rel=bound), tokens)
    assert speak(run, layout) == speak(run)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(words(layout)).replace("--layout.", ""))
def test_the_loss_and_the_text_of_one_process(trained, layout):
    run, summary = trained()
    assert loss(run)[0] == pytest.approx(summary["val_loss"], rel=1e-12)  # what one process said when it had trained it
    agree(run, layout, 1e-10)
    assert speak(run, layout, temperature=0.8, seed=5) == speak(run, temperature=0.8, seed=5) != speak(run)


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=lambda layout: " ".join(words(layout)).replace("--layout.", ""))
def test_experts_with_their_selection_biases(trained, layout):
    run, summary = trained(EXPERTS)
    _, tensors = checkpoint.load(checkpoint.resolve(run))
    assert any(tensors[f"blocks.{i}.ffn.router.bias"].any() for i in range(2))
    assert loss(run)[0] == pytest.approx(summary["val_loss"], rel=1e-12)
    agree(run, layout, 1e-10)


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, tp=2, sp=True), Layout(dp=2, zero=3)],
    ids=lambda layout: " ".join(words(layout)).replace("--layout.", ""),
)
def test_in_single_precision(trained, layout):
    agree(trained(dtype="float32")[0], layout, 1e-5)


def test_what_many_ranks_trained_one_loads_and_others_too(trained):
    """Tied ends of a pipeline and columns, put together and cut anew."""
    run, summary = trained(replace(DENSE, tied=True), layout=Layout(pp=2, tp=2))
    assert loss(run)[0] == pytest.approx(summary["val_loss"], rel=1e-10)
    agree(run, Layout(cp=2, tp=2), 1e-10)
    agree(run, Layout(pp=4), 1e-10)
    agree(run, Layout(dp=2, zero=3), 1e-10)


def test_one_process_is_the_default_and_the_batch_of_training_binds_nobody(trained):
    run, _ = trained(replace(DENSE, tied=True), layout=Layout(pp=2, tp=2))
    assert open_trained(run)[0].layout == ONE
    config, _ = open_trained(run, ["--layout.tp=2"], ranks=14)
    assert config.layout == Layout(dp=7, tp=2)  # dp takes what the other axes leave; a step of the run had 6 sequences
    assert loss(run, Layout(dp=2), samples=3)[1] == 48


def test_a_rank_reads_only_the_tensors_it_holds(trained):
    run, _ = trained()
    asked = ranks.run(names_read, 2, run, layout=Layout(pp=2))
    whole = {name for names in asked for name in names}
    assert whole == checkpoint.load(checkpoint.resolve(run))[1].keys()
    assert not set(asked[0]) & set(asked[1]) and len(asked[0]) == len(set(asked[0]))


def names_read(mesh, run):
    """What this rank asks the checkpoint for."""
    config, manifest = open_trained(run, ["--layout.pp=2"], ranks=2)
    asked, read = [], checkpoint.Reader.read

    def noted(reader, record):
        asked.append(record.name)
        return read(reader, record)

    checkpoint.Reader.read = noted
    try:
        load(mesh, config, manifest.folder)
    finally:
        checkpoint.Reader.read = read
    return asked


def test_another_model_or_a_torn_checkpoint_is_refused_before_any_rank_starts(trained, tmp_path, monkeypatch):
    run, _ = trained()
    monkeypatch.setattr(ranks, "run", None)
    folder = tmp_path / "step-000003"
    shutil.copytree(checkpoint.resolve(run), folder)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"tied": false', '"tied": true'))
    with pytest.raises(ValueError, match="does not fit the model: 1 unexpected: head"):
        loss(folder, Layout(tp=2))
    (folder / "manifest.json").write_text(text)
    next(folder.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(ValueError, match="missing or cut short"):
        loss(folder, Layout(tp=2))
