"""Embedding and cross-entropy over a vocabulary that is cut over ranks; no rank ever sees all logits of a token.

Shoeybi et al. 2019, "Megatron-LM", section 3: a rank knows the largest of its logits, the sum of their exponentials, and the
target's logit if the target is its own. One all-reduce of the largest and one of the two sums make the loss whole: 3 numbers a
token instead of V.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.core import comm, comm_grad
from minidist.core.mesh import Group
from minidist.model.loss import IGNORE


def embed(layer: nn.Embedding, group: Group, sp: bool, tokens: Tensor) -> Tensor:
    """Rows of `tokens` (B,S) from the rank that has them: (B,S,D), or under `sp` this rank's shard of the sequence."""
    local = tokens - group.rank * layer.weight.shape[0]
    elsewhere = (local < 0) | (local >= layer.weight.shape[0])
    found = F.embedding(local.masked_fill(elsewhere, 0), layer.weight)
    found = found.masked_fill(elsewhere[..., None], 0.0)
    return comm_grad.reduce_scatter(found, group, dim=1) if sp else comm_grad.fan_in(found, group)


def all_logits(group: Group, vocab: int, logits: Tensor) -> Tensor:
    """Logits (...,V) of all ranks' parts (...,V/n), to look at or draw from; without gradient."""
    return comm.all_gather(logits.detach(), group, dim=logits.dim() - 1)[..., :vocab]


def loss_sum(group: Group, vocab: int, logits: Tensor, targets: Tensor) -> Tensor:
    """`model.loss.loss_sum` of logits (...,V/n), this rank's part of the vocabulary, and targets (...); the same on all ranks.

    `vocab` is the true V: columns beyond it, which fill up the last parts, take no probability and get no gradient (C41).
    """
    return _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), group, vocab)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group, vocab: int) -> Tensor:
        start = group.rank * logits.shape[1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # (N,V/n)
        wide[:, max(vocab - start, 0) :] = -torch.inf
        top = comm.all_reduce(wide.amax(1), group, "max")  # (N,)
        local = targets - start
        own = (local >= 0) & (local < logits.shape[1])  # IGNORE is below 0, so nobody's
        place = local.masked_fill(~own, 0)[:, None]
        hit = wide.gather(1, place)[:, 0].masked_fill(~own, 0.0)  # the target's logit, on one rank
        wide = wide.sub_(top[:, None]).exp_()
        sums = comm.all_reduce(torch.stack([wide.sum(1), hit]), group)  # (2,N)
        valid = targets != IGNORE
        ctx.save_for_backward(wide.div_(sums[0][:, None]), place, own, valid)
        ctx.dtype = logits.dtype
        return (sums[0].log() + top - sums[1]).masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, place, own, valid = ctx.saved_tensors
        of_logits = probabilities * valid[:, None]
        of_logits.scatter_add_(1, place, -own.to(of_logits.dtype)[:, None])
        return (of_logits * grad).to(ctx.dtype), None, None, None
