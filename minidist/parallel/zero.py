"""Data parallelism over flat buffers (Rajbhandari et al. 2020, "ZeRO", section 5, with stage 0 as its degenerate case).

Every rank runs its share of the batch; gradients are summed over the group, once an optimizer step, a unit at a time, while
backward is still running. The sum is the whole rule: the loss was divided once, by the number of tokens of the global batch.
"""

from __future__ import annotations

import torch
from torch import nn

from minidist.core import comm
from minidist.core.mesh import Group
from minidist.core.work import Work
from minidist.parallel.units import Fill, Unit, rehouse, units_of


class Zero:
    """The runtime of one data-parallel group around a plain model, whose parameters it moves into flat buffers.

    A step of the caller: `start_step()`; for every micro-batch `before_backward(last)` and a backward; `finish()`. Then
    every rank holds the same summed gradients in `unit.grads`, seen through each parameter's `.grad`.

    Reductions are launched in one fixed order, last unit of the model first: a unit waits for its predecessors, and
    whatever has seen no gradient by the end (a branch that this rank, or no rank, took) is launched then, as zeros. So the
    order is the same on all ranks whatever each of them ran, and nothing hangs.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        fill: Fill | None = None,
    ):
        """`fill` gives each parameter's initial values (needed for a model on the meta device). Without it, the model's own
        values are taken from place 0, so that replicas cannot start apart."""
        self.model, self.group = model, group
        parameters = dict(model.named_parameters())
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to train")
        sample = next(iter(parameters.values()))
        if sample.is_meta and fill is None:
            raise ValueError("a model on the meta device has no values: pass fill=, such as the draw of (seed, name)")
        dtype, device = dtype or sample.dtype, device or (group.wire.device if sample.is_meta else sample.device)
        self.units = [
            Unit(unit, {name: parameters[name] for name in names}, group.size, group.ranks[0], dtype, device)
            for unit, names in units_of(model).items()
        ]
        rehouse(model, self.units)
        for unit in self.units:
            if fill is not None:
                unit.fill(fill)
            else:
                comm.broadcast(unit.weights, group, src=0, tag="weight")
        self.trainable = [unit for unit in reversed(self.units) if not unit.frozen]
        """in the order of reduction"""
        self._last = False
        self._waiting: dict[str, set[str]] = {}  # unit -> parameters whose gradient is still to come
        self._launched: list[Work] = []
        for unit in self.trainable:
            for name, parameter in unit.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._hook(unit, name))

    def start_step(self) -> None:
        """Begin an optimizer step: gradients are zero, nothing is reduced."""
        self._last, self._launched = False, []
        for unit in self.trainable:
            unit.grads.zero_()

    def before_backward(self, last: bool) -> None:
        """Announce the next backward, and whether it is the last of this step: only that one reduces."""
        self._last = last
        self._waiting = {unit.name: set(unit.parameters) for unit in self.trainable}

    def finish(self) -> None:
        """Reduce what no gradient has reached, and wait until every unit holds its sum over the group."""
        for unit in self.trainable[len(self._launched) :]:
            self._reduce(unit)
        for work in self._launched:
            work.wait()

    def _hook(self, unit: Unit, name: str):
        def ready(parameter: nn.Parameter) -> None:
            """Runs when backward has added everything it has to add to this parameter's gradient."""
            a, _ = unit.ranges[name]
            if parameter.numel() and parameter.grad.data_ptr() != unit.grads[a:].data_ptr():
                raise RuntimeError(f"{name}.grad left its flat buffer: zero gradients by start_step(), not by zero_grad()")
            if not self._last:
                return
            if unit in self.trainable[: len(self._launched)]:
                raise RuntimeError(
                    f"the gradient of {name} grew after {unit.name} had been reduced: call before_backward(last=True) before "
                    f"the last backward of a step only, and add losses up before that backward"
                )
            self._waiting[unit.name].discard(name)
            self._launch_ready()

        return ready

    def _launch_ready(self) -> None:
        """Reduce the units that are complete, in order, up to the first that is not."""
        for unit in self.trainable[len(self._launched) :]:
            if self._waiting[unit.name]:
                return
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Stage 0: everyone needs the whole sum."""
        self._launched.append(comm.all_reduce(unit.grads, self.group, tag="grad", async_op=True))
