"""The learning rate: linear warm-up, then a cosine, as a pure function of the number of optimizer steps taken.

Nothing is stored, so nothing can be off by one after a resume, move twice on a rank, or move on a skipped step: the
caller passes the count of *successful* optimizer steps, which is part of the checkpoint.
"""

from __future__ import annotations

import math

from minidist.train.config import Config


def lr_at(step: int, config: Config) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of a run of train.steps steps.

    Steps 0 .. warmup-1 get lr x 1/warmup .. lr x 1; then the rate falls along half a cosine from lr to
    lr x min_lr_ratio, which the last step gets (SGDR without restarts: Loshchilov and Hutter, 2017). Steps past the
    end keep the last rate.
    """
    optim, steps = config.optim, config.train.steps
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    last = steps - 1
    progress = 1.0 if step >= last else (step - optim.warmup) / (last - optim.warmup)
    low = optim.lr * optim.min_lr_ratio
    return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
