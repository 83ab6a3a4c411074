"""Units: the parameters of one block in one flat buffer. What is reduced, gathered, sharded and freed together."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor, nn

from minidist.core.slices import Slice

Fill = Callable[[Slice], Tensor]  # a record -> its initial values (numel,), in any float dtype


def units_of(model: nn.Module) -> dict[str, list[str]]:
    """Which parameters form which unit, in order of forward: unit name -> parameter names.

    A block of `model.blocks` is a unit; so is every other child, except that a final norm joins its head. A parameter used
    in two places is a unit of its own, so that it lies padded the same wherever it lives; so are the frozen ones of a unit,
    which have no gradient to reduce.
    """
    seen: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    units: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
        if unit == "norm" and hasattr(model, "head"):
            unit = "head"
        if seen[id(parameter)] > 1:
            unit = f"tied {name}"
        if not parameter.requires_grad:
            unit += " (frozen)"
        units.setdefault(unit, []).append(name)
    return units


class Unit:
    """One flat buffer of weights and, unless frozen, one of gradients; every parameter is a view into them.

    Matrices come first, so that weight decay, which acts on them alone, has one stretch of the buffer. The buffers are padded
    to a multiple of the group's size, so that they can be cut into equal shards; padding is zero and stays zero.
    """

    def __init__(
        self, name: str, parameters: dict[str, nn.Parameter], pad_to: int, owner: int, dtype: torch.dtype, device: torch.device
    ):
        self.name = name
        names = sorted(parameters, key=lambda n: parameters[n].dim() < 2)  # stable: model order within each kind
        ends = list(accumulate(parameters[n].numel() for n in names))
        self.numel = ends[-1] if ends else 0
        """elements without padding"""
        self.padded = math.ceil(self.numel / pad_to) * pad_to
        self.frozen = not any(p.requires_grad for p in parameters.values())
        self.weights = torch.zeros(self.padded, dtype=dtype, device=device)
        """(padded,)"""
        self.grads = None if self.frozen else torch.zeros_like(self.weights)
        self.ranges = {n: (end - parameters[n].numel(), end) for n, end in zip(names, ends, strict=True)}
        """parameter name -> [a, b) in the buffers"""
        self.matrices = sum(parameters[n].numel() for n in names if parameters[n].dim() >= 2)
        """elements [0, matrices) belong to matrices"""
        self.parameters = {n: self._house(n, parameters[n], owner) for n in names}

    def _house(self, name: str, old: nn.Parameter, owner: int) -> nn.Parameter:
        """The parameter that replaces `old`: a view into the buffers that knows its slice."""
        a, b = self.ranges[name]
        new = nn.Parameter(self.weights[a:b].view(old.shape), requires_grad=old.requires_grad)
        if self.grads is not None:
            new.grad = self.grads[a:b].view(old.shape)  # autograd adds into it in place
        new.slice = getattr(old, "slice", None) or Slice.whole(name, old.shape, ("dp", "cp"), owner)
        if not old.is_meta:
            new.data.copy_(old.data)
        return new

    @torch.no_grad()
    def fill(self, values: Fill) -> None:
        """Give every parameter the initial values of its slice."""
        for name, parameter in self.parameters.items():
            a, b = self.ranges[name]
            self.weights[a:b].copy_(values(parameter.slice))


def rehouse(model: nn.Module, units: list[Unit]) -> None:
    """Put the units' parameters into the model, in every place where the old ones were (a tied one in two)."""
    new = {name: parameter for unit in units for name, parameter in unit.parameters.items()}
    old = {id(parameter): new[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = old[id(parameter)]
