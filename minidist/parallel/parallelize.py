"""The one place with the order in which parallelisms are applied to a plain model."""

from __future__ import annotations

import torch

from minidist.core import random
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice, extract
from minidist.model.config import ModelConfig
from minidist.model.transformer import Transformer, initial
from minidist.parallel.config import Recompute
from minidist.parallel.recompute import apply
from minidist.parallel.units import Formats
from minidist.parallel.zero import Zero


def parallelize(
    cfg: ModelConfig,
    mesh: Mesh,
    *,
    seed: int,
    formats: Formats | None = None,
    offload: bool = False,
    recompute: Recompute | None = None,
) -> Zero:
    """Build this rank's part of the model, its weights drawn from (seed, name), and wrap it for training.

    What is cut over which ranks, `mesh.layout` says; `formats` (default: fp32) and `offload` are those of `Zero`. The whole
    model exists on the meta device only, so no rank ever holds more than its part. The order: recompute first, so that it
    lies inside of what gathers a block's weights.
    """
    with torch.device("meta"):
        model = Transformer(cfg)
    apply(model, recompute or Recompute())
    layout = mesh.layout
    return Zero(
        model,
        mesh.group("shard" if layout.zero else "dp_cp"),
        stage=layout.zero,
        replicas=mesh.group("replicate") if layout.zero else None,
        gathers=mesh.twin("shard") if layout.zero == 3 else None,
        keep=not layout.reshard,
        formats=formats or Formats(),
        device=mesh.device,
        fill=lambda record: draw(record, cfg, seed),
        offload=offload,
    )


def draw(record: Slice, cfg: ModelConfig, seed: int) -> torch.Tensor:
    """Initial values (record.numel,) of a slice of a parameter: a function of (seed, name), whatever the layout."""
    std = initial(record.name, cfg)
    if std is None:
        return extract(record, torch.ones(record.shape))  # padding stays zero
    return random.normal(seed, record.name, record, std)
