"""Ulysses: attention with heads cut over the ranks instead of the sequence, and an all-to-all on either side of it.

Outside of attention a rank holds a piece of every sequence with all heads, inside it all places of some of the heads, where the
plain kernel works as it is (Jacobs et al. 2023, "DeepSpeed Ulysses", section 3). The pieces are contiguous, not zig-zag: ranks
that hold whole heads have equal work anyway, and pieces in order of rank are the sequence in order.

Where n does not divide the G key heads, each is sent several times, G' = lcm(G, n) in all, so that every query head finds its
key head on its rank; the copies' gradients come back and are summed. Bytes that a rank sends per layer, e bytes an element, S
places of the whole sequence, in forward and as many in backward:

    (n-1)/n B (S/n) K e (H + 2 G') for q, k and v together, and (n-1)/n B (S/n) K e H for the output
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minidist.core import comm_grad
from minidist.core.mesh import Group
from minidist.model.attention import attend


def ulysses(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, group: Group) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries over all ranks' keys.

    q (B,H,S,K); k, v (B,G,S,K): of this rank's S places; n divides H. documents (B,n*S): of the whole sequences. Returns
    (out, None) as `attend` does without log-sum-exp, out (B,H,S,K).
    """
    n, kv_heads = group.size, math.lcm(k.shape[1], group.size)
    k, v = (x.repeat_interleave(kv_heads // x.shape[1], 1) for x in (k, v))  # (B,G',S,K)
    shares = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2)  # (B,n,h,S,K), h = (H + 2 G') / n
    got = comm_grad.all_to_all(shares.movedim(1, 0), group, tag="act")  # (n,B,h,S,K): my heads, of everyone's places
    mine = got.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B,h,n*S,K)
    out, _ = attend(*mine.split([x.shape[1] // n for x in (q, k, v)], 1), documents)  # (B,H/n,n*S,K)
    back = comm_grad.all_to_all(out.unflatten(2, (n, -1)).movedim(2, 0), group, tag="act")  # (n,B,H/n,S,K): everyone's heads
    return back.movedim(0, 1).flatten(1, 2), None
