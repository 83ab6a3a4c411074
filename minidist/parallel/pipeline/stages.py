"""Stages: which layers each rank of a pipeline holds, and what it runs of the model.

A stage is some consecutive blocks; the first has the embedding before them, the last the final norm and the head after them.
Where head and embedding are one weight and the ends lie on two ranks, both hold it, start from the same values, add their
gradients up once a step, and so stay equal bit for bit (C06).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import Tensor, nn

from minidist.core.layout import Layout
from minidist.core.random import DropoutKey
from minidist.core.slices import Slice
from minidist.model import flops
from minidist.model.balance import Routing
from minidist.model.config import ModelConfig
from minidist.model.transformer import Transformer


@dataclass(frozen=True)
class Cut:
    """How a model lies on the ranks of the pp axis."""

    stages: tuple[tuple[int, ...], ...]
    """by place on the axis: its stages, by chunk"""
    layers: tuple[range, ...]
    """by stage: its blocks"""

    @property
    def ends(self) -> tuple[int, int]:
        """Places that hold the first and the last stage."""
        last = len(self.layers) - 1
        return tuple(next(rank for rank, held in enumerate(self.stages) if stage in held) for stage in (0, last))


def share(split: str, cfg: ModelConfig, stages: int, seq_len: int = 1) -> tuple[range, ...]:
    """The blocks of each stage, as `layout.split` says: "even", "cost" or numbers of layers such as "3,3,2".

    "even" spreads layers, the larger shares first. "cost" counts the head too, in the FLOPs of one token in a sequence of
    `seq_len`, and makes the most loaded stage as light as it can be. Every stage has at least one layer.
    """
    if split == "even":
        sizes = [cfg.layers // stages + (stage < cfg.layers % stages) for stage in range(stages)]
    elif split == "cost":
        sizes = _balanced(cfg, stages, seq_len)
    else:
        sizes = _given(split, cfg.layers, stages)
    return tuple(range(a, b) for a, b in pairwise(accumulate(sizes, initial=0)))


def _balanced(cfg: ModelConfig, stages: int, seq_len: int) -> list[int]:
    """One layer each, and each further one to the lightest stage: with equal layers this makes the heaviest one lightest."""
    head = 2 * cfg.width * cfg.vocab
    layer = (flops.forward_flops(cfg, seq_len).total - head) / cfg.layers
    sizes = [1] * stages
    for _ in range(cfg.layers - stages):
        cost = [size * layer + head * (stage == stages - 1) for stage, size in enumerate(sizes)]
        sizes[cost.index(min(cost))] += 1
    return sizes


def _given(split: str, layers: int, stages: int) -> list[int]:
    try:
        sizes = [int(word) for word in split.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != layers:
        raise ValueError(
            f'layout.split = {split!r}: give "even", "cost", or {stages} whole numbers of layers that add up to '
            f'model.layers = {layers}, such as "{",".join(map(str, [layers - stages + 1] + [1] * (stages - 1)))}"'
        )
    return sizes


class Layers(nn.ModuleList):
    """Some of a model's blocks, under the numbers that they have in the whole model; to be gone through, not indexed."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        for block in blocks:
            self.add_module(str(block.layer), block)


class Stage(nn.Module):
    """What one chunk of a rank runs: modules of that rank's model, under their names."""

    def __init__(self, model: Transformer, layers: range, first: bool, last: bool):
        super().__init__()
        self.first, self.last, self._model = first, last, [model]  # in a list: its parameters are not this module's
        if first:
            self.embedding = model.embedding
        self.blocks = Layers([block for block in model.blocks if block.layer in layers])
        if last:
            self.norm, self.head = model.norm, model.head

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Tokens (B,S) on the first stage, hidden state (B,S,D) on others -> logits (B,S,V) on the last, else hidden state."""
        (model,) = self._model
        if self.first:
            x = model.embed(x, dropout)
        x = model.body(x, positions, documents, dropout, routing, self.blocks)
        return model.logits(x) if self.last else x


def keep(model: Transformer, cut: Cut, rank: int) -> None:
    """Drop from a whole model, on the meta device, what the stages of pp place `rank` do not use."""
    held = cut.stages[rank]
    model.blocks = Layers([block for block in model.blocks if any(block.layer in cut.layers[stage] for stage in held)])
    first, last = 0 in held, len(cut.layers) - 1 in held
    if not last:
        model.norm = model.head = None
    if not first and not (last and model.cfg.tied):
        model.embedding = None


def mark_tied(model: Transformer, cut: Cut, rank: int) -> None:
    """Note in a weight's record that another place of the pp axis holds it too. After what cuts parameters."""
    if not model.cfg.tied or rank not in cut.ends or cut.ends[0] == cut.ends[1]:
        return
    weight = model.embedding.weight
    record = getattr(weight, "slice", None) or Slice.whole("embedding.weight", weight.shape)
    weight.slice = replace(record, replicated=(*record.replicated, "pp"))


def stages_of(model: Transformer, cut: Cut, rank: int) -> list[Stage]:
    """The stages of pp place `rank`, by chunk, of a model that `keep` has left to it."""
    last = len(cut.layers) - 1
    return [Stage(model, cut.layers[stage], stage == 0, stage == last) for stage in cut.stages[rank]]


def cut_of(layout: Layout, cfg: ModelConfig, stages: tuple[tuple[int, ...], ...], seq_len: int = 1) -> Cut:
    """The cut that `layout` asks for, given which stages lie where. ValueError where the model has too few layers."""
    number = sum(map(len, stages))
    if number > cfg.layers:
        raise ValueError(
            f"layout.pp = {layout.pp} with {number // layout.pp} chunks a rank makes {number} stages of model.layers = "
            f"{cfg.layers}: a stage needs a layer; use fewer stages, or a deeper model"
        )
    return Cut(stages, share(layout.split, cfg, number, seq_len))
