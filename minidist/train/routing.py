"""What the routers did in a step, for the whole job: summed over the ranks once, told as figures, and answered by the bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minidist.core import comm
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.model import balance
from minidist.model.balance import Routing
from minidist.model.moe import layers_of, rebalance


@dataclass(frozen=True)
class RoutingResult:
    """Means over the layers and the valid tokens of the step."""

    balance_loss: float
    """1 where the experts share every row evenly, experts / top_k where each row goes to top_k of them; before its weight"""
    z_loss: float
    """squared log-sum-exp of the router's logits, before its weight"""
    dropped: float
    """share of the tokens' choices that found their expert full"""
    busiest: float
    """choices of the most chosen expert of a layer over its even share, the worst layer's"""


def sum_loads(routings: Sequence[Routing], mesh: Mesh, layers: int) -> Tensor:
    """(L,E+3), as `balance.loads` gives it, of the global batch and all `layers` of the model."""
    own = balance.loads(routings)
    loads = own.new_zeros(layers, own.shape[1])
    loads[sorted(routings[0].loads)] = own
    loads = comm.all_reduce(loads, mesh.group("dp_cp"), tag="control")
    return comm.all_reduce(loads, mesh.group("pp"), tag="control") if mesh.layout.pp > 1 else loads


def finish(model: nn.Module, loads: Tensor, skipped: bool) -> RoutingResult:
    """Figures of the summed `loads`; and the selection bias moves, unless the step was skipped."""
    cfg = model.cfg
    if cfg.bias_rate and not skipped:
        rebalance(model, loads[[layer.layer for layer in layers_of(model)]])
    choices, rest = loads[:, : cfg.experts], loads[:, cfg.experts :]
    total = choices.sum().clamp_min(1.0)
    dropped, uneven, large = rest.sum(0)
    busiest = (choices.amax(1) / choices.mean(1).clamp_min(1e-9)).amax()
    figures = torch.stack((uneven * cfg.top_k / total, large * cfg.top_k / total, dropped / total, busiest))
    return RoutingResult(*host(figures, expect=[1.0, 0.0, 0.0, 1.0]))
