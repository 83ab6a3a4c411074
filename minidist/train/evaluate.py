"""Evaluation on the held-out part: summed loss over summed valid tokens of all ranks, divided once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from minidist.core import comm
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.data.batch import Batch
from minidist.model.loss import count_valid, loss_sum
from minidist.train import metrics


@dataclass(frozen=True)
class Evaluation:
    """The result for the whole job, the same on every rank."""

    loss_sum: float
    """nats over all tokens"""
    tokens: int
    """valid target tokens over all ranks"""

    @property
    def loss(self) -> float | None:
        """Nats a token; None where no token was valid."""
        return metrics.mean_loss(self.loss_sum, self.tokens)

    @property
    def perplexity(self) -> float | None:
        """exp(loss); None where no token was valid."""
        return metrics.perplexity(self.loss_sum, self.tokens)

    def __str__(self):
        if not self.tokens:
            return "no valid token, so no loss"
        return f"loss {self.loss:.4f} nats a token, perplexity {self.perplexity:.3f}, {self.tokens:,} tokens"


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], mesh: Mesh) -> Evaluation:
    """Evaluate `model` on this rank's `batches`; collective over dp and cp, whose ranks hold different tokens.

    The two sums are float64 and cross in one all-reduce. A rank may have no batch at all, or only empty ones.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # loss, tokens
    for batch in batches:
        batch = batch.to(mesh.device)
        logits = model(batch.tokens, batch.positions, batch.documents)  # (B, S, V)
        sums[0] += loss_sum(logits, batch.targets)
        sums[1] += count_valid(batch.targets)
    model.train(training)
    comm.all_reduce(sums, mesh.group("dp_cp"), tag="control")
    total, tokens = host(sums, expect=[0.0, 0.0])
    return Evaluation(total, int(tokens))
