"""A trained model taken from its checkpoint to any legal layout: its held-out loss and its text, for `eval` and `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from minidist import checkpoint
from minidist.core.mesh import Mesh
from minidist.data.corpus import Corpus
from minidist.data.loader import validation_batches
from minidist.data.tokenizer import ByteTokenizer
from minidist.parallel.pipeline import schedules, setting, text
from minidist.parallel.pipeline.runtime import Pipeline
from minidist.train import config as configs
from minidist.train import launch
from minidist.train.build import open_text, runtime
from minidist.train.config import Config
from minidist.train.evaluate import Evaluation, evaluate
from minidist.train.generate import generate, last_logits
from minidist.train.state import expect_model, fill


def open_trained(path: Path, overrides: Sequence[str] = (), ranks: int = 1) -> tuple[Config, checkpoint.Manifest]:
    """The configuration of a run or checkpoint, with the layout that `overrides` state for `ranks` ranks; its manifest.

    ValueError, before any rank starts, for a layout that cannot be, or a checkpoint that is not whole or is of another model.
    """
    with checkpoint.Reader(checkpoint.resolve(path)) as reader:
        manifest = reader.manifest
    config = _for_use(configs.laid_out(configs.from_dict(manifest.raw["config"]), list(overrides), ranks))
    configs.check(config, ranks)
    expect_model(manifest, config)
    return config, manifest


def load(mesh: Mesh, config: Config, folder: Path) -> Pipeline:
    """This rank's part of the model of a checkpoint, of which it reads what it holds. Every rank of the mesh calls it.

    The runtime is that of training; only the values differ.
    """
    zero = runtime(mesh, config)
    with checkpoint.Reader(folder) as reader:
        fill(zero, reader)
    return Pipeline(zero, mesh)


def evaluate_trained(
    path: Path, data: str | None = None, samples: int = 0, *, overrides: Sequence[str] = (), ranks: int = 1
) -> dict[str, Any] | None:
    """Held-out loss of a run, on its own text or on the corpus folder `data`; 0 `samples` takes all sequences.

    The same at any layout. None on a rank of torchrun's that has no say.
    """
    if samples < 0:
        raise ValueError(f"--samples {samples}: give at least 1, or 0 for all")
    config, manifest = open_trained(path, overrides, ranks)
    if data is not None:
        config = configs.replaced(config, "data", source=data, tokenizer=None)
    source = open_text(config) if data else _own_text(config, manifest)
    if source.tokenizer.name != manifest.raw["data"]["tokenizer"]:
        raise ValueError(
            f"--data {data}: built with {source.tokenizer.name}, the model knows {manifest.raw['data']['tokenizer']}"
        )
    result = launch.run(held_out, config, manifest.folder, samples)
    if result is None:
        return None
    return {
        "checkpoint": str(manifest.folder),
        "step": manifest.step,
        "data": str(source.path),
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        **_where(config),
    }


def held_out(mesh: Mesh, config: Config, folder: Path, samples: int) -> Evaluation:
    """The program of a rank: the loss on the held-out text. The same on every rank."""
    pipeline, train, group = load(mesh, config, folder), config.train, mesh.group("dp")
    tokens = open_text(config).validation
    batches = validation_batches(tokens, train.seq_len, train.micro_batch, group.rank, group.size, samples or None)
    return evaluate(pipeline.zero.model, batches, mesh, pipeline)


def generate_trained(
    path: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    overrides: Sequence[str] = (),
    ranks: int = 1,
) -> dict[str, Any] | None:
    """The text that a run's model puts after `prompt`. None on a rank of torchrun's that has no say."""
    if tokens < 1:
        raise ValueError(f"--tokens {tokens}: give at least 1")
    if not temperature >= 0:
        raise ValueError(f"--temperature {temperature}: give 0 or more")
    if top_k < 0:
        raise ValueError(f"--top-k {top_k}: give at least 1, or 0 for all")
    config, manifest = open_trained(path, overrides, ranks)
    plain = manifest.raw["data"]["tokenizer"] == ByteTokenizer.name
    coder = ByteTokenizer() if plain else _own_text(config, manifest).tokenizer
    ids = coder.encode(prompt).tolist() or [coder.separator]
    options = {"temperature": temperature, "top_k": top_k, "seed": seed, "vocab": coder.vocab}
    out = launch.run(spoken, config, manifest.folder, ids, tokens, options)
    return None if out is None else {"prompt": prompt, "text": coder.decode(out), **_where(config)}


def spoken(mesh: Mesh, config: Config, folder: Path, ids: list[int], count: int, options: dict[str, Any]) -> list[int]:
    """The program of a rank: `count` tokens that go on from `ids`. Ranks that differ in dp alone all do the same."""
    pipeline = load(mesh, config, folder)
    forward = partial(last_logits, pipeline)
    return generate(pipeline.zero.model, ids, count, context=config.train.seq_len, forward=forward, **options)


def _for_use(config: Config) -> Config:
    """The configuration with a batch that its layout can take: how the run cut its own into parts binds nobody here."""
    layout, micro_batches = config.layout, 2 * config.layout.pp
    setting.stages_by_rank(layout)  # refuses a schedule that is none
    if layout.pp > 1 and layout.schedule not in schedules.NAMES:
        micro_batches = text.read(Path(layout.schedule)).micro_batches  # a file is for one number only
    batch = layout.dp * config.train.micro_batch * micro_batches
    return configs.replaced(config, "train", global_batch=batch, accumulation=None)


def _where(config: Config) -> dict[str, Any]:
    """What a report says of the ranks."""
    return {"ranks": config.layout.world_size, "layout": configs.to_dict(config)["layout"]}


def _own_text(config: Config, manifest: checkpoint.Manifest) -> Corpus:
    """The text that the model was trained on; refused if it has changed since, as with another Python's library."""
    found = open_text(config)
    now, then = found.train.header["sha256"], manifest.raw["data"]["sha256"]
    if now != then:
        raise ValueError(
            f"data.source = {config.data.source!r} is not the text of the run any more (sha256 {now[:12]}, not {then[:12]}), "
            f"so what is held out now may have been trained on: build that text again, or pass --data to `eval`"
        )
    return found
