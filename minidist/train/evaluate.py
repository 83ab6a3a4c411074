"""Evaluation on the held-out part: summed loss over summed valid tokens of all ranks, divided once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from minidist.core import comm
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.data.batch import Batch
from minidist.model.loss import count_valid
from minidist.parallel.context import shard
from minidist.parallel.pipeline.runtime import Call, Pipeline
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
def evaluate(model: nn.Module, batches: Iterable[Batch], mesh: Mesh, pipeline: Pipeline | None = None) -> Evaluation:
    """Evaluate `model` on this rank's `batches`; collective over dp and cp, whose ranks hold different tokens, and over pp.

    `pipeline`: what runs the model where this rank holds some of its layers only; default, the model itself. The two sums are
    float64 and cross in one all-reduce. A rank may have no batch at all, or only empty ones.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # loss, tokens
    batches = iter(batches)
    while some := list(islice(batches, 2 * mesh.layout.pp)):  # as many as keep every stage busy most of the time
        calls = [Call(shard(batch, mesh.group("cp"), mesh.layout.cp_attention).to(mesh.device)) for batch in some]

        def count(logits: Tensor, micro: int, calls: list[Call] = calls) -> None:
            targets = calls[micro].batch.targets
            sums[0] += model.loss_sum(logits, targets)
            sums[1] += count_valid(targets)

        if pipeline:
            pipeline.forward(calls, count)
        else:
            for micro, call in enumerate(calls):
                count(model(call.batch.tokens, call.batch.positions, call.batch.documents), micro)
    model.train(training)
    comm.all_reduce(sums, mesh.group("dp_cp"), tag="control")
    if mesh.layout.pp > 1:  # the rank with the last stage has counted
        comm.all_reduce(sums, mesh.group("pp"), tag="control")
    total, tokens = host(sums, expect=[0.0, 0.0])
    return Evaluation(total, int(tokens))
