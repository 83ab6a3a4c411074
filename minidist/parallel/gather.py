"""ZeRO stage 3: weights are gathered ahead of each use and freed after it (Rajbhandari et al. 2020, "ZeRO", section 5.3).

A pass over the model, forward or backward, is a walk along its sites: the blocks and the other children, in the order in which
the model defines them, backwards in backward. Entering a site frees what the walk has left behind and launches the gather of
the site that comes next, so the units of two sites are live at a time (and those that the root itself owns, all along).

The walk takes every site, also one that this rank's forward skips: so the gathers, and their order, are the same on every
rank whatever each of them ran. Reductions follow the walk, too: a unit's is launched when the walk has left its last site. With
one order of all gathers and reductions, no rank can wait for a reduction while its peer waits for a gather. A module may be
called again and again while the walk stands on it. One that is called after the walk has gone on is gathered once more, which
then has to happen on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from minidist.core import comm
from minidist.core.work import Work
from minidist.parallel.units import Unit

FORWARD, BACKWARD, OUTSIDE = 1, -1, 0


class Gather:
    """Gathers and frees the weights of `units`, by hooks on the modules of `model` that use them."""

    def __init__(self, model: nn.Module, units: list[Unit], keep: bool):
        """`keep`: weights gathered in forward stay until backward has used them, as those of the last site always do."""
        self.units, self.keep = units, keep
        sites = sites_of(model, units)
        self.throughout = sites.pop("", [])
        """units that the root module itself owns: live during the whole of a pass"""
        self.sites = list(sites.values())
        """per site, the units it uses"""
        self.left: Callable[[], None] = lambda: None
        """called in backward whenever the walk has left a site"""
        self.in_order = True
        """whether this rank's forwards have called the sites in the model's order, none again after the walk had gone on"""
        self._first = {unit.name: k for k, site in reversed(list(enumerate(self.sites))) for unit in site}
        self._direction = OUTSIDE
        self._at = -1  # the site where the walk stands
        self._keeping = False  # whether what this pass gathers is kept for backward
        self._walked = False  # whether a backward pass has begun that `end_backward` has not ended
        self._live: dict[str, tuple[Unit, Work]] = {}
        model.register_forward_pre_hook(lambda *_: self._begin(FORWARD))
        model.register_forward_hook(self._end_forward)
        for k, path in enumerate(sites):
            module = model.get_submodule(path)
            module.register_forward_pre_hook(lambda *_, k=k, path=path: self._before_module(k, path))
            module.register_forward_hook(lambda m, args, out, k=k: self._before_gradient_of(out, k))

    def end_backward(self) -> None:
        """Walk to the end of the backward pass, whose last sites may have seen no gradient, and free everything."""
        if not self._walked:
            self._begin(BACKWARD)
        self._walked = False
        if self._direction == BACKWARD:  # else the next forward has walked it out already, and holds weights of its own
            self._walk_out()
            self._release()

    def forget(self) -> None:
        """Free what is live: its values are about to be old."""
        self._direction = OUTSIDE
        self._release()

    @contextmanager
    def everything(self) -> Iterator[None]:
        """All weights live. Collective."""
        for unit in self.units:
            self._launch(unit)
        self._wait(self.units)
        try:
            yield
        finally:
            self._release()

    def has_left(self, unit: Unit) -> bool:
        """Whether the backward walk has left all sites that use this unit, so that its gradient is complete."""
        return self._direction == BACKWARD and self._at < self._first.get(unit.name, -1)

    # The walk

    def _begin(self, direction: int) -> None:
        if self._direction == BACKWARD:  # a forward before the end of the last backward was said
            self._walk_out()
            self._release()
        self._walked = self._walked or direction == BACKWARD
        self._direction = direction
        self._keeping = self.keep and (direction == BACKWARD or torch.is_grad_enabled())
        self._at = -1 if direction == FORWARD else len(self.sites)
        for unit in (*self.throughout, *self._used(self._at + direction)):
            self._launch(unit)
        self._wait(self.throughout)

    def _enter(self, k: int) -> None:
        """Stand on site k with its weights live."""
        while (k - self._at) * self._direction > 0:
            self._advance()
        if k != self._at:  # left behind already: once more from there
            self.in_order = self.in_order and self._direction == BACKWARD
            self._at = k - self._direction
            self._advance()

    def _advance(self) -> None:
        """One site on: free what is behind, gather what comes next, and wait for what is here."""
        self._at += self._direction
        if self._direction == BACKWARD:
            self.left()
        here, ahead = self._used(self._at), self._used(self._at + self._direction)
        self._release(self.throughout, here, ahead, self._to_come())
        for unit in (*here, *ahead):
            self._launch(unit)
        self._wait(here)

    def _walk_out(self) -> None:
        while self._direction and 0 <= self._at + self._direction < len(self.sites):
            self._advance()
        if self._direction == BACKWARD:
            self._at = -1
            self.left()
        self._direction = OUTSIDE

    def _used(self, k: int) -> list[Unit]:
        return self.sites[k] if 0 <= k < len(self.sites) else []

    def _to_come(self) -> list[Unit]:
        """What this pass keeps: in forward everything, in backward what the walk has still to use."""
        if not self._keeping:
            return []
        return self.units if self._direction == FORWARD else [unit for site in self.sites[: max(self._at, 0)] for unit in site]

    # Units

    def _launch(self, unit: Unit) -> None:
        if not unit.live:
            group = unit.sharing.gathers or unit.sharing.group
            work = comm.all_gather(unit.shard, group, out=unit.allocate(), tag="weight", async_op=True)
            self._live[unit.name] = (unit, work)

    def _wait(self, units: list[Unit]) -> None:
        for unit in units:
            if unit.name in self._live:
                self._live[unit.name][1].wait()

    def _release(self, *needed: list[Unit]) -> None:
        """Free all units but these."""
        stay = {unit.name for units in needed for unit in units}
        for name in [name for name in self._live if name not in stay]:
            unit, work = self._live.pop(name)
            work.wait()
            unit.free()

    # Hooks

    def _before_module(self, k: int, path: str) -> None:
        if self._direction == FORWARD:
            self._enter(k)
        elif not all(unit.live for unit in self.sites[k]):  # in backward, a re-run finds its weights live
            raise RuntimeError(
                f"{path} was called outside a forward of the whole model: at stage 3 its weights exist only there. Call "
                f"zero.model(...), or look at weights under `with zero.gathered():`"
            )

    def _before_gradient_of(self, out: Any, k: int) -> None:
        """Arrange that site k's weights are live when backward comes to it, which its output's gradient announces."""
        if self._direction == FORWARD:
            self._announce(out, lambda: self._enter(k))

    def _end_forward(self, model: nn.Module, args: Any, out: Any) -> None:
        self._announce(out, lambda: None)
        self._walk_out()
        if not self._keeping:
            self._release(self._used(len(self.sites) - 1) if torch.is_grad_enabled() else [])

    def _announce(self, out: Any, then: Any) -> None:
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]

        def coming(_: Tensor) -> None:
            if self._direction != BACKWARD:
                self._begin(BACKWARD)
            then()

        if tensors and torch.is_grad_enabled():
            register_multi_grad_hook(tensors, coming, mode="any")


def sites_of(model: nn.Module, units: list[Unit]) -> dict[str, list[Unit]]:
    """Path of each site -> the units it uses, in the model's order; under "" those of the root's own parameters.

    A block of `model.blocks` is a site, and so is every other child that holds a parameter, at any depth.
    """
    owner = {id(parameter): unit for unit in units for parameter in unit.parameters.values()}
    sites: dict[str, list[Unit]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        depth = 2 if parts[0] == "blocks" and len(parts) > 2 else min(1, len(parts) - 1)
        used = sites.setdefault(".".join(parts[:depth]), [])
        if owner[id(parameter)] not in used:
            used.append(owner[id(parameter)])
    return sites
