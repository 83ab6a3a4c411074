"""Attention over a causal, full or per-document mask, with the log-sum-exp that lets partial results be merged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    *,
    key_documents: Tensor | None = None,
    causal: bool = True,
    need_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q k' / sqrt(K) + mask) v, and the log-sum-exp of each row of scores if `need_lse`.

    q (B,H,S,K); k, v (B,G,T,K) with G dividing H: query head h reads key head h // (H/G). `causal`: query i sees keys
    0..i (S == T). `documents` (B,S) numbers the document of each query, `key_documents` (B,T) of each key (default: the
    same): a query sees keys of its own document only.

    Returns out (B,H,S,K) and lse (B,H,S), natural logarithm, in fp32 or wider (None unless asked for: then the fastest
    kernel may run). A row that sees no key has out 0 and lse -inf, so `merge` gives it no weight. out is differentiable
    on every path; lse is detached.
    """
    assert not causal or q.shape[2] == k.shape[2], "a causal mask needs as many keys as queries"
    mask = None if documents is None else _mask(documents, key_documents, causal)  # (B,1,S,T)
    if not need_lse:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=True)
        return out, None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if q.device.type == "cpu":
        return _flash_cpu(q, k, v, mask, causal)
    if mask is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse.detach()
    return plain(q, k, v, mask, causal)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """The formula itself, for what no kernel does (float64 or masks on a GPU). Same shapes as `attend`, G == H.

    Takes (B,H,S,T) memory. Scores and softmax are in fp32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5  # (B,H,S,T)
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores.detach(), -1)  # (B,H,S); -inf where a row sees nothing
    # exp(-inf - -inf) is nan, forward and backward, so a row that sees nothing is shifted by 0: all its weights are 0.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = (weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)) @ v.to(wide)
    return out.to(q.dtype), lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys: (out, lse) of each in, (out, lse) over both sets out.

    For a forward whose backward is written by hand (Liu et al. 2023, "Ring Attention": each piece's backward, given the
    merged out and lse). Autograd through it would be wrong, the weights depend on the scores too, so it is refused.
    """
    assert not (torch.is_grad_enabled() and (out.requires_grad or more.requires_grad)), "merge under no_grad only"
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == -torch.inf, 0.0)  # neither side saw a key: both weights are exp(-inf) = 0
    weight, more_weight = torch.exp(lse - base)[..., None], torch.exp(more_lse - base)[..., None]
    return (out * weight + more * more_weight).to(out.dtype), total


def _mask(documents: Tensor, key_documents: Tensor | None, causal: bool) -> Tensor:
    """(B,1,S,T), true where the query may see the key."""
    keys = documents if key_documents is None else key_documents
    mask = documents[:, None, :, None] == keys[:, None, None, :]
    return mask.tril() if causal else mask


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's CPU flash kernel, asked for its lse (which public SDPA throws away). Takes any floating dtype and masks.

    For a row that sees nothing it gives out 0 but lse 0, which would weigh as much as a real row: -inf is put there.
    """
    if mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse.detach()
    bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias)
    return out, lse.detach().masked_fill(~mask.any(-1), -torch.inf)
