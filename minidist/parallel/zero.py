"""Data parallelism over flat buffers, as one algorithm with four settings (Rajbhandari et al. 2020, "ZeRO", section 5).

Every rank runs its share of the batch; gradients are summed over the group, a unit at a time, while backward is still running.
The sum is the whole rule: the loss was divided once, by the number of tokens of the global batch. What the settings change:

| stage | gradients are          | when           | each rank updates | weights                                    |
|-------|------------------------|----------------|-------------------|--------------------------------------------|
| 0     | all-reduced            | once a step    | everything        | whole                                      |
| 1     | reduce-scattered       | once a step    | its shard         | whole, gathered after the update           |
| 2     | reduce-scattered       | every backward | its shard         | whole, gathered after the update           |
| 3     | reduce-scattered       | every backward | its shard         | gathered for each use (parallel.gather)    |

Hybrid sharding (Zhao et al. 2023, "PyTorch FSDP", section 3.2.2): one copy of the state is shared by the ranks of `group`; the
same shards of all copies are summed over `replicas`, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from minidist.core import comm
from minidist.core.mesh import Group
from minidist.core.slices import Slice
from minidist.core.work import Work
from minidist.parallel.gather import Gather
from minidist.parallel.units import Fill, Formats, Unit, rehouse, units_of

STAGES = (0, 1, 2, 3)


class Zero:
    """The runtime of one data-parallel group around a plain model, whose parameters it moves into flat buffers.

    A step of the caller: `start_step()`; for every micro-batch `before_backward(last)`, a backward and `after_backward()`;
    `finish()`, after which `unit.total` holds the sum over all ranks; an update of `unit.master`; `publish(unit)` for every
    unit and `settle()`. A forward may come before or after `before_backward`.

    Reductions are launched in one fixed order, last unit of the model first: a unit waits for its predecessors, and
    whatever has seen no gradient by the end (a branch that this rank, or no rank, took) is launched then, as zeros. So the
    order is the same on all ranks whatever each of them ran, and nothing hangs.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        *,
        stage: int = 0,
        replicas: Group | None = None,
        gathers: Group | None = None,
        keep: bool = False,
        formats: Formats | None = None,
        device: torch.device | None = None,
        fill: Fill | None = None,
        offload: bool = False,
    ):
        """`formats`: default, the dtype of the model's first parameter. `fill` gives each parameter's initial values (needed
        for a model on the meta device). Without it, the model's own values are taken from place 0, so that replicas cannot
        start apart. `offload`: masters, and so the optimizer's state, lie in host memory.

        Of stage 3: `gathers`, a second group of the ranks of `group`, over which weights are gathered (default: the same),
        needed where ranks may run different branches; `keep`, keep the weights between forward and backward.
        """
        _refuse(stage, group, replicas)
        self.model, self.group, self.stage = model, group, stage
        self.replicas = replicas if replicas and replicas.size > 1 else None
        parameters = dict(model.named_parameters())
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to train")
        sample = next(iter(parameters.values()))
        if sample.is_meta and fill is None:
            raise ValueError("a model on the meta device has no values: pass fill=, such as the draw of (seed, name)")
        self.formats = (formats or Formats(sample.dtype)).settled()
        device = device or (group.wire.device if sample.is_meta else sample.device)
        host = torch.device("cpu") if offload else None
        self.units: list[Unit] = []
        for name, names in units_of(model).items():
            held = {n: parameters[n] for n in names}
            unit = Unit(name, held, stage, group.rank, group.size, self.formats, device, host)
            unit.fill(fill) if fill else self._agree(unit, held, device)
            self.units.append(unit)
        rehouse(model, self.units)
        self.trainable = [unit for unit in reversed(self.units) if not unit.frozen and unit.padded]
        """in the order of reduction"""
        self.gather = Gather(model, self.units, gathers or group, keep) if stage == 3 else None
        if self.gather:
            self.gather.left = self._launch_ready
        self._open = self._last = False
        self._waiting: dict[str, set[str]] = {}  # unit -> parameters whose gradient is still to come
        self._turn = 0  # units of `trainable` whose reduction this backward has launched
        self._flying: list[tuple[Unit, Tensor, Work, bool]] = []  # with whether this is its last of the step
        self._summing: list[tuple[Unit, Tensor, Work]] = []  # over the replicas
        self._publishing: list[Work] = []
        for unit in self.trainable:
            for name, parameter in unit.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._hook(unit, name))

    def start_step(self) -> None:
        """Begin an optimizer step: gradients are zero, nothing is reduced."""
        self._last, self._turn = False, 0
        for unit in self.trainable:
            unit.clear_gradients()

    def before_backward(self, last: bool) -> None:
        """Announce the next backward, and whether it is the last of this step: at stages 0 and 1 only that one reduces."""
        self.after_backward()
        self._open, self._last, self._turn = True, last, 0
        self._waiting = {unit.name: set(unit.parameters) for unit in self.trainable}

    def after_backward(self) -> None:
        """Reduce what this backward has not reached. Left out, the next `before_backward`, or `finish`, does it."""
        if not self._open:
            return
        self._open = False
        if self.gather:
            self.gather.end_backward()
        if self._reducing:
            self._reduce_rest()

    def finish(self) -> None:
        """Wait until `unit.total` holds the sum over all ranks of what all backwards of the step have added."""
        self.after_backward()
        if not self._reducing:  # no backward was announced as the last one
            self._last = True
            self._reduce_rest()
        while self._flying:
            self._land()
        for unit, carrier, work in self._summing:
            work.wait()
            _put(carrier, unit.total)
        self._summing = []

    def publish(self, unit: Unit) -> None:
        """Make the updated master of a unit the weights that forward uses. Returns at once: `settle` waits."""
        if unit.master is not unit.shard:
            unit.shard.copy_(unit.master)
        if self.stage in (1, 2):
            gathered = comm.all_gather(unit.shard, self.group, out=unit.weights, tag="weight", async_op=True)
            self._publishing.append(gathered)

    def settle(self) -> None:
        """Wait until every published weight is where forward finds it."""
        for work in self._publishing:
            work.wait()
        self._publishing = []
        if self.gather:
            self.gather.forget()

    def weights(self) -> list[tuple[Slice, Tensor]]:
        """The weights that this rank keeps, in their widest form: (record, flat tensor), the masters' own memory."""
        return [piece for unit in self.units for piece in self._records(unit, unit.shard if unit.frozen else unit.master)]

    def gradients(self) -> list[tuple[Slice, Tensor]]:
        """The summed gradients that this rank keeps, (record, flat tensor), the buffers' own memory.

        They are there after `finish`, and gone at the next `start_step`.
        """
        return [piece for unit in self.units if not unit.frozen for piece in self._records(unit, unit.total)]

    def travelling(self) -> list[Tensor]:
        """Gradients that are not summed yet: as autograd left them, or on their way."""
        left = [p.grad for unit in self.trainable for p in unit.parameters.values() if p.grad is not None]
        return [*left, *(flight[1] for flight in (*self._flying, *self._summing))]

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with all its weights whole, to look at. Collective at stage 3, where they are freed again at the end."""
        with self.gather.everything() if self.gather else nullcontext():
            yield self.model

    @property
    def owner(self) -> int:
        """The global rank that counts and stores what this rank's shard holds: of its replicas, the first."""
        if self.stage == 0:
            return self.group.ranks[0]
        return self.replicas.ranks[0] if self.replicas else self.group.ranks[self.group.rank]

    def _records(self, unit: Unit, held: Tensor) -> list[tuple[Slice, Tensor]]:
        copies = ("dp", "cp") if self.stage == 0 else ("replicate",) if self.replicas else ()
        found = []
        for name, a, b, view in unit.pieces(held):
            record = unit.parameters[name].slice
            record = record if b - a == record.numel else record.cut(a, b)
            found.append((replace(record, owner=self.owner, replicated=copies), view))
        return found

    def _agree(self, unit: Unit, own: dict[str, nn.Parameter], device: torch.device) -> None:
        """Give every rank the values that place 0 of the first replica has."""
        flat = torch.zeros(unit.padded, dtype=self.formats.master, device=device)
        for name, (a, b) in unit.ranges.items():
            flat[a:b].copy_(own[name].detach().flatten())
        for group in (self.replicas, self.group) if self.replicas else (self.group,):
            comm.broadcast(flat, group, src=0, tag="weight")
        unit.assign(0, flat)

    @property
    def _reducing(self) -> bool:
        """Whether the backward that runs, or ran last, reduces."""
        return self._last or self.stage >= 2

    def _hook(self, unit: Unit, name: str):
        def ready(parameter: nn.Parameter) -> None:
            """Runs when backward has added everything it has to add to this parameter's gradient."""
            if self.stage >= 2 and not self._open:
                raise RuntimeError(
                    f"a backward that was not announced has reached {name}: call before_backward() before every backward"
                )
            if self._reducing and unit in self.trainable[: self._turn]:
                raise RuntimeError(
                    f"the gradient of {name} grew after {unit.name} had been reduced: call before_backward() before every "
                    f"backward, with last=True before the last one of a step only, and add losses up before it"
                )
            self._collect(unit, name, parameter)
            self._waiting.get(unit.name, set()).discard(name)
            if self._reducing:
                self._launch_ready()

        return ready

    def _collect(self, unit: Unit, name: str, parameter: nn.Parameter) -> None:
        """Bring a gradient that autograd has finished to where it is summed."""
        a, b = unit.ranges[name]
        if unit.in_place:
            if parameter.numel() and parameter.grad.data_ptr() != unit.grads[a:].data_ptr():
                raise RuntimeError(f"{name}.grad left its flat buffer: zero gradients by start_step(), not by zero_grad()")
            return
        if self.stage < 2:
            unit.grads[a:b].add_(parameter.grad.flatten())
            parameter.grad = None

    def _launch_ready(self) -> None:
        """Reduce the units that are complete, in order, up to the first that is not."""
        for unit in self.trainable[self._turn :]:
            if not self._complete(unit):
                return
            self._reduce(unit)

    def _complete(self, unit: Unit) -> bool:
        """Whether a unit's gradient will grow no more in this backward."""
        if self.gather and self.gather.in_order:
            return self.gather.has_left(unit)
        return not self._waiting[unit.name]

    def _reduce_rest(self) -> None:
        """Reduce the units that are left, with what has come of their gradients."""
        for unit in self.trainable[self._turn :]:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Launch the reduction of one unit."""
        if self.stage >= 2 and self._flying:
            self._land()  # one buffer travels at a time, while backward makes the gradients of the next unit
        carrier, (a, b) = self._carrier(unit), unit.own
        if self.stage == 0:
            work = comm.all_reduce(carrier, self.group, tag="grad", async_op=True)
        else:
            work = comm.reduce_scatter(carrier, self.group, out=carrier[a:b], tag="grad", async_op=True)
        self._flying.append((unit, carrier, work, self._last))
        self._turn += 1

    def _carrier(self, unit: Unit) -> Tensor:
        """(padded,) in the reduce dtype: what the ranks sum."""
        if self.stage < 2:
            return unit.grads.to(self.formats.reduce)  # itself, where that is its dtype
        carrier = unit.grads.new_empty(unit.padded, dtype=self.formats.reduce)
        carrier[unit.numel :].zero_()
        for name, parameter in unit.parameters.items():
            a, b = unit.ranges[name]
            if parameter.grad is None:  # this rank took another branch
                carrier[a:b].zero_()
            else:
                carrier[a:b].copy_(parameter.grad.flatten())
                parameter.grad = None
        return carrier

    def _land(self) -> None:
        """Wait for the oldest reduction and keep its result. After its last of a step, a unit is summed over replicas."""
        unit, carrier, work, last = self._flying.pop(0)
        work.wait()
        part = carrier[unit.own[0] : unit.own[1]]
        if self.stage >= 2:
            unit.add(part)
        elif carrier is not unit.grads:
            unit.total.copy_(part)
        if self.replicas and last:
            carrier = unit.total.to(self.formats.reduce)
            self._summing.append((unit, carrier, comm.all_reduce(carrier, self.replicas, tag="grad", async_op=True)))


def _put(value: Tensor, into: Tensor) -> None:
    if value is not into:
        into.copy_(value)


def _refuse(stage: int, group: Group, replicas: Group | None) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage = {stage!r}: ZeRO has stages 0, 1, 2 and 3")
    if stage == 0 and replicas and replicas.size > 1:
        raise ValueError(
            f"stage 0 with replicas of {replicas.size} ranks: it keeps the whole state on every rank, so there is nothing to "
            f"shard within {group.name}; pass one group of all ranks, or a stage from 1 to 3"
        )
