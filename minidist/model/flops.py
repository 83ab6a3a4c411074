"""Parameters and floating-point operations of a model, by one stated convention.

A multiply and an add are two operations. Counted: the products of activations with weight matrices, and the two products
of attention. Not counted: the embedding (a look-up), norms, softmax, activations, the optimizer; about 1 % together.
Backward costs twice the forward, so a trained token costs three times a forward one: 6 per matrix weight. Of experts, those
count that a token visits, the shared one and the router among them.
"""

from __future__ import annotations

from dataclasses import dataclass

from minidist.model.config import ModelConfig

CONVENTION = (
    "MFU = tokens/s x model FLOPs a token / peak FLOP/s. Model FLOPs a token = 6 x matmul weights (output head counted, "
    "input embedding not; of experts those a token visits) + 6 x layers x seq_len x width for causal attention (half of the "
    "full square). Recomputed work is not useful work: it does not raise MFU."
)


@dataclass(frozen=True)
class Flops:
    """Operations of one token: in the matrices, and in attention's two products."""

    matmul: int
    attention: int

    @property
    def total(self) -> int:
        """Both."""
        return self.matmul + self.attention


def parameters(cfg: ModelConfig) -> int:
    """Elements of all parameters, a tied matrix once."""
    norms = cfg.width * (2 * cfg.layers + 1)
    embedding = 0 if cfg.tied else cfg.vocab * cfg.width
    idle = max(cfg.experts - cfg.top_k, 0) * 3 * cfg.width * cfg.ffn  # of a block, what one token does not visit
    return matmul_weights(cfg) + cfg.layers * idle + embedding + norms


def matmul_weights(cfg: ModelConfig, mlp_matrices: int = 3) -> int:
    """Elements of all matrices that one token's activations meet: projections, feed-forward, output head (tied or not).

    `mlp_matrices`: 3 is our gated feed-forward (gate, up, down), 2 a classic one. Of experts those that a token visits count,
    and the router: without the head, the "active parameters" of a mixture.
    """
    attention = 2 * cfg.width * cfg.width + 2 * cfg.width * cfg.kv_heads * cfg.head_width  # q, o; k, v
    hidden = cfg.top_k * cfg.ffn + cfg.shared_ffn if cfg.experts else cfg.ffn  # features that a token passes
    block = attention + mlp_matrices * cfg.width * hidden + cfg.experts * cfg.width
    return cfg.layers * block + cfg.width * cfg.vocab


def forward_flops(cfg: ModelConfig, seq_len: int, causal: bool = True, mlp_matrices: int = 3) -> Flops:
    """Operations of one token's forward, averaged over a sequence of `seq_len`.

    Attention's two products (scores, and weights times values) cost 2 x seq_len x width each a layer when every key
    counts; a causal token sees half of the keys. Grouped-query attention does not change this: query heads count.
    """
    full = 4 * cfg.layers * seq_len * cfg.width
    return Flops(2 * matmul_weights(cfg, mlp_matrices), full // 2 if causal else full)


def train_flops(cfg: ModelConfig, seq_len: int, causal: bool = True, mlp_matrices: int = 3) -> Flops:
    """Useful operations of one trained token: forward and backward, three times the forward."""
    forward = forward_flops(cfg, seq_len, causal, mlp_matrices)
    return Flops(3 * forward.matmul, 3 * forward.attention)


def hardware_flops(useful: Flops, recompute: str = "none") -> int:
    """Operations really done for one trained token, given the useful ones.

    `recompute`: "none"; "full", where the forward runs twice, 4/3 of the useful work; "selective", where only attention's
    two products do.
    """
    again = {"none": 0, "full": useful.total, "selective": useful.attention}
    if recompute not in again:
        raise ValueError(f"recompute={recompute!r}: unknown; use one of {list(again)}")
    return useful.total + again[recompute] // 3
