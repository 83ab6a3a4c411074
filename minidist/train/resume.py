"""Where a run begins: at its first step, from the weights of another, or where its last good checkpoint left it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minidist import checkpoint
from minidist.checkpoint.manifest import Manifest, step_name
from minidist.core import comm
from minidist.core.mesh import Mesh
from minidist.train import config as configs
from minidist.train.build import open_text
from minidist.train.config import Config
from minidist.train.state import expect_model, fill, restore
from minidist.train.step import Step

MUST_MATCH = ("model", "data.source", "data.tokenizer", "run.seed", "train.seq_len", "optim.name")
FREE = ("run", "data.prefetch", "layout", "metrics", "checkpoint", "train.accumulation", "train.micro_batch")


@dataclass
class Start:
    """Where the loop begins."""

    step: int = 0
    """optimizer steps that are behind"""
    samples: int = 0
    """of the sample stream, used up"""
    tokens: int = 0
    """valid targets so far"""
    loss: float | None = None
    """of the last step behind"""
    folder: Path | None = None
    """the checkpoint"""
    notes: list[str] = field(default_factory=list)
    """what a person should know"""


def check(config: Config) -> None:
    """Refuse, before any rank starts, a checkpoint that this run cannot go on from or begin with. ValueError says why."""
    if config.checkpoint.resume:
        found = checkpoint.latest(_folder(config), finite=True)
        if found is not None:
            with checkpoint.Reader(found) as reader:
                compare(config, reader.manifest)
    elif config.checkpoint.init:
        with checkpoint.Reader(checkpoint.resolve(Path(config.checkpoint.init))) as reader:
            expect_model(reader.manifest, config)


def begin(mesh: Mesh, step: Step) -> Start:
    """Give a new `Step` the state that its configuration asks for. Every rank of the mesh calls it."""
    config = step.config
    if config.checkpoint.resume:
        number = _agreed(mesh, _folder(config))
        if number >= 0:
            return _resumed(step, _folder(config) / step_name(number))
    if config.checkpoint.init:
        folder = checkpoint.resolve(Path(config.checkpoint.init))
        with checkpoint.Reader(folder) as reader:
            expect_model(reader.manifest, config)
            fill(step.zero, reader)
        return Start(notes=[f"the weights are those of {folder}"])
    return Start()


def compare(config: Config, manifest: Manifest) -> list[str]:
    """Refuse to go on where the run would silently be another one; what else differs, in words.

    The layout, how a batch is cut into micro-batches, and what is saved or said may change freely.
    """
    if "taken" not in manifest.state:
        raise ValueError(
            f"{manifest.folder}: it holds weights alone (format version {manifest.raw['format_version']}), no state to go on "
            f"from: begin a new run with --checkpoint.init {manifest.folder}"
        )
    then, now = _flat(configs.to_dict(configs.from_dict(manifest.raw["config"]))), _flat(configs.to_dict(config))
    changed = [key for key in {**now, **then} if now.get(key) != then.get(key)]
    for key in changed:
        if _among(key, MUST_MATCH):
            raise ValueError(
                f"{key} = {now.get(key)}: the run in {config.run.folder} has {then.get(key)}, and would not be the same run "
                f"with another one: leave it out, or begin a new run under another run.name"
            )
    text, trained = open_text(config).train.header["sha256"], manifest.raw["data"]["sha256"]
    if text != trained:
        raise ValueError(
            f"data.source = {config.data.source!r} is not the text of the run any more (sha256 {text[:12]}, not "
            f"{trained[:12]}): build that text again, or begin a new run under another run.name"
        )
    expect_model(manifest, config)
    return [
        f"{key} is {now.get(key)} from here on, it was {then.get(key)}" for key in changed if not _among(key, MUST_MATCH + FREE)
    ]


def _resumed(step: Step, folder: Path) -> Start:
    config = step.config
    with checkpoint.Reader(folder) as reader:
        manifest = reader.manifest
        changed = compare(config, manifest)
        restore(step, reader)
    state = manifest.state
    where = f"goes on after step {manifest.step} from {folder}"
    return Start(manifest.step, manifest.raw["samples"], state["tokens"], state["loss"], folder, [where, *changed])


def _agreed(mesh: Mesh, folder: Path) -> int:
    """The step of the last good checkpoint as rank 0 sees it, on every rank; -1: there is none (C25)."""
    number = torch.full((1,), -1, dtype=torch.int64, device=mesh.device)
    if mesh.rank == 0 and (found := checkpoint.latest(folder, finite=True)) is not None:
        number[0] = int(found.name.removeprefix("step-"))
    return int(comm.broadcast(number, mesh.world, src=0, tag="control"))


def _folder(config: Config) -> Path:
    return config.run.folder / "checkpoints"


def _flat(tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def _among(key: str, names: tuple[str, ...]) -> bool:
    return key in names or key.partition(".")[0] in names
