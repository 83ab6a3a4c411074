"""Ring attention: queries stay, keys and values go round, and what was seen is merged; or all keys are gathered at once.

A rank holds the zig-zag places of every sequence (parallel.zigzag). `ring` (Liu et al. 2023, "Ring Attention", section 3): each
rank attends to the keys it has, passes them to the next rank, gets those of the one before, and after n steps has seen all. The
next keys are on their way while it works on these. Partial results are merged by their log-sum-exp (model.attention.merge). In
backward keys go round again, and with them the sum of their gradients, to which each rank adds its part before passing it on.
`gather` has the keys of all ranks at once (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2): one message
instead of n - 1, but nothing overlaps, and backward keeps what was gathered (unless attention is recomputed).

Bytes that a rank sends per layer: kv = 2 B G (S/n) K elements of its k and v (G heads, not the queries' H), e bytes each; sums
of gradients travel in fp32 or wider, w bytes each.

| how    | forward    | backward         | k and v kept for backward |
|--------|------------|------------------|---------------------------|
| ring   | (n-1) kv e | (n-1) kv (e + w) | kv e                      |
| gather | (n-1) kv e | (n-1) kv w       | n kv e                    |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minidist.core import comm
from minidist.core.mesh import Group
from minidist.model.attention import attend, attend_backward, merge
from minidist.parallel.zigzag import piece, seen

Block = tuple[int, Tensor]  # a place in the group, and the k and v of the rank there, (2,B,G,S,K)


def ring(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, group: Group) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries over all ranks' keys, which go round.

    q (B,H,S,K); k, v (B,G,S,K): of this rank's S places. documents (B,n*S): of the whole sequences. Returns (out, None) as
    `attend` does without log-sum-exp, out (B,H,S,K).
    """
    return _Ring.apply(q, k, v, documents, group), None


def gather(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, group: Group) -> tuple[Tensor, None]:
    """The same with the keys of all ranks there at once."""
    return _Gather.apply(q, k, v, documents, group), None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: Group) -> Tensor:
        out, lse = forward(q, round_trip(torch.stack((k, v)), group), documents, group)
        ctx.group = group
        ctx.save_for_backward(q, out, lse, documents, k, v)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *saved, k, v = ctx.saved_tensors
        group, dq, travelling = ctx.group, _zeros(saved[0]), None
        for step, block in enumerate(round_trip(torch.stack((k, v)), group)):
            # What the ranks before have added to this block's gradients follows it. The first to add is the one after its own.
            arriving = pass_on(travelling, group) if step > 1 else None
            part = backward(grad, block, dq, saved, group)
            if step == 0:
                own = part
            else:
                travelling = part.add_(arriving()) if arriving else part
        if travelling is not None:
            own += pass_on(travelling, group)()  # the last hop brings them home
        return dq.to(k.dtype), *own.to(k.dtype), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: Group) -> Tensor:
        everyones = comm.all_gather(torch.stack((k, v))[None], group)  # (n,2,B,G,S,K)
        out, lse = forward(q, [(place, everyones[place]) for place in order(group)], documents, group)
        ctx.group = group
        ctx.save_for_backward(q, out, lse, documents, everyones)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *saved, everyones = ctx.saved_tensors
        group, dq = ctx.group, _zeros(saved[0])
        parts = torch.stack([backward(grad, block, dq, saved, group) for block in enumerate(everyones)])
        own = comm.reduce_scatter(parts, group)[0]
        return dq.to(everyones.dtype), *own.to(everyones.dtype), None, None


# What travels


def order(group: Group) -> list[int]:
    """Places in the order in which their keys come by: one's own, that of the rank before, and so on."""
    return [(group.rank - step) % group.size for step in range(group.size)]


def round_trip(kv: Tensor, group: Group) -> Iterator[Block]:
    """All n blocks of keys and values, of which kv (2,B,G,S,K) is this rank's, in `order`: n - 1 hops.

    The next is asked for before this one is handed out, so it travels while the caller works.
    """
    *places, last = order(group)
    for place in places:
        arriving = pass_on(kv, group)
        yield place, kv
        kv = arriving()
    yield last, kv


def pass_on(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Send x to the next rank of the ring while the one before sends its own: call what is returned to have that."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    works = comm.exchange([("send", x, after), ("recv", torch.empty_like(x), before)], group, async_op=True)
    return lambda: [work.wait() for work in works][1]


# Work on a block


def forward(q: Tensor, blocks: Iterable[Block], documents: Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
    """Attention of q (B,H,S,K) over blocks of keys, one's own first: (out as q, lse (B,H,S)). Merged in fp32 or wider."""
    for place, (k, v) in blocks:
        queries, keys, arguments = _visible(place, q.shape[2], documents, group)
        part, part_lse = attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], **arguments, need_lse=True)
        if place == group.rank:
            out, lse = part.to(part_lse.dtype), part_lse
        else:
            out[:, :, queries], lse[:, :, queries] = merge(out[:, :, queries], lse[:, :, queries], part, part_lse)
    return out.to(q.dtype), lse


def backward(grad: Tensor, block: Block, dq: Tensor, saved: Sequence[Tensor | None], group: Group) -> Tensor:
    """Add to dq (B,H,S,K) what comes from a block of keys; return what this rank gives to it, (2,B,G,S,K), fp32 or wider."""
    q, out, lse, documents = saved
    place, kv = block
    queries, keys, arguments = _visible(place, q.shape[2], documents, group)
    k, v = (x[:, :, keys] for x in kv)
    grad, q, out, lse = (x[:, :, queries] for x in (grad, q, out, lse))
    more, dk, dv = attend_backward(grad, q, k, v, out, lse, **arguments)
    dq[:, :, queries] += more
    part = _zeros(kv)
    part[0, :, :, keys], part[1, :, :, keys] = dk, dv
    return part


def _visible(other: int, length: int, documents: Tensor | None, group: Group) -> tuple[slice, slice, dict[str, Any]]:
    """(queries of this rank, keys of place `other`, arguments of `attend` that say which of them see which)."""
    queries, keys, causal = seen(group.rank, other, length)
    if documents is None:
        return queries, keys, {"causal": causal}
    mine, others = (piece(documents, group.size, place) for place in (group.rank, other))
    return queries, keys, {"causal": causal, "documents": mine[:, queries], "key_documents": others[:, keys]}


def _zeros(x: Tensor) -> Tensor:
    """Zeros to sum in: x's shape, fp32 or wider."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
