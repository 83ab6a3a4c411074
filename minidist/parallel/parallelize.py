"""The one place with the order in which parallelisms are applied to a plain model."""

from __future__ import annotations

import torch

from minidist.core import random
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice, extract
from minidist.model.config import ModelConfig
from minidist.model.transformer import Transformer, initial
from minidist.parallel import context, expert, split, tensor
from minidist.parallel.config import Recompute
from minidist.parallel.pipeline import stages
from minidist.parallel.pipeline.setting import splits, stages_by_rank
from minidist.parallel.recompute import apply
from minidist.parallel.split import Later
from minidist.parallel.units import Formats, Sharing
from minidist.parallel.zero import Zero


def parallelize(
    cfg: ModelConfig,
    mesh: Mesh,
    *,
    seed: int,
    formats: Formats | None = None,
    offload: bool = False,
    recompute: Recompute | None = None,
    seq_len: int = 1,
) -> Zero:
    """Build this rank's part of the model, its weights drawn from (seed, name), and wrap it for training.

    What is cut over which ranks, `mesh.layout` says; `formats` (default: fp32) and `offload` are those of `Zero`; `seq_len` is
    what `layout.split = "cost"` reckons with. The whole model exists on the meta device only, so no rank ever holds more than
    its part. The order: first which layers stay; then what cuts parameters; then split backward and recompute, so that they
    repeat what was cut; last ZeRO, which cuts what is left and gathers it around all of that.
    """
    layout, later = mesh.layout, Later()
    place, cut = mesh.coordinates["pp"], None
    with torch.device("meta"):
        model = Transformer(cfg)
    if layout.pp > 1:
        cut = stages.cut_of(layout, cfg, stages_by_rank(layout), seq_len)
        stages.keep(model, cut, place)
    if layout.tp > 1:
        tensor.apply(model, mesh.group("tp"), sp=layout.sp, regather=layout.sp_regather, later=later)
    if cfg.experts:
        expert.apply(model, mesh, sp=layout.sp)
    context.apply(model, mesh.group("cp"), layout.cp_attention)
    if cut:
        stages.mark_tied(model, cut, place)
    if splits(layout):
        split.apply(model, later)
    apply(model, recompute or Recompute())
    return Zero(
        model,
        mesh.group("shard" if layout.zero else "dp_cp"),
        stage=layout.zero,
        replicas=mesh.group("replicate") if layout.zero else None,
        gathers=mesh.twin("shard") if layout.zero == 3 else None,
        keep=not layout.reshard,
        bucket=layout.bucket * 2**20,
        formats=formats or Formats(),
        device=mesh.device,
        fill=lambda record: draw(record, cfg, seed),
        offload=offload,
        elsewhere={"expert_dp": Sharing(mesh.group("expert_dp"), gathers=mesh.twin("expert_dp") if layout.zero == 3 else None)},
        owner_among=lambda record, rank: first_of(layout, record, rank),
        parts=stages.stages_of(model, cut, place) if cut else (),
        later=later,
    )


def first_of(layout: Layout, record: Slice, rank: int) -> int:
    """Of the ranks that hold the same elements as `rank`, along the axes that the record names, the first."""
    return layout.rank(**layout.coordinates(rank) | dict.fromkeys(record.replicated, 0))


def draw(record: Slice, cfg: ModelConfig, seed: int) -> torch.Tensor:
    """Initial values (record.numel,) of a slice of a parameter: a function of (seed, name), whatever the layout."""
    std = initial(record.name, cfg)
    if std is None:
        return extract(record, torch.ones(record.shape))  # padding stays zero
    return random.normal(seed, record.name, record, std)
