"""The norm of the whole gradient, each element counted once, whatever the layout: derived from the slice records."""

from __future__ import annotations

import torch
from torch import Tensor

from minidist.core.slices import OWN, Slice


def counted(pieces: list[tuple[Slice, Tensor]], rank: int) -> list[Tensor]:
    """What `rank` adds to the norm: of each piece that it owns, what no other piece repeats and is no padding.

    Views into the pieces, so that they can be taken once and summed after every step.
    """
    found = []
    for record, local in pieces:
        if record.owner != rank or not local.numel():
            continue
        if all(box.kind == OWN for box in record.boxes):
            found.append(local)
        else:
            found += [local.view(-1)[at : at + length] for at, _, length in record.runs((OWN,))]
    return found


def squares(tensors: list[Tensor]) -> Tensor:
    """Sum of squares () of all elements, in float64: neither the width of a number nor the cut can change it visibly."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(tensors, dtype=torch.float64)
    return torch.stack(norms).square().sum()
