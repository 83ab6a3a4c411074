"""What keeps experts evenly loaded: a balance loss, a z-loss and a selection bias, from statistics of each row.

A token counts where its target does; n of them are in a row, each choosing K of E experts with the router's probabilities p.

- balance loss of a row, E sum_e f_e P_e: f_e is the share of the row's n K choices that fell on expert e, P_e the mean of p_e
  (Fedus et al. 2021, "Switch Transformers", section 2.2, taken per sequence as in DeepSeek-AI 2024, "DeepSeek-V3", section
  2.1.2). 1 where both are even. Only P has a gradient.
- z-loss of a token: log(sum_e exp(logit_e))^2 (Zoph et al. 2022, "ST-MoE", section 3.1).
- selection bias: added to p where experts are chosen and nowhere else; after each step it falls for an expert that had more
  than its share of the step's choices, and rises for one that had less (Wang et al. 2024, "Auxiliary-Loss-Free Load
  Balancing").

Both losses come under the one rule of the engine: a row's balance loss counts n times, a token's z-loss once, and the sum over
the global batch is divided by its valid tokens. A row is a row whatever rank or micro-batch it falls to, so nothing depends on
the layout. Two rows, one sent to expert 0 and the other to expert 1 with probability 0.9, have 1.8 each, and so 1.8 together:
not the 1.0 that statistics over both would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Routing:
    """One micro-batch as its routers see it, and what they leave for the step. Made anew for every micro-batch."""

    valid: Tensor
    """(B,S) true where a token's target counts, for the tokens that this rank was given"""
    factor: float | None = None
    """what the step multiplies each token's loss by: loss scale / valid tokens of the global batch. Set before backward"""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """layer -> (E+3,) float64, of the valid tokens: choices that fell on each expert, choices dropped, and the sums of balance
    and z-loss. A forward that is repeated in backward writes the same once more, so nothing is counted twice"""


class Rows:
    """How the rows of a micro-batch lie: here, whole. What cuts them over ranks replaces this."""

    counted = True
    """whether what `total` gives is counted here, rather than on another rank that has it too"""

    def part(self, x: Tensor) -> Tensor:
        """(B,S,...) of whole rows -> of the tokens that the router sees here."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """The inverse of `part`."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Row statistics (B,...) of the tokens here -> of whole rows. Differentiable, for a loss that counts once."""
        return x


def statistics(logits: Tensor, probs: Tensor, chosen: Tensor, kept: Tensor, valid: Tensor) -> Tensor:
    """What a row's losses need, summed over its valid tokens: (B, 2E+3), namely choices and probabilities of each expert,
    tokens, squared log-sum-exps, dropped choices.

    logits, probs (B,S,E); chosen, kept (B,S,K), the latter E where a choice was dropped; valid (B,S).
    """
    experts = probs.shape[-1]
    hits = torch.zeros_like(probs).scatter(-1, chosen, 1.0)  # (B,S,E)
    ones = torch.ones_like(probs[..., :1])
    squares = torch.logsumexp(logits, -1, keepdim=True) ** 2
    dropped = (kept == experts).sum(-1, keepdim=True).to(probs.dtype)
    each = torch.cat((hits, probs, ones, squares, dropped), -1)  # (B,S,2E+3)
    return torch.where(valid[..., None], each, 0.0).sum(1)


def losses(stats: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Sums of balance loss and z-loss over the valid tokens of whole rows, (B, 2E+3) as `statistics` gives: two scalars."""
    experts = stats.shape[-1] // 2 - 1
    hits, probs, tokens, squares, _ = stats.split((experts, experts, 1, 1, 1), -1)
    rows = experts * (hits * probs).sum(-1, keepdim=True) / (top_k * tokens.clamp_min(1.0))  # n times the loss of a row
    return rows.sum(), squares.sum()


def load(stats: Tensor, balance: Tensor, z: Tensor) -> Tensor:
    """What a layer leaves in `Routing.loads`."""
    experts = stats.shape[-1] // 2 - 1
    total = stats.detach().sum(0, dtype=torch.float64)
    return torch.cat((total[:experts], total[-1:], torch.stack((balance, z)).detach().double()))


class _Attach(torch.autograd.Function):
    """x as it is; in backward, `loss` gets the gradient that it would get as a term of the step's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, routing: Routing) -> Tensor:
        ctx.routing, ctx.like = routing, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        assert ctx.routing.factor is not None, "set routing.factor before backward"
        return grad, torch.full_like(ctx.like, ctx.routing.factor), None


def attach(x: Tensor, loss: Tensor, routing: Routing) -> Tensor:
    """x, whose backward also starts at the scalar `loss`: a sum over tokens, to be divided as theirs is.

    So a layer adds a term to the loss wherever it lies, on a pipeline stage too that never sees the others (Megatron-LM's
    "MoEAuxLossAutoScaler").
    """
    return _Attach.apply(x, loss, routing)


# Once a step


def loads(routings: Sequence[Routing]) -> Tensor:
    """What the micro-batches of a step have left, summed: (L, E+3) float64, L the layers here, in order.

    Summed over the ranks of dp x cp it is that of the global batch.
    """
    layers = sorted(routings[0].loads)
    return torch.stack([torch.stack([routing.loads[layer] for routing in routings]).sum(0) for layer in layers])
