"""One optimizer step: the order of everything that happens between two versions of the weights.

The order is fixed, and each line of `Step.run` and `Step.end` is one of its items: finish the reductions; agree over the
world whether a gradient is non-finite; skip, or unscale; take the norm over all elements once; clip; update; publish; count.
The only division is that of the loss, by the number of valid targets of the whole global batch, before the first backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist.core import comm
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.core.random import DropoutKey
from minidist.data.batch import Batch
from minidist.model.loss import count_valid, loss_sum
from minidist.parallel.zero import Zero
from minidist.train.config import Config
from minidist.train.norm import counted, squares
from minidist.train.optim import UnitOptimizer
from minidist.train.precision import LossScale, dtype
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


class Step:
    """Takes optimizer steps on a parallelised model. `taken` counts the successful ones; the learning rate follows it."""

    def __init__(self, zero: Zero, mesh: Mesh, config: Config):
        self.zero, self.mesh, self.config = zero, mesh, config
        moments = dtype(config.precision.moments)
        self.optimizers = [UnitOptimizer(config.optim, unit, moments) for unit in zero.trainable]
        self.scale = LossScale(config.precision)
        self.taken = 0
        self._counted = counted(zero.gradients(), mesh.rank)

    def run(self, batches: Sequence[Batch], number: int | None = None) -> StepResult:
        """One step on this rank's micro-batches, equally many on every rank. `number` names the step to dropout.

        Default number: `taken`.
        """
        batches = [batch.to(self.mesh.device) for batch in batches]
        tokens = self._count(batches)
        self.zero.start_step()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for i, batch in enumerate(batches):
            self.zero.before_backward(last=i == len(batches) - 1)
            loss = self._loss(batch, self.taken if number is None else number) / max(tokens, 1)
            (loss * self.scale.value).backward()
            self.zero.after_backward()
            total += loss.detach()
        return self.end(total, tokens)

    @torch.no_grad()
    def end(self, loss: Tensor, tokens: int) -> StepResult:
        """What follows the last backward. `loss` () is this rank's part of the step's loss."""
        self.zero.finish()
        # One sum serves three: the loss of the job, its norm, and whether anything was not finite on any rank.
        report = torch.stack([loss, squares(self._counted).to(loss.device)])
        loss, square = host(comm.all_reduce(report, self.mesh.world, tag="control"), expect=[0.0, 0.0])
        scale, lr, skipped = self.scale.value, lr_at(self.taken, self.config), not math.isfinite(square)
        norm = math.sqrt(square) / scale if square >= 0 else square
        if not skipped:
            self._update(lr, factor=self._clip(norm) / scale)
            self.taken += 1
        self.scale.step(skipped)
        return StepResult(loss if tokens else float("nan"), norm, lr, tokens, skipped, scale)

    def _count(self, batches: Sequence[Batch]) -> int:
        """Valid targets of the global batch: the one divisor of the step."""
        own = torch.stack([count_valid(batch.targets) for batch in batches]).sum()
        size = sum(batch.targets.numel() for batch in batches) * self.mesh.group("dp_cp").size
        return host(comm.all_reduce(own, self.mesh.group("dp_cp"), tag="control"), expect=size)

    def _loss(self, batch: Batch, number: int) -> Tensor:
        key = None
        if self.config.model.dropout:
            key = DropoutKey(self.config.run.seed, number, batch.samples, batch.index)
        return loss_sum(self.zero.model(batch.tokens, batch.positions, batch.documents, key), batch.targets)

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
