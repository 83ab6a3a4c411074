"""A small corpus, a small recipe, and `minidist ...` run in this process with its output caught."""

import random
from dataclasses import dataclass

import pytest
import torch

from minidist.cli import main
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.data import corpus
from minidist.train import config as configs
from minidist.train.loop import train

RECIPE = """
[model]
layers = 2
width = 24
heads = 4
kv_heads = 2
ffn = 48
vocab = 256

[data]
source = "{source}"

[train]
steps = 4
global_batch = 5
micro_batch = 2
seq_len = 16
eval_every = 2
sample_tokens = 12

[optim]
lr = 0.01
warmup = 2
"""


@dataclass
class Said:
    """What a command line left."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of text with something to learn in it."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for i in range(40):
        lines = [f"def f{draw.randrange(99)}(x):\n    return x + {draw.randrange(9)}\n" for _ in range(6)]
        (folder / f"m{i}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def built(text, tmp_path_factory):
    """The corpus of that text."""
    return corpus.build(text, tmp_path_factory.mktemp("built") / "corpus").path


@pytest.fixture
def recipe(tmp_path, built):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE.format(source=built))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory, built):
    """A run folder: the recipe after one step, in this process."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(RECIPE.format(source=built))
    words = ["--train.steps=1", "--metrics.plot=false", "--train.sample_tokens=0", f"--run.dir={folder / 'runs'}"]
    train(Mesh(Layout()), configs.load(folder / "small.toml", words))
    return folder / "runs" / "small"


@pytest.fixture
def minidist(tmp_path, monkeypatch, capsys):
    """Run a command line in an empty folder of its own."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MINIDIST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINIDIST_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would fight with whatever else the tests run

    def run(*words):
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        return Said(code, *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)
