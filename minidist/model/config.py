"""The shape of a model: the `[model]` section of a configuration."""

from __future__ import annotations

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
    """Hidden size of the gated feed-forward; about 8/3 of `width` costs what a plain 4 x width would."""
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

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads
