"""One optimizer step: the order of everything that happens between two versions of the weights.

The order is fixed, and each line of `Step.run` and `Step.end` is one of its items: finish the reductions; agree over the
world whether a gradient is non-finite; skip, or take the norm over all elements once; clip; update; count. The only division
is that of the loss, by the number of valid targets of the whole global batch, before the first backward.
"""

from __future__ import annotations

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
from minidist.train import optim
from minidist.train.config import Config
from minidist.train.schedule import lr_at


@dataclass(frozen=True)
class StepResult:
    """What one step did. Every figure is that of the whole job."""

    loss: float
    """nats a token, before the update; NaN where the batch had no valid target"""
    grad_norm: float
    """L2 norm of the whole gradient, before clipping"""
    lr: float
    tokens: int
    """valid targets"""
    skipped: bool
    """a gradient was not finite on some rank, so no rank changed its weights or counters"""


class Step:
    """Takes optimizer steps on a parallelised model. `taken` counts the successful ones; the learning rate follows it."""

    def __init__(self, zero: Zero, mesh: Mesh, config: Config):
        self.zero, self.mesh, self.config = zero, mesh, config
        self.optimizer = optim.build(config.optim, segments(zero))
        self.taken = 0

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
            loss.backward()
            total += loss.detach()
        return self.end(total, tokens)

    @torch.no_grad()
    def end(self, loss: Tensor, tokens: int) -> StepResult:
        """What follows the last backward. `loss` () is this rank's part of the step's loss."""
        self.zero.finish()
        norm = grad_norm(self.zero)
        # One sum serves both: the loss of the job, and on how many ranks something was not finite.
        report = torch.stack([loss, (~norm.isfinite()).double()])
        loss, broken = host(comm.all_reduce(report, self.mesh.world, tag="control"), expect=[0.0, 0.0])
        norm, lr = host(norm, expect=0.0), lr_at(self.taken, self.config)
        if not broken:
            self._clip(norm)
            optim.set_lr(self.optimizer, lr)
            self.optimizer.step()
            self.taken += 1
        return StepResult(loss if tokens else float("nan"), norm, lr, tokens, bool(broken))

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

    def _clip(self, norm: float) -> None:
        limit = self.config.optim.clip
        if limit and norm > limit:
            for unit in self.zero.trainable:
                unit.grads.mul_(limit / norm)


def segments(zero: Zero) -> list[optim.Segment]:
    """The stretches of the flat buffers that the optimizer treats alike: per unit its matrices (with decay) and the rest."""
    found = []
    for unit in zero.trainable:
        for a, b, decay in ((0, unit.matrices, True), (unit.matrices, unit.numel, False)):
            if b > a:
                master = unit.weights[a:b]
                master.grad = unit.grads[a:b]
                found.append(optim.Segment(master, decay))
    return found


def grad_norm(zero: Zero) -> Tensor:
    """L2 norm () of the whole gradient, in float64. Every rank of stage 0 holds all of it, so nothing is sent."""
    norms = torch._foreach_norm([unit.grads for unit in zero.trainable])
    return torch.stack(norms).double().norm() if norms else torch.zeros((), dtype=torch.float64)
