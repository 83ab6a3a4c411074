"""The one place with the order in which parallelisms are applied to a plain model."""

from __future__ import annotations

import torch

from minidist.core import random
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice, extract
from minidist.model.config import ModelConfig
from minidist.model.transformer import Transformer, initial
from minidist.parallel.zero import Zero


def parallelize(cfg: ModelConfig, mesh: Mesh, *, seed: int, dtype: torch.dtype = torch.float32) -> Zero:
    """Build this rank's part of the model, its weights drawn from (seed, name), and wrap it for training.

    The whole model exists on the meta device only, so no rank ever holds more than its part.
    """
    with torch.device("meta"):
        model = Transformer(cfg)
    return Zero(model, mesh.group("dp_cp"), dtype=dtype, device=mesh.device, fill=lambda record: draw(record, cfg, seed))


def draw(record: Slice, cfg: ModelConfig, seed: int) -> torch.Tensor:
    """Initial values (record.numel,) of a slice of a parameter: a function of (seed, name), whatever the layout."""
    std = initial(record.name, cfg)
    if std is None:
        return extract(record, torch.ones(record.shape))  # padding stays zero
    return random.normal(seed, record.name, record, std)
