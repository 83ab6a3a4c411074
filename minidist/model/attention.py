"""Attention over a causal, full or per-document mask, forward and backward, with what lets partial results be merged."""

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
    k, v = (_for_every_head(x, q.shape[1]) for x in (k, v))
    if q.device.type == "cpu":
        return _flash_cpu(q, k, v, mask, causal)
    if mask is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse.detach()
    return plain(q, k, v, mask, causal)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None = None,
    *,
    key_documents: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one set of keys adds to the gradients, where rows have seen other sets too: (dq, dk, dv), shaped as q, k and v.

    `grad`, `out` (B,H,S,K) and `lse` (B,H,S) are those of the whole rows, merged over all sets; the rest is as in `attend`.
    The whole row's lse makes exp(score - lse) the weight that the key has in the end, whatever was merged after it, and
    grad . out is all that its gradient needs of the other keys (Dao 2023, "FlashAttention-2", section 3.1.2). So the sets'
    dq add up, and each set's dk and dv are its own.
    """
    mask = None if documents is None else _mask(documents, key_documents, causal)
    heads = k.shape[1]
    k, v = (_for_every_head(x, q.shape[1]) for x in (k, v))
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # a row that saw nothing: all its weights are exp(-inf - 0) = 0
    backward = plain_backward
    if q.device.type == "cpu":
        backward = _flash_cpu_backward
    elif mask is None and q.dtype in (torch.float16, torch.bfloat16):
        backward = _flash_gpu_backward
    dq, dk, dv = backward(grad, q, k, v, out, lse, mask, causal)
    return dq, *(x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))  # of all query heads that read it


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """The formula itself, for what no kernel does (float64 or masks on a GPU). Same shapes as `attend`, G == H.

    Takes (B,H,S,T) memory. Scores and softmax are in fp32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q.to(wide), k.to(wide), mask, causal)
    lse = torch.logsumexp(scores.detach(), -1)  # (B,H,S); -inf where a row sees nothing
    # exp(-inf - -inf) is nan, forward and backward, so a row that sees nothing is shifted by 0: all its weights are 0.
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = (weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)) @ v.to(wide)
    return out.to(q.dtype), lse


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward's formula, for what no kernel does. Shapes as in `attend_backward`, G == H; lse finite."""
    wide = lse.dtype
    grad, out, *inputs = (x.to(wide) for x in (grad, out, q, k, v))
    scale = q.shape[-1] ** -0.5
    weights = torch.exp(_scores(*inputs[:2], mask, causal) - lse[..., None])  # (B,H,S,T)
    towards = grad @ inputs[2].transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)  # (B,H,S,T)
    dscores = weights * towards * scale
    dq, dk, dv = dscores @ inputs[1], dscores.transpose(-1, -2) @ inputs[0], weights.transpose(-1, -2) @ grad
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


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


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """(B,H,S,T), -inf where the query may not see the key."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _for_every_head(x: Tensor, heads: int) -> Tensor:
    """(B,G,T,K) -> (B,H,T,K): each key head once for every query head that reads it. No copy where G == H."""
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: (B,1,S,T), 0 or -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's CPU flash kernel, asked for its lse (which public SDPA throws away). Takes any floating dtype and masks.

    For a row that sees nothing it gives out 0 but lse 0, which would weigh as much as a real row: -inf is put there.
    """
    if mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse.detach()
    bias = _bias(mask, q.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias)
    return out, lse.detach().masked_fill(~mask.any(-1), -torch.inf)


def _flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's own backward. It takes lse as given, so that of the whole rows makes these keys' part exact."""
    bias = None if mask is None else _bias(mask, q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=bias
    )


def _flash_gpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on a GPU. Lengths of packed sequences are None, there are none; the random state is dropout's, and unread."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state[:0]
    )
