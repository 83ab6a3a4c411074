"""Zig-zag: which places of a sequence each context-parallel rank holds, so that causal attention is equal work for all.

A causal query at place i looks at i + 1 keys, so ranks that hold n consecutive pieces of a sequence have unequal work, the last
one nearly twice the mean. Cut it into 2n chunks instead and give rank r chunk r from the front and chunk r from the back, where
little and much work add up to the same (Zhu 2024, "ring-flash-attention", issue 2). With 16 places and 4 ranks:

    contiguous   0000111122223333   10, 26, 42, 58 pairs of query and key
    zig-zag      0011223333221100   34 each
"""

from __future__ import annotations

import torch
from torch import Tensor


def piece(x: Tensor, n: int, rank: int, zigzag: bool = True) -> Tensor:
    """What `rank` of `n` holds of x (...,S), in order of place: (...,S/n). Without `zigzag`, consecutive places.

    Raises ValueError where S does not divide.
    """
    chunks = 2 * n if zigzag else n
    if x.shape[-1] % chunks:
        raise ValueError(f"{x.shape[-1]} places do not divide into {chunks} chunks for {n} ranks: use a multiple of {chunks}")
    parts = x.chunk(chunks, -1)
    return torch.cat((parts[rank], parts[-1 - rank]), -1) if zigzag else parts[rank].contiguous()


def seen(mine: int, other: int, length: int) -> tuple[slice, slice, bool]:
    """Which queries of rank `mine` see which keys of rank `other`: (queries, keys, causal), slices of their `length` places.

    A rank's first half is an early chunk, its second half a late one. If other < mine, its early chunk lies before both of mine
    and its late one after both; if other > mine, both of its chunks lie between mine. So another rank's keys need no mask,
    and half the pairs are work, for every rank the same; with one's own keys the order of places is the causal mask.
    """
    half = length // 2
    if other == mine:
        return slice(None), slice(None), True
    if other < mine:
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False


def score_pairs(length: int, n: int, zigzag: bool = True) -> list[int]:
    """Pairs of query and key in causal attention over `length` places, by rank: the work of each, in one head."""
    keys = torch.arange(length) + 1  # that each place sees
    return [int(piece(keys, n, rank, zigzag).sum()) for rank in range(n)]
