"""Number formats of a run, and the loss scale that keeps float16 gradients within their range.

Micikevicius et al. 2018, "Mixed Precision Training": master weights (section 3.1) and loss scaling (3.2).
"""

from __future__ import annotations

import torch

from minidist.parallel.units import Formats
from minidist.train.sections import Precision

FIRST_SCALE = 2.0**16


def formats(precision: Precision) -> Formats:
    """The formats of weights and gradients that the configuration names."""
    return Formats(dtype(precision.dtype), dtype(precision.reduce), dtype(precision.accumulate))


def dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None stays None."""
    return None if name is None else getattr(torch, name)


class LossScale:
    """What the loss is multiplied by. In float16 it moves, the same on all ranks, since all see the same overflows.

    The divisor of the loss is the number of tokens of the whole global batch, so a right scale grows with the batch: there is
    no largest one.
    """

    def __init__(self, precision: Precision):
        self.moves = precision.dtype == "float16"
        self.value = precision.loss_scale or (FIRST_SCALE if self.moves else 1.0)
        self.window = precision.scale_window
        self.good = 0
        """steps without an overflow since the scale last moved"""

    def step(self, overflow: bool) -> None:
        """Take note of how the step went: halve after an overflow, double after `window` steps without one."""
        if not self.moves:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value /= 2
        elif self.good == self.window:
            self.value, self.good = self.value * 2, 0
