"""The shape of a model: the `[model]` section of a configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """A decoder transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int
    """Number of blocks."""
    width: int
    """Size of the hidden state of a token; a multiple of `heads`, with an even quotient (rotary pairs)."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; divides `heads`. Each is shared by heads / kv_heads query heads."""
    ffn: int
    """Hidden size of the gated feed-forward, of each expert's where there are experts; about 8/3 of `width` costs what a plain
    4 x width would."""
    vocab: int
    """Token ids are 0 .. vocab-1."""
    tied: bool = False
    """Use the embedding matrix as the output head too."""
    dropout: float = 0.0
    """Probability of zeroing an element after the embedding and on each residual branch; never inside attention."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    experts: int = 0
    """Feed-forwards of each block, of which a token visits a few; 0 is one that all tokens visit, and no router."""
    top_k: int = 2
    """With experts: how many of them each token visits."""
    shared_ffn: int = 0
    """With experts: hidden size of one more expert, which all tokens visit; 0 is none."""
    capacity: float = 0.0
    """With experts: each takes at most capacity x (seq_len x top_k / experts), rounded up, of the tokens of a row, in order of
    position. Later ones are dropped (that expert adds nothing to them) and counted. 0 drops none."""
    balance_loss: float = 0.0
    """With experts: weight of the loss that is 1 where a row's tokens are spread evenly over them and `experts` / `top_k` where
    all visit the same; 0.01 is usual."""
    z_loss: float = 0.0
    """With experts: weight of the squared log-sum-exp of the router's logits, which keeps them small; 0.001 is usual."""
    bias_rate: float = 0.0
    """With experts: how far a step moves the bias that makes a router choose an expert less often when it had more than its
    share, and more often when it had less; 0.001 is usual. 0 has no bias."""

    def __post_init__(self):
        for key in ("layers", "width", "heads", "kv_heads", "ffn", "vocab"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key}={getattr(self, key)}: must be at least 1")
        if self.width % self.heads or self.width // self.heads % 2:
            near = max(2 * self.heads, round(self.width / (2 * self.heads)) * 2 * self.heads)
            raise ValueError(
                f"model.width={self.width}: must be heads={self.heads} times an even head width; use {near}, or other heads"
            )
        if self.heads % self.kv_heads:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(f"model.kv_heads={self.kv_heads}: must divide heads={self.heads}; use one of {fits}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout={self.dropout}: a probability of at least 0 and below 1")
        self._check_experts()

    def _check_experts(self) -> None:
        for key in ("experts", "shared_ffn", "capacity", "balance_loss", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"model.{key}={getattr(self, key)}: must be at least 0, and finite")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"model.top_k={self.top_k}: must be from 1 to experts={self.experts}")
        for key in ("top_k", "shared_ffn", "capacity", "balance_loss", "z_loss", "bias_rate"):
            if not self.experts and getattr(self, key) != getattr(ModelConfig, key):
                raise ValueError(f"model.{key}={getattr(self, key)} with experts=0: set model.experts, or leave it out")

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads
