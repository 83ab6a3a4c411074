"""Context parallelism: each rank holds a part of every sequence, and attention is the one place where the parts meet.

Everything else in the model looks at one token at a time, so it works on a part as it is, given the positions of its tokens.
`shard` cuts a batch, `apply` replaces attention. How it sees the other parts, `layout.cp_attention` says:

| how     | what travels                                    | where it is good                                           |
|---------|-------------------------------------------------|------------------------------------------------------------|
| ring    | k and v, a rank's at a time, while it works     | long sequences: nothing held grows with n, transfers hide  |
| gather  | k and v of all ranks at once                    | few key heads, shorter sequences: one message              |
| ulysses | q, k, v and the output: heads against sequence  | many heads: the plain kernel over the whole sequence       |
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from minidist.core.mesh import Group
from minidist.data.batch import Batch
from minidist.parallel.ring import gather, ring
from minidist.parallel.ulysses import ulysses
from minidist.parallel.zigzag import piece

ATTENTION = {"ring": ring, "gather": gather, "ulysses": ulysses}  # what layout.cp_attention may be


def shard(batch: Batch, group: Group, how: str = "ring") -> Batch:
    """This rank's part of a batch: S/n places of every row, zig-zag for ring and gather, consecutive ones for ulysses.

    Targets and positions were found in the whole row, before the cut, so a part's last token has its own target and rotary
    angles are right (C42, C43). `documents` stays whole, (B,S): to which of them the keys of other ranks belong, a rank knows
    from the batch it has read and need not be told. `index` (S/n,) says which of its columns are this part's.

    Raises ValueError where the sequence does not divide.
    """
    if group.size == 1:
        return batch
    whole = {name: getattr(batch, name) for name in ("tokens", "targets", "positions", "index")}
    return replace(batch, **{name: piece(x, group.size, group.rank, how != "ulysses") for name, x in whole.items()})


def apply(model: nn.Module, group: Group, how: str = "ring") -> None:
    """Make attention see the whole sequence, in every block that `model.blocks` holds. After what cuts heads (tensor)."""
    if group.size == 1:
        return
    for block in model.blocks:
        block.attention.attend = partial(ATTENTION[how], group=group)


def expect_heads(how: str, *, cp: int, heads: int, tp: int = 1) -> None:
    """Refuse what cannot share its heads: ulysses gives each of cp x tp ranks equally many query heads, at least one.

    Fewer key heads than ranks are no obstacle: they are sent to every rank that reads them.
    """
    if how == "ulysses" and cp > 1 and heads % (cp * tp):
        raise ValueError(
            f'layout.cp_attention = "ulysses" shares model.heads = {heads} over cp x tp = {cp} x {tp} = {cp * tp} ranks, '
            f'unevenly: use a multiple of {cp * tp} heads, another cp, or layout.cp_attention = "ring"'
        )
