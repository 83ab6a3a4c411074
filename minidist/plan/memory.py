"""Bytes of model state on a rank, in closed form (Rajbhandari et al. 2020, "ZeRO", section 5 and figure 1)."""

from __future__ import annotations


def state_bytes(
    parameters: float, n: int, stage: int, *, weight: int = 2, gradient: int = 4, master: int = 4, moments: int = 8
) -> dict[str, float]:
    """Bytes a rank keeps, by kind, for `parameters` elements whose state `n` ranks share at a ZeRO stage.

    `weight`, `gradient`, `master` and `moments` are bytes a parameter: with 16-bit weights 2, 4 (or 2), 4 and 8, in all
    2 + 4 + 12 = 18 (or 16). Weights that are as wide as the master are the master: then `master` is 0. What is not there is
    gathered weights, gradients on their way, and activations.
    """
    if stage not in (0, 1, 2, 3) or n < 1:
        raise ValueError(f"stage {stage} over {n} ranks: give a stage from 0 to 3 and at least 1 rank")
    share = {"weights": 3, "gradients": 2, "master": 1, "moments": 1}  # the stage from which a kind is cut
    bytes_each = {"weights": weight, "gradients": gradient, "master": master, "moments": moments}
    return {kind: parameters * bytes_each[kind] / (n if stage >= first else 1) for kind, first in share.items()}
