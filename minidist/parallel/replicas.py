"""Gradients of parameters that several ranks hold, where each rank has seen a part of what they did: summed once a step.

Under sequence parallelism a norm's weight meets one shard of the sequence on each rank; a kv head that several tensor-parallel
ranks hold meets the query heads of each. In both cases a rank's gradient is one term of a sum over the tp group (C39, C40).
A tied embedding on the first and the last stage of a pipeline is used there once each: two terms of a sum (C06).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.core import comm
from minidist.core.mesh import Mesh
from minidist.parallel.units import tied
from minidist.parallel.zero import Zero


@dataclass(frozen=True)
class Partial:
    """Marks a parameter whose gradient is a term of a sum over the tp group: copy `which` of `count` different ones."""

    which: int = 0
    count: int = 1


class Replicas:
    """Sums the gradients of a `Zero` that are terms of a sum: those marked over the tp group, all in one collective, and a
    tied weight over its two stages."""

    def __init__(self, zero: Zero, mesh: Mesh):
        self.group, self.stages = mesh.group("tp"), mesh.group("tied")
        self.terms: list[tuple[Tensor, Partial]] = [
            (local, zero.parameter(record.name).partial)
            for record, local in zero.gradients()
            if hasattr(zero.parameter(record.name), "partial")
        ]
        """(this rank's piece of a gradient, what it is a copy of)"""
        self.tied = [local for record, local in zero.gradients() if tied(zero.parameter(record.name))]

    @torch.no_grad()
    def sum(self) -> None:
        """Replace every such gradient by the sum over the ranks that hold the same elements."""
        works = [(local, comm.all_reduce(local, self.stages, tag="grad", async_op=True)) for local in self.tied]
        if self.terms:
            self._sum_terms()
        for local, work in works:
            total = work.wait()
            if total is not local:
                local.copy_(total)

    def _sum_terms(self) -> None:
        places = [local.new_zeros(partial.count, local.numel()) for local, partial in self.terms]
        for place, (local, partial) in zip(places, self.terms, strict=True):
            place[partial.which] = local
        sizes = [place.numel() for place in places]
        total = comm.all_reduce(torch.cat([place.flatten() for place in places]), self.group, tag="grad")
        for (local, partial), summed in zip(self.terms, total.split(sizes), strict=True):
            local.copy_(summed.view(partial.count, -1)[partial.which])
