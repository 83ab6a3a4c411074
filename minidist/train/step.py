"""One optimizer step: the order of everything that happens between two versions of the weights.

The order is fixed, and each line of `Step.run` and `Step.end` is one of its items: finish the reductions; agree over the
world whether a gradient is non-finite; skip, or unscale; take the norm over all elements once; clip; update; publish; count.
The only division is that of the loss, by the number of valid targets of the whole global batch, before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minidist.core import comm
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.core.random import DropoutKey
from minidist.data.batch import Batch
from minidist.model.balance import Routing
from minidist.model.loss import IGNORE, count_valid
from minidist.parallel.context import shard
from minidist.parallel.pipeline.runtime import Call, Pipeline
from minidist.parallel.replicas import Replicas
from minidist.parallel.zero import Zero
from minidist.train.config import Config
from minidist.train.norm import counted, squares
from minidist.train.optim import UnitOptimizer
from minidist.train.precision import LossScale, dtype
from minidist.train.routing import RoutingResult, finish, sum_loads
from minidist.train.schedule import lr_at


@dataclass(frozen=True)
class StepResult:
    """What one step did. Every figure is that of the whole job."""

    loss: float
    """nats a token, before the update; NaN where the batch had no valid target"""
    grad_norm: float
    """L2 norm of the whole gradient, unscaled, before clipping"""
    lr: float
    tokens: int
    """valid targets"""
    skipped: bool
    """a gradient was not finite on some rank, so no rank changed its weights or counters"""
    loss_scale: float
    """what the loss was multiplied by in this step"""
    routing: RoutingResult | None = None
    """what the routers did; None without experts"""


class Step:
    """Takes optimizer steps on a parallelised model. `taken` counts the successful ones; the learning rate follows it."""

    def __init__(self, zero: Zero, mesh: Mesh, config: Config):
        self.zero, self.mesh, self.config, self.layout = zero, mesh, config, config.layout
        moments = dtype(config.precision.moments)
        self.optimizers = [UnitOptimizer(config.optim, unit, moments) for unit in zero.trainable]
        self.scale = LossScale(config.precision)
        self.taken = 0
        self.pipeline = Pipeline(zero, mesh)
        self.replicas = Replicas(zero, mesh)
        self._counted = counted(zero.gradients(), mesh.rank)

    def run(self, batches: Sequence[Batch], number: int | None = None) -> StepResult:
        """One step on this rank's micro-batches, equally many on every rank. `number` names the step to dropout.

        Default number: `taken`.
        """
        calls = [self._call(batch, self.taken if number is None else number) for batch in batches]
        counted_tokens = self._count(calls)  # they travel while the first forward runs
        self.zero.start_step()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)

        def scaled_loss(logits: Tensor, micro: int) -> Tensor:
            nonlocal total
            loss = self.zero.model.loss_sum(logits, calls[micro].batch.targets) / max(tokens(), 1)
            total += loss.detach()
            return loss * self.scale.value

        @cache
        def tokens() -> int:
            counted = counted_tokens()
            for call in calls:
                if call.routing:
                    call.routing.factor = self.scale.value / max(counted, 1)
            return counted

        if not self.pipeline.ends_here:
            tokens()  # its backward has no loss that would ask
        self.pipeline.train(calls, scaled_loss)
        return self.end(total, tokens(), [call.routing for call in calls if call.routing])

    @torch.no_grad()
    def end(self, loss: Tensor, tokens: int, routings: Sequence[Routing] = ()) -> StepResult:
        """What follows the last backward. `loss` () is this rank's part of the step's loss; `routings` of its micro-batches."""
        self.zero.finish()
        self.replicas.sum()
        loads = sum_loads(routings, self.mesh, self.config.model.layers) if routings else None
        if self.mesh.coordinates["tp"]:
            loss = torch.zeros_like(loss)  # tensor-parallel ranks have the same loss: it counts once
        # One sum serves three: the loss of the job, its norm, and whether anything was not finite on any rank.
        report = torch.stack([loss, squares(self._counted).to(loss.device)])
        loss, square = host(comm.all_reduce(report, self.mesh.world, tag="control"), expect=[0.0, 0.0])
        scale, lr, skipped = self.scale.value, lr_at(self.taken, self.config), not math.isfinite(square)
        norm = math.sqrt(square) / scale if square >= 0 else square
        if not skipped:
            self._update(lr, factor=self._clip(norm) / scale)
            self.taken += 1
        self.scale.step(skipped)
        routed = None if loads is None else finish(self.zero.model, loads, skipped)
        return StepResult(loss if tokens else float("nan"), norm, lr, tokens, skipped, scale, routed)

    def _count(self, calls: Sequence[Call]) -> Callable[[], int]:
        """Launch the sum of valid targets of the global batch, the one divisor of the step; what comes back waits for it."""
        group = self.mesh.group("dp_cp")
        own = torch.stack([count_valid(call.batch.targets) for call in calls]).sum()
        work = comm.all_reduce(own, group, tag="control", async_op=True)
        size = sum(call.batch.targets.numel() for call in calls) * group.size
        return lambda: host(work.wait(), expect=size)

    def _call(self, batch: Batch, number: int) -> Call:
        """This rank's part of a micro-batch, and what goes with it."""
        batch, key = shard(batch, self.mesh.group("cp"), self.layout.cp_attention).to(self.mesh.device), None
        if self.config.model.dropout:
            index = batch.index  # places in the window of the hidden states that are dropped from
            if self.layout.sp:
                index = index.chunk(self.mesh.group("tp").size)[self.mesh.group("tp").rank]
            key = DropoutKey(self.config.run.seed, number, batch.samples, index)
        return Call(batch, key, Routing(batch.targets != IGNORE) if self.config.model.experts else None)

    def _clip(self, norm: float) -> float:
        """What the unscaled gradient is multiplied by, so that its norm is at most the limit."""
        limit = self.config.optim.clip
        return limit / norm if limit and norm > limit else 1.0

    def _update(self, lr: float, factor: float) -> None:
        """New weights, a unit at a time: while one is on its way to the other ranks, the next is updated."""
        for optimizer in self.optimizers:
            optimizer.step(lr, factor)
            self.zero.publish(optimizer.unit)
        self.zero.settle()
