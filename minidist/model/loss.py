"""The loss under "sum everywhere, divide once": a sum over tokens here, one division by the global count in the step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a target that does not count: padding, or an empty micro-batch; F.cross_entropy's own default


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(logits)[target] over all targets that are not IGNORE: scalar, nats, in fp32 or wider.

    logits (...,V), targets (...). Never a mean: means of pieces with unequal token counts do not add up to the mean of
    the whole. The caller divides by the number of valid targets of the whole global batch. With no valid target: 0.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, -2).to(wide), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def count_valid(targets: Tensor) -> Tensor:
    """Number of targets that count: int64 scalar tensor, on the targets' device."""
    return (targets != IGNORE).sum()
