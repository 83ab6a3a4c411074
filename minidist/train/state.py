"""What a checkpoint holds of a run, and putting it back at any layout: weights, moments and counters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minidist import checkpoint
from minidist.checkpoint.manifest import Manifest, moment
from minidist.core.slices import Slice
from minidist.model.moe import biases
from minidist.model.transformer import Transformer
from minidist.parallel.zero import Zero
from minidist.train.config import Config
from minidist.train.optim import Segment, UnitOptimizer
from minidist.train.step import Step


def pieces(step: Step) -> list[tuple[Slice, Tensor]]:
    """This rank's tensors: weights in their widest form, routers' biases, moments. Views of what training changes."""
    zero, stage = step.zero, step.layout.rank(pp=step.mesh.coordinates["pp"])
    moments = [piece for optimizer in step.optimizers for piece in _moments(zero, optimizer)]
    return [*zero.weights(), *biases(zero.model, owner=stage), *moments]


def counters(step: Step) -> dict[str, Any]:
    """What else decides how the run goes on. Dropout and the order of samples follow from seed, step and position alone."""
    scale = step.scale
    return {
        "taken": step.taken,
        "loss_scale": {"value": scale.value, "good": scale.good},
        "random": {"seed": step.config.run.seed, "next_step": step.taken},
    }


def restore(step: Step, reader: checkpoint.Reader) -> None:
    """Give a new `Step` the state of a checkpoint, of which this rank reads what it holds."""
    state = reader.manifest.state
    fill(step.zero, reader)
    step.taken = state["taken"]
    step.scale.value, step.scale.good = state["loss_scale"]["value"], state["loss_scale"]["good"]
    for optimizer in step.optimizers:
        records = step.zero.records(optimizer.unit)

        def read(key: str, segment: Segment, records=records) -> Tensor:
            held = torch.zeros(len(segment.master), dtype=segment.master.dtype)
            for record, place in _inside(records, segment):
                held[place] = reader.read(replace(record, name=moment(key, record.name))).to(held.dtype)
            return held

        optimizer.restore(step.taken, read)


@torch.no_grad()
def fill(zero: Zero, reader: checkpoint.Reader) -> None:
    """Give a parallelised model the weights of a checkpoint, of which this rank reads what it holds."""
    for unit in zero.units:
        unit.fill(reader.read)
    for record, bias in biases(zero.model):
        bias.copy_(reader.read(record))


def expect_model(manifest: Manifest, config: Config) -> None:
    """Refuse a checkpoint of another model: missing, unexpected and mis-shaped names together."""
    with torch.device("meta"):
        model = Transformer(config.model)
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    checkpoint.match(manifest.weights, whole, what=str(manifest.folder))


def _moments(zero: Zero, optimizer: UnitOptimizer) -> list[tuple[Slice, Tensor]]:
    records = zero.records(optimizer.unit)
    return [
        (replace(record, name=moment(key, record.name)), held[place])
        for key, segment, held in optimizer.moments_held()
        for record, place in _inside(records, segment)
    ]


def _inside(records: list[tuple[Slice, slice]], segment: Segment) -> list[tuple[Slice, slice]]:
    """The records that lie in a segment, and their places in it. A parameter is all matrix or all not, so none lies in two."""
    first, last = segment.start, segment.start + len(segment.master)
    inside = [(record, place) for record, place in records if first <= place.start < place.stop <= last]
    return [(record, slice(place.start - first, place.stop - first)) for record, place in inside]
