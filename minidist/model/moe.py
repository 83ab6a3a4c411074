"""Mixture of experts: many feed-forwards, and a router that sends each token to a few of them.

Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of Experts". The router's probabilities
are a softmax over all experts. A token visits the top_k likeliest, and their outputs are added up by weight: the
probabilities divided by the sum of those that were chosen, as in Mixtral; with top_k = 1 the probability itself, as in Switch
Transformers, since it would be 1 otherwise and the router would learn nothing. Routing is computed in fp32 or wider.

Tokens are sorted by expert once, each expert works on its rows, and the results go back to where their tokens were. No expert
has a buffer of fixed size, so none is dropped for want of room; `capacity` drops on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.core.device import gpu_facts, host, is_gpu
from minidist.core.slices import Slice
from minidist.model import balance
from minidist.model.balance import Routing, Rows
from minidist.model.config import ModelConfig

Run = Callable[["Experts", Tensor, Tensor], Tensor]
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.9 has it under the second name only


class Router(nn.Module):
    """Which experts a token visits, and how much each of them counts."""

    bias: Tensor | None

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.top_k = cfg.top_k
        self.weight = nn.Parameter(torch.empty(cfg.experts, cfg.width))
        # No parameter: `rebalance` moves it. But it is state, and belongs into checkpoints. In whole steps of bias_rate, so
        # that no cast to a narrow format rounds it.
        self.rate = cfg.bias_rate
        self.register_buffer("bias", torch.zeros(cfg.experts, dtype=torch.int64) if cfg.bias_rate else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B,S,D) -> logits (B,S,E), probabilities (B,S,E), chosen experts (B,S,K) and their weights (B,S,K)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        probs = logits.softmax(-1)
        preference = probs.detach() if self.bias is None else probs.detach() + self.rate * self.bias.to(wide)
        chosen = preference.topk(self.top_k, -1).indices
        weights = probs.gather(-1, chosen)
        return logits, probs, chosen, weights / weights.sum(-1, keepdim=True) if self.top_k > 1 else weights


class Experts(nn.Module):
    """E feed-forwards (SwiGLU), their matrices stacked."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.number, self.drops = cfg.experts, cfg.capacity > 0
        self.gate = nn.Parameter(torch.empty(cfg.experts, cfg.ffn, cfg.width))
        self.up = nn.Parameter(torch.empty(cfg.experts, cfg.ffn, cfg.width))
        self.down = nn.Parameter(torch.empty(cfg.experts, cfg.width, cfg.ffn))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (N,D), sorted by expert; counts (E,), how many each has -> (N,D)."""
        if groupable(rows, self.gate, self.up, self.down):
            product = partial(grouped, ends=counts.cumsum(0, dtype=torch.int32))
        else:
            product = partial(looped, sizes=host(counts, expect=even(len(rows), len(counts))))
        hidden = F.silu(product(rows, self.gate)) * product(rows, self.up)  # (N,F)
        return product(hidden, self.down)


class MoE(nn.Module):
    """Router and experts in the place of a feed-forward; with `shared`, an expert that all tokens visit beside them.

    Liu et al. 2024, "DeepSeekMoE", has shared experts. What keeps the load even is in `model.balance`.
    """

    def __init__(self, cfg: ModelConfig, layer: int, shared: nn.Module | None = None):
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.router = Router(cfg)
        self.experts = Experts(cfg)
        self.shared = shared
        self.mix = mix  # a plain function of (experts, x, chosen, weights): what experts on other ranks replace
        self.rows = Rows()  # what sequence shards replace

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """(B,S,D) -> (B,S,D). With `routing`, the router's losses are attached to the result and loads are noted in it."""
        logits, probs, chosen, weights = self.router(x)
        kept = self._within_capacity(chosen)
        y = self.mix(self.experts, x, kept, weights.to(x.dtype))
        if self.shared is not None:
            y = y + self.shared(x)
        if routing is None:
            return y
        stats = balance.statistics(logits, probs, chosen, kept, self.rows.part(routing.valid))
        stats = self.rows.total(stats)
        uneven, large = balance.losses(stats, self.cfg.top_k)
        load = balance.load(stats, uneven, large)
        routing.loads[self.layer] = load if self.rows.counted else torch.zeros_like(load)
        if self.cfg.balance_loss or self.cfg.z_loss:
            y = balance.attach(y, self.cfg.balance_loss * uneven + self.cfg.z_loss * large, routing)
        return y

    def _within_capacity(self, chosen: Tensor) -> Tensor:
        """`chosen` (B,S,K) with E, which is no expert, in place of choices that are dropped."""
        if not self.cfg.capacity:
            return chosen
        whole = self.rows.whole(chosen)
        return self.rows.part(within(whole, self.cfg.experts, limit(self.cfg, whole.shape[1])))


# Tokens to experts and back


