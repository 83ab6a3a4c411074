"""A trained model taken from its checkpoint: the model, its text and its tokenizer, for `eval` and `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from minidist import checkpoint
from minidist.core.device import for_rank
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.data.corpus import Corpus
from minidist.data.loader import validation_batches
from minidist.data.tokenizer import ByteTokenizer
from minidist.model.transformer import Transformer
from minidist.train import config as configs
from minidist.train.build import open_text
from minidist.train.config import Config
from minidist.train.evaluate import evaluate
from minidist.train.generate import generate


def load_trained(path: Path, device: torch.device) -> tuple[Transformer, Config, checkpoint.Manifest]:
    """The plain whole model of a run or checkpoint, in the dtype it was trained in; its configuration; the manifest."""
    manifest, tensors = checkpoint.load(checkpoint.resolve(path))
    config = configs.from_dict(manifest.raw["config"])
    model = Transformer(config.model).to(device, getattr(torch, config.precision.dtype))
    checkpoint.fill(model, tensors, what=str(manifest.folder))
    return model, config, manifest


def evaluate_trained(path: Path, data: str | None = None, samples: int = 0) -> dict[str, Any]:
    """Held-out loss of a run, on its own text or on the corpus folder `data`; 0 `samples` takes all sequences."""
    if samples < 0:
        raise ValueError(f"--samples {samples}: give at least 1, or 0 for all")
    device = for_rank(0, 1)
    model, config, manifest = load_trained(path, device)
    if data is not None:
        config = configs.replaced(config, "data", source=data, tokenizer=None)
    text = open_text(config) if data else _own_text(config, manifest)
    if text.tokenizer.name != manifest.raw["data"]["tokenizer"]:
        raise ValueError(
            f"--data {data}: built with {text.tokenizer.name}, the model knows {manifest.raw['data']['tokenizer']}"
        )
    batches = validation_batches(text.validation, config.train.seq_len, config.train.micro_batch, limit=samples or None)
    result = evaluate(model, batches, Mesh(Layout(), device=device))
    return {
        "checkpoint": str(manifest.folder),
        "step": manifest.step,
        "data": str(text.path),
        "loss": result.loss,
        "perplexity": result.perplexity,
        "tokens": result.tokens,
    }


def generate_trained(path: Path, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The text that a run's model puts after `prompt`."""
    if tokens < 1:
        raise ValueError(f"--tokens {tokens}: give at least 1")
    if not temperature >= 0:
        raise ValueError(f"--temperature {temperature}: give 0 or more")
    if top_k < 0:
        raise ValueError(f"--top-k {top_k}: give at least 1, or 0 for all")
    model, config, manifest = load_trained(path, for_rank(0, 1))
    plain = manifest.raw["data"]["tokenizer"] == ByteTokenizer.name
    coder = ByteTokenizer() if plain else _own_text(config, manifest).tokenizer
    ids = coder.encode(prompt).tolist() or [coder.separator]
    out = generate(
        model, ids, tokens, context=config.train.seq_len, temperature=temperature, top_k=top_k, seed=seed, vocab=coder.vocab
    )
    return coder.decode(out)


def _own_text(config: Config, manifest: checkpoint.Manifest) -> Corpus:
    """The text that the model was trained on; refused if it has changed since, as with another Python's library."""
    text = open_text(config)
    now, then = text.train.header["sha256"], manifest.raw["data"]["sha256"]
    if now != then:
        raise ValueError(
            f"data.source = {config.data.source!r} is not the text of the run any more (sha256 {now[:12]}, not {then[:12]}), "
            f"so what is held out now may have been trained on: build that text again, or pass --data to `eval`"
        )
    return text
