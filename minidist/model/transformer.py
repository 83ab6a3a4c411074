"""The plain model: a decoder transformer on one device. Every parallelism rewrites this from outside.

Names of parameters are the same everywhere (checkpoints, initialisation, slices): `embedding.weight`,
`blocks.0.attention_norm.weight`, `blocks.0.attention.q.weight`, ..., `blocks.0.ffn.down.weight`, `norm.weight`,
`head.weight` (absent when tied). Where there are experts, `blocks.0.ffn.router.weight`, `blocks.0.ffn.experts.down`, ...
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.core import random
from minidist.core.random import DropoutKey
from minidist.core.slices import Slice
from minidist.model.attention import attend
from minidist.model.balance import Routing
from minidist.model.config import ModelConfig
from minidist.model.loss import loss_sum
from minidist.model.moe import MoE, clear_bias

Rope = tuple[Tensor, Tensor]  # cosines and sines, each (B,1,S,K) or (1,1,S,K)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019). Statistics in fp32 or wider."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(...,D) -> (...,D)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query causal self-attention (Ainslie et al. 2023)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.head_width = cfg.head_width
        self.q = nn.Linear(cfg.width, cfg.heads * cfg.head_width, bias=False)
        self.k = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_width, bias=False)
        self.v = nn.Linear(cfg.width, cfg.kv_heads * cfg.head_width, bias=False)
        self.o = nn.Linear(cfg.heads * cfg.head_width, cfg.width, bias=False)
        self.attend = attend  # a plain function of (q, k, v, documents): what another attention replaces
        self.project = project  # and what layers that are cut replace

    def forward(self, x: Tensor, rope: Rope, documents: Tensor | None = None) -> Tensor:
        """(B,S,D) -> (B,S,D). The number of heads is read off the projections, so a slice of the heads works too."""
        q, k, v = (self.split(y) for y in self.project(x, self.q, self.k, self.v))  # (B,H,S,K), (B,G,S,K) twice
        out, _ = self.attend(rotate(q, rope), rotate(k, rope), v, documents)
        return self.o(out.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """(B,S,H*K) -> (B,H,S,K)."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, width: int, ffn: int):
        super().__init__()
        self.gate = nn.Linear(width, ffn, bias=False)
        self.up = nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        """(B,S,D) -> (B,S,D)."""
        gate, up = self.project(x, self.gate, self.up)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm x), then x + ffn(norm x)."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer  # its place in the whole model, whichever stage holds it: dropout masks are drawn by it
        self.dropout = cfg.dropout
        self.attention_norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.attention = Attention(cfg)
        self.ffn_norm = RMSNorm(cfg.width, cfg.norm_eps)
        if cfg.experts:
            self.ffn = MoE(cfg, layer, FeedForward(cfg.width, cfg.shared_ffn) if cfg.shared_ffn else None)
        else:
            self.ffn = FeedForward(cfg.width, cfg.ffn)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """(B,S,D) -> (B,S,D)."""
        x = x + drop(self.attention(self.attention_norm(x), rope, documents), self.dropout, dropout, self.layer, "attention")
        y = self.ffn_norm(x)
        y = self.ffn(y, routing) if isinstance(self.ffn, MoE) else self.ffn(y)
        return x + drop(y, self.dropout, dropout, self.layer, "ffn")


class Transformer(nn.Module):
    """Embedding, blocks, norm, head. Its values mean nothing until `initialise` or a checkpoint fills them."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Embedding(cfg.vocab, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.layers))
        self.norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)
        self.loss_sum = loss_sum  # of logits and targets: what a vocabulary that is cut replaces,
        self.all_logits = whole  # and what makes its logits whole again
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter again; needed after `to_empty`, which gives each a storage of its own."""
        if self.cfg.tied and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Next-token logits (B,S,V) of tokens (B,S).

        `positions` (B,S) or (S,), default 0..S-1; `documents` (B,S): a token sees earlier tokens of its own document
        only (None: the row is one document); `dropout`: the key of the masks, None for no dropout (evaluation); `routing`: what
        routers need to know and what they leave, None for none of their losses (evaluation).
        """
        return self.logits(self.body(self.embed(tokens, dropout), positions, documents, dropout, routing))

    def embed(self, tokens: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """(B,S) -> hidden state (B,S,D)."""
        return drop(self.embedding(tokens), self.cfg.dropout, dropout, -1, "embedding")

    def body(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        dropout: DropoutKey | None = None,
        routing: Routing | None = None,
        blocks: Iterable[nn.Module] | None = None,
    ) -> Tensor:
        """Through `blocks`, default all that are held: (B,S,D) -> (B,S,D)."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        rope = rotary(positions, self.cfg.head_width, self.cfg.rope_theta, x.dtype)
        for block in self.blocks if blocks is None else blocks:
            x = block(x, rope, documents, dropout, routing)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """(B,S,D) -> (B,S,V)."""
        return self.head(self.norm(x))


def project(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Several linear layers on one input."""
    return tuple(layer(x) for layer in layers)


def whole(x: Tensor) -> Tensor:
    """What is whole already."""
    return x


def rotary(positions: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> Rope:
    """Cosines and sines of the rotary angles (Su et al. 2021) at `positions` (B,S) or (S,): each (B or 1, 1, S, K).

    Pair i of a head turns by position * theta^(-2i/K). Angles are in fp32 or wider: bf16 would round position 257 to 256.
    """
    wide = torch.promote_types(dtype, torch.float32)
    power = torch.arange(0, head_width, 2, device=positions.device, dtype=wide) / head_width  # (K/2)
    angles = positions.to(wide)[..., None] * theta**-power  # (...,S,K/2)
    angles = torch.cat((angles, angles), -1).view(-1, 1, positions.shape[-1], head_width)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn x (B,H,S,K) by the angles of `rope`, in Hugging Face's half-split layout: pair i is features i and i + K/2.

    The original paper pairs features 2i and 2i + 1; weights of that layout need their q and k rows permuted first.
    """
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def drop(x: Tensor, p: float, key: DropoutKey | None, layer: int, site: str) -> Tensor:
    """Dropout of one site of the model; nothing at all without a key or with p = 0."""
    return x if key is None or p == 0.0 else random.dropout(x, p, key, layer, site)


def initial(name: str, cfg: ModelConfig) -> float | None:
    """Standard deviation of the initial values of parameter `name`, or None for ones (norms).

    0.02 as in GPT-2, and its 1/sqrt(2 layers) for the matrices of a block that write into the residual stream, so
    that its variance does not grow with depth. The whole model's shape counts, never a slice's.
    """
    if "norm" in name:
        return None
    writes_residual = name.endswith(("attention.o.weight", "ffn.down.weight", "ffn.shared.down.weight", "ffn.experts.down"))
    return 0.02 * (2 * cfg.layers) ** -0.5 if writes_residual else 0.02


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill a plain, whole model (any device and dtype, not meta) with the values of (seed, name)."""
    model.tie()
    clear_bias(model)
    for name, parameter in model.named_parameters():
        std = initial(name, model.cfg)
        if std is None:
            parameter.fill_(1.0)
        else:
            values = random.normal(seed, name, Slice.whole(name, parameter.shape), std)
            parameter.copy_(values.view(parameter.shape))
