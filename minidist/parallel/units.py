"""Units: the parameters of one block in one flat buffer. What is reduced, gathered, sharded and freed together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from minidist.core.mesh import Group
from minidist.core.slices import Slice

Fill = Callable[[Slice], Tensor]  # a record -> its initial values (numel,), in any float dtype


def units_of(model: nn.Module) -> dict[str, list[str]]:
    """Which parameters form which unit, in order of forward: unit name -> parameter names.

    A block of `model.blocks` is a unit; so is every other child, except that a final norm joins its head. A parameter used
    in two places is a unit of its own, so that it lies padded the same wherever it lives; so are the frozen ones of a unit,
    which have no gradient to reduce, and those that are reduced over other ranks (`.over`).
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
        if seen[id(parameter)] > 1 or tied(parameter):
            unit = f"tied {name}"
        if hasattr(parameter, "over"):
            unit += f" ({parameter.over})"
        if not parameter.requires_grad:
            unit += " (frozen)"
        units.setdefault(unit, []).append(name)
    return units


def tied(parameter: nn.Parameter) -> bool:
    """Whether another pipeline stage holds this parameter too, so that its gradient is a term of a sum over both."""
    return hasattr(parameter, "slice") and "pp" in parameter.slice.replicated


def joined(units: dict[str, list[str]], sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """Neighbouring units made one while their elements (`sizes`, of each parameter) stay within `limit`: DDP's buckets.

    Li et al. 2020, "PyTorch Distributed", section 3.2.2. Filled from the last unit, whose gradient comes first, so that the
    reduction that nothing hides, the last, is the short one. Tied, frozen and expert units stay alone.
    """
    runs: list[list[str]] = []
    room = -1
    for name, names in reversed(units.items()):
        size = sum(sizes[n] for n in names)
        alone = name.startswith("tied ") or name.endswith(")")
        if size <= room and not alone:
            runs[-1].insert(0, name)
            room -= size
        else:
            runs.append([name])
            room = -1 if alone else limit - size
    title = {run[0]: run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs}
    return {title[run[0]]: [n for name in run for n in units[name]] for run in reversed(runs)}


@dataclass(frozen=True)
class Sharing:
    """Who shares one copy of a unit's state, who holds its other copies, and over which group weights are gathered."""

    group: Group
    """the data-parallel ranks whose gradients are summed; from stage 1 on each keeps a shard"""
    replicas: Group | None = None
    """hybrid sharding: the same shard of the other copies"""
    gathers: Group | None = None
    """a second connection among `group`, for stage 3; None: the same one"""


@dataclass(frozen=True)
class Formats:
    """Number formats of one unit. Unset ones follow `weights`: the wider of it and fp32, in which sums lose least (C20)."""

    weights: torch.dtype = torch.float32
    """of the weights that forward and backward use, and that are gathered"""
    reduce: torch.dtype | None = None
    """in which gradients travel and are summed over the ranks"""
    grads: torch.dtype | None = None
    """in which gradients are kept, and summed over micro-batches"""

    @property
    def master(self) -> torch.dtype:
        """Of the copy of the weights that the optimizer works on: never narrower than fp32 (C19)."""
        return torch.promote_types(self.weights, torch.float32)

    def settled(self) -> Formats:
        """The same with nothing unset."""
        return replace(self, reduce=self.reduce or self.master, grads=self.grads or self.master)


class Unit:
    """The flat buffers of one unit, as one rank holds them at one ZeRO stage. Every parameter is a view into `weights`.

    Matrices come first, so that weight decay, which acts on them alone, has one stretch of the buffer. The buffers are padded
    to a multiple of the number of shards, so that they can be cut into equal parts; padding is zero and stays zero.

    What a rank holds, of P padded elements over n ranks:

    | stage | `weights` | `shard`      | `master`, if wider | `grads`, `total`        |
    |-------|-----------|--------------|--------------------|-------------------------|
    | 0     | P         | all of them  | P                  | P, all of it            |
    | 1     | P         | P/n of them  | P/n                | P, P/n of it            |
    | 2     | P         | P/n of them  | P/n                | none kept, P/n          |
    | 3     | while used| P/n          | P/n                | none kept, P/n          |
    """

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        stage: int,
        sharing: Sharing,
        formats: Formats,
        device: torch.device,
        host: torch.device | None = None,
    ):
        """With `host`, the master lives on that device, whatever its dtype."""
        self.name, self.stage, self.sharing, self.formats = name, stage, sharing, formats
        place, shards = sharing.group.rank, sharing.group.size
        names = sorted(parameters, key=lambda n: parameters[n].dim() < 2)  # stable: model order within each kind
        ends = list(accumulate(parameters[n].numel() for n in names))
        self.numel = ends[-1] if ends else 0
        """elements without padding"""
        self.padded = math.ceil(self.numel / shards) * shards
        self.frozen = not any(p.requires_grad for p in parameters.values())
        self.ranges = {n: (end - parameters[n].numel(), end) for n, end in zip(names, ends, strict=True)}
        """parameter name -> [a, b) in the buffers"""
        self.matrices = sum(parameters[n].numel() for n in names if parameters[n].dim() >= 2)
        """elements [0, matrices) belong to matrices"""
        part = self.padded // shards
        self.own = (0, self.padded) if stage == 0 else (place * part, (place + 1) * part)
        """[a, b) of the buffers: what this rank's optimizer updates"""
        self.weights = torch.zeros(self.padded, dtype=formats.weights, device=device)
        """(padded,) in formats.weights; at stage 3 without storage while the unit is not in use"""
        self._allocate(device, host)
        self.parameters = {n: self._house(n, parameters[n]) for n in names}
        self._views = {n: p.data for n, p in self.parameters.items()}
        if stage == 3:
            self.free()

    def _allocate(self, device: torch.device, host: torch.device | None) -> None:
        a, b = self.own
        self.shard = self.weights[a:b] if self.stage < 3 else self.weights[a:b].clone()
        """(b - a,) the own part of the weights; at stages 0 to 2 a view of them"""
        self.master = self.grads = self.total = None
        self._begun: set[str] = set()  # parameters whose gradient of this step has begun to come, at stages 0 and 1
        self.arrived: dict[str, Tensor] = {}
        """from stage 2 on: gradients by parameter, as backwards have left them since the last reduction"""
        if self.frozen:
            return
        wide = self.formats.master != self.formats.weights or host is not None
        self.master = self.shard.to(host or device, self.formats.master, copy=True) if wide else self.shard
        """(b - a,) what the optimizer updates; the shard itself where that is wide enough"""
        size = self.padded if self.stage < 2 else b - a
        self.grads = torch.zeros(size, dtype=self.formats.grads, device=device)
        """in formats.grads: (padded,) this rank's gradient, after the reduction the sum; from stage 2 on the sum's own part"""
        self.total = self.grads[a:b] if self.stage < 2 else self.grads
        """(b - a,) where the own part of the summed gradient appears"""

    def _house(self, name: str, old: nn.Parameter) -> nn.Parameter:
        """The parameter that replaces `old`: a view into the buffers that knows its slice."""
        a, b = self.ranges[name]
        new = nn.Parameter(self.weights[a:b].view(old.shape), requires_grad=old.requires_grad)
        new.slice = getattr(old, "slice", None) or Slice.whole(name, old.shape)
        for mark in ("over", "partial"):
            if hasattr(old, mark):
                setattr(new, mark, getattr(old, mark))
        return new

    @property
    def owner(self) -> int:
        """The global rank that counts and stores what this rank's shard holds: of its replicas, the first."""
        group, replicas = self.sharing.group, self.sharing.replicas
        if self.stage == 0:
            return group.ranks[0]
        return replicas.ranks[0] if replicas else group.ranks[group.rank]

    @torch.no_grad()
    def fill(self, values: Fill) -> None:
        """Give the weights and masters that this rank holds the initial values of their slices."""
        first, last = self.own if self.stage == 3 else (0, self.padded)
        for name, parameter in self.parameters.items():
            a, b = self.ranges[name]
            low, high = max(a, first), min(b, last)
            if low < high:
                self.assign(low, values(parameter.slice.cut(low - a, high - a)))

    def assign(self, start: int, values: Tensor) -> None:
        """Write `values`, elements `start` and on of the buffers, into weights and masters, as far as this rank holds them."""
        if self.stage < 3:
            self.weights[start : start + len(values)].copy_(values)
        low, high = max(start, self.own[0]), min(start + len(values), self.own[1])
        if low < high:
            for held in (self.shard,) if self.frozen else (self.shard, self.master):
                held[low - self.own[0] : high - self.own[0]].copy_(values[low - start : high - start])

    def pieces(self) -> list[tuple[str, int, int, slice]]:
        """The own range by parameter: (name, first, last element of the flattened parameter, their place in the own range).

        An empty parameter has no element on any rank; the first one names it.
        """
        first, last = self.own
        found = []
        for name, (a, b) in self.ranges.items():
            low, high = max(a, first), min(b, last)
            if low < high or (a == b and first == 0):
                low, high = min(low, high), high
                found.append((name, low - a, high - a, slice(low - first, high - first)))
        return found

    # Gradients. Nothing is ever zeroed to be added to: what comes first in a step is copied. From stage 2 on, the sum has
    # memory from the first reduction of a step to the next step's beginning.

    def clear_gradients(self) -> None:
        """Forget the gradients of the last step."""
        self._begun.clear()
        self.arrived.clear()
        if self.stage >= 2:
            self.grads.untyped_storage().resize_(0)

    def collect(self, name: str, grad: Tensor) -> None:
        """Take what a backward has made of a parameter's gradient: at stages 0 and 1, into this rank's sum."""
        if self.stage >= 2:
            self.arrived[name] = self.arrived[name] + grad if name in self.arrived else grad
            return
        a, b = self.ranges[name]
        place = self.grads[a:b].view_as(grad)
        (place.add_ if name in self._begun else place.copy_)(grad)
        self._begun.add(name)

    def carrier(self) -> Tensor:
        """(padded,) in the reduce dtype, this rank's gradient for the ranks to sum; zero where it took another branch.

        From stage 2 on a new buffer, made of what has arrived since the last one.
        """
        if self.stage < 2:
            for name, (a, b) in self.ranges.items():
                if name not in self._begun:
                    self.grads[a:b].zero_()
            return self.grads.to(self.formats.reduce)  # itself, where that is its dtype
        carrier = self.grads.new_empty(self.padded, dtype=self.formats.reduce)
        carrier[self.numel :].zero_()
        for name, (a, b) in self.ranges.items():
            grad = self.arrived.pop(name, None)
            if grad is None:
                carrier[a:b].zero_()
            else:
                carrier[a:b].view_as(grad).copy_(grad)
        return carrier

    def add(self, part: Tensor) -> None:
        """From stage 2 on: add this rank's part (b - a,) of a reduced gradient to the sum."""
        storage = self.grads.untyped_storage()
        if storage.nbytes():
            self.grads.add_(part)
        else:
            storage.resize_(self.grads.numel() * self.grads.element_size())
            self.grads.copy_(part)

    # Stage 3: the whole weights exist while they are used.

    @property
    def live(self) -> bool:
        """Whether the whole weights have memory now."""
        return self.weights.untyped_storage().nbytes() > 0 or not self.padded

    def allocate(self) -> Tensor:
        """Give the whole weights memory again, in the storage that autograd has noted; the buffer to gather into.

        Its version is counted apart (`.data`): to gather the same weights again is no change of them for autograd.
        """
        self.weights.untyped_storage().resize_(self.padded * self.weights.element_size())
        for name, parameter in self.parameters.items():
            parameter.data = self._views[name]
        return self.weights.data

    def free(self) -> None:
        """Give the memory of the whole weights back. Each parameter is empty until it is gathered again."""
        if not self.padded:
            return
        self.weights.untyped_storage().resize_(0)
        for parameter in self.parameters.values():
            parameter.data = parameter.data.new_empty(0)


def rehouse(model: nn.Module, units: list[Unit]) -> None:
    """Put the units' parameters into the model, in every place where the old ones were (a tied one in two)."""
    new = {name: parameter for unit in units for name, parameter in unit.parameters.items()}
    old = {id(parameter): new[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = old[id(parameter)]
