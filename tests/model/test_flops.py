"""Counts of parameters and operations: the numbers of case C36, torch's own counter, and the real model."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minidist.model.config import ModelConfig
from minidist.model.flops import (
    CONVENTION,
    forward_flops,
    hardware_flops,
    matmul_weights,
    parameters,
    train_flops,
)
from minidist.model.transformer import Transformer

C36 = ModelConfig(layers=3, width=48, heads=4, kv_heads=4, ffn=192, vocab=1000)


def test_case_c36():
    """Embedding not counted, causal attention halved, recompute no useful work."""
    assert matmul_weights(C36, mlp_matrices=2) == 130_944
    causal, full = (train_flops(C36, 100, causal=c, mlp_matrices=2) for c in (True, False))
    assert (causal.matmul, causal.attention, causal.total) == (785_664, 86_400, 872_064)
    assert (full.attention, full.total) == (172_800, 958_464)
    assert hardware_flops(causal) == 872_064
    assert hardware_flops(causal, "full") * 3 == 872_064 * 4
    assert hardware_flops(causal, "selective") == 872_064 + 86_400 // 3
    with pytest.raises(ValueError, match=r"recompute='some'.*one of"):
        hardware_flops(causal, "some")
    assert "embedding not" in CONVENTION and "half" in CONVENTION and "Recomputed" in CONVENTION


EXPERTS = {"experts": 8, "top_k": 3, "shared_ffn": 32}


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"experts": 4}, EXPERTS], ids=str)
def test_against_torchs_counter(changes):
    """A real step, counted by torch: with the math backend it computes the full square of attention."""
    cfg = ModelConfig(layers=2, width=48, heads=6, kv_heads=2, ffn=80, vocab=101, **changes)
    rows, length = 3, 20
    with torch.device("meta"):
        model, tokens = Transformer(cfg), torch.zeros(rows, length, dtype=torch.int64)
    assert sum(p.numel() for p in model.parameters()) == parameters(cfg)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(tokens)
        forward = counter.get_total_flops()
        logits.sum().backward()
    assert forward == rows * length * forward_flops(cfg, length, causal=False).total
    assert counter.get_total_flops() == rows * length * train_flops(cfg, length, causal=False).total
    assert 2 * train_flops(cfg, length).attention == train_flops(cfg, length, causal=False).attention