def mix(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, run: Run = Experts.forward) -> Tensor:
    """Every token through its experts, the results added up by weight: (B,S,D).

    x (B,S,D); chosen (B,S,K), E where dropped; weights (B,S,K), of x's dtype. `run`(experts, rows, counts) brings the sorted
    rows through the experts. A dropped choice adds nothing, and leaves the weights of the others alone.
    """
    top_k, width = chosen.shape[-1], x.shape[-1]
    flat = chosen.flatten()  # (T K,), where T = B S
    counts = torch.zeros(experts.number + 1, dtype=torch.int64, device=x.device).scatter_add(0, flat, torch.ones_like(flat))
    order = flat.argsort(stable=True)  # choices by expert, those of one expert by token; dropped ones last
    if experts.drops:
        order = order[: len(order) - host(counts[-1], expect=0)]
    # Each token stands there top_k times before it is sorted, so that backward adds its gradients up in one fixed order.
    rows = x.flatten(0, 1).repeat_interleave(top_k, 0).index_select(0, order)  # (N,D)
    y = run(experts, rows, counts[:-1])
    back = y.new_zeros(len(flat), width).index_copy(0, order, y)  # (T K,D), zero where dropped
    return (back.view(-1, top_k, width) * weights.flatten(0, 1)[..., None]).sum(1).view_as(x)


def limit(cfg: ModelConfig, seq_len: int) -> int:
    """Tokens of one row that an expert takes: `cfg.capacity` times its even share, rounded up."""
    return math.ceil(cfg.capacity * seq_len * cfg.top_k / cfg.experts)


def within(chosen: Tensor, experts: int, room: int) -> Tensor:
    """`chosen` (B,S,K) of whole rows, with `experts` in place of what finds an expert taken by `room` tokens before it."""
    hits = torch.zeros(*chosen.shape[:2], experts, dtype=torch.int64, device=chosen.device).scatter(-1, chosen, 1)  # (B,S,E)
    earlier = hits.cumsum(1) - hits
    return chosen.masked_fill(earlier.gather(-1, chosen) >= room, experts)


def even(total: int, parts: int) -> list[int]:
    """`total` spread evenly: sizes that differ by at most one."""
    return [total // parts + (part < total % parts) for part in range(parts)]


# Products: rows sorted by expert, and a matrix for each


def looped(rows: Tensor, weights: Tensor, *, sizes: list[int]) -> Tensor:
    """rows (N,I) and weights (E,O,I), sizes[e] rows to each -> (N,O). Any dtype and shape."""
    parts = zip(rows.split(sizes), weights.unbind(), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def grouped(rows: Tensor, weights: Tensor, *, ends: Tensor) -> Tensor:
    """The same by torch's grouped product, which needs no size on the host. ends (E,) int32: where each expert's rows end."""
    return _grouped_mm(rows, weights.transpose(-2, -1), offs=ends)


def groupable(rows: Tensor, *weights: Tensor) -> bool:
    """Whether the grouped product takes these: a dtype up to 32 bits, rows and addresses in steps of 16 bytes.

    Not no rows at all, nor tensors of a dry run, of which torch takes bf16 only. GPUs older than Ampere have no such product.
    """
    real = type(rows) is Tensor and not rows.is_meta
    if not real or rows.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not len(rows):
        return False
    steps = [n * rows.element_size() % 16 for w in weights for n in (*w.shape[1:], w.storage_offset())]
    return not any(steps) and (not is_gpu(rows) or _on_new_gpus())


@lru_cache(maxsize=1)
def _on_new_gpus() -> bool:
    return all(float(gpu["capability"]) >= 8 for gpu in gpu_facts())


# The selection bias


def layers_of(model: nn.Module) -> list[MoE]:
    """The MoE layers that `model` holds, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def clear_bias(model: nn.Module, device: torch.device | None = None) -> None:
    """Give the routers' biases the zeros that they start from, on `device` (default: where they are)."""
    for layer in layers_of(model):
        if layer.router.bias is not None:
            layer.router.bias = torch.zeros_like(layer.router.bias, device=device)


def biases(model: nn.Module, owner: int = 0) -> list[tuple[Slice, Tensor]]:
    """The routers' biases, which training moves and checkpoints keep: alike on all ranks of a stage, stored by its `owner`."""
    held = {name: x for name, x in model.named_buffers() if name.endswith("router.bias")}
    return [(Slice.whole(name, bias.shape, ("dp", "cp", "tp"), owner), bias) for name, bias in held.items()]


@torch.no_grad()
def rebalance(model: nn.Module, loads: Tensor) -> None:
    """Move each bias by one step, given the `loads` (L, E+3) of the global batch, as `balance.loads` gives them."""
    for layer, load in zip(layers_of(model), loads, strict=True):
        choices = load[: layer.cfg.experts]
        towards = torch.sign(choices.sum() - layer.cfg.experts * choices)  # of whole numbers: exact, the same on every rank
        layer.router.bias.add_(towards.to(torch.int64))
