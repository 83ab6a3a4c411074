"""From a command line to ranks: a program runs on ranks that torchrun has started, on local ranks of our own, or right here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from minidist.train.config import Config

FOREVER_S = 30 * 24 * 3600.0  # a run may take as long as it likes; each collective has its own deadline


def count(stated: int | None) -> int:
    """How many ranks there are to be: torchrun's, or those of `--ranks`, or one. ValueError where the two disagree."""
    world = int(os.environ["WORLD_SIZE"]) if under_torchrun() else None
    if world and stated not in (None, world):
        raise ValueError(f"--ranks {stated}: torchrun has started {world} ranks, leave --ranks out")
    if stated is not None and stated < 1:
        raise ValueError(f"--ranks {stated}: give at least 1")
    return world or stated or 1


def run(program: Callable[..., Any], config: Config, *args: Any) -> Any:
    """What `program(mesh, config, *args)` returns on rank 0, of as many ranks as `config.layout` has.

    Under torchrun every rank calls this; the other ranks, which have no say, get None.
    """
    from minidist.core import mesh as meshes
    from minidist.core.device import for_rank

    layout, ranks = config.layout, config.layout.world_size
    if under_torchrun():
        rank = int(os.environ["RANK"])
        meshes.connect(rank, ranks, "env://")
        result = program(meshes.Mesh(layout, rank, device=for_rank(rank, ranks)), config, *args)
        meshes.disconnect()
        return result if rank == 0 else None
    if ranks == 1:
        return program(meshes.Mesh(layout, device=for_rank(0, 1)), config, *args)
    from minidist import ranks as pool

    return pool.run(program, ranks, config, *args, layout=layout, timeout_s=FOREVER_S, check=False)[0]


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or what keeps its contract, has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
