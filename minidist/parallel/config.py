"""Settings of what is applied to a model, read by configurations before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["none", "full", "selective"]
Select = Literal["attention", "blocks"]


@dataclass(frozen=True)
class Recompute:
    """Which activations backward computes again instead of keeping them, and where the kept ones lie."""

    mode: Mode = "none"
    """none keeps every activation; full keeps each block's input and runs the block again in backward, about a third more
    work; selective does so for the part that `select` names"""
    select: Select = "attention"
    """selective: attention (the softmax part of each block, without the projections) or blocks (one block in `every`)"""
    every: int = 2
    """selective blocks: the first of every so many blocks is recomputed; 1 would be full"""
    offload: bool = False
    """move what the blocks keep for backward to host memory; with mode = full that is each block's input"""

    def __post_init__(self):
        for key, allowed in (("mode", get_args(Mode)), ("select", get_args(Select))):
            if getattr(self, key) not in allowed:
                raise ValueError(f"recompute.{key} = {getattr(self, key)!r}: use one of {', '.join(allowed)}")
        if self.every < 1:
            raise ValueError(f"recompute.every = {self.every}: give at least 1, which recomputes every block")
        if self.select != "attention" and self.mode != "selective":
            raise ValueError(f"recompute.select acts with recompute.mode = selective only, not with {self.mode}: leave it out")
        if self.every != 2 and (self.mode, self.select) != ("selective", "blocks"):
            raise ValueError(
                f"recompute.every = {self.every} acts with recompute.mode = selective and recompute.select = blocks only: "
                f"set both, or leave it out"
            )

    def __str__(self):
        what = {
            "none": "nothing",
            "full": "every block",
            "selective": "attention" if self.select == "attention" else f"one block in {self.every}",
        }[self.mode]
        return f"{what}, kept activations {'on the host' if self.offload else 'on the device'}"
