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

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from minidist.core import comm
from minidist.core.mesh import Group
from minidist.core.slices import Slice
from minidist.core.work import Work
from minidist.parallel.gather import Gather
from minidist.parallel.split import Later
from minidist.parallel.units import Fill, Formats, Sharing, Unit, joined, rehouse, units_of

STAGES = (0, 1, 2, 3)


class Zero:
    """The runtime of one data-parallel group around a plain model, whose parameters it moves into flat buffers.

    A step of the caller: `start_step()`; for every micro-batch `before_backward(last)`, a backward and `after_backward()`;
    `finish()`, after which `unit.total` holds the sum over all ranks; an update of `unit.master`; `publish(unit)` for every
    unit and `settle()`. A forward may come before or after `before_backward`.

    Reductions are launched in one fixed order, last unit of the model first: a unit waits for its predecessors, and
    whatever has seen no gradient by the end (a branch that this rank, or no rank, took) is launched then, as zeros. So the
    order is the same on all ranks whatever each of them ran, and nothing hangs.

    A model may run in several parts, each with forwards and backwards of its own (stages of a pipeline): then each announcement
    says which part it is of, and a unit that two parts use is complete when both have announced their last backward.
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
        bucket: int = 0,
        formats: Formats | None = None,
        device: torch.device | None = None,
        fill: Fill | None = None,
        offload: bool = False,
        elsewhere: dict[str, Sharing] | None = None,
        owner_among: Callable[[Slice, int], int] = lambda record, rank: rank,
        parts: Sequence[nn.Module] = (),
        later: Later | None = None,
    ):
        """`formats`: default, the dtype of the model's first parameter. `fill` gives each parameter's initial values (needed
        for a model on the meta device). Without it, the model's own values are taken from place 0, so that replicas cannot
        start apart. `offload`: masters, and so the optimizer's state, lie in host memory.

        Of stage 3: `gathers`, a second group of the ranks of `group`, over which weights are gathered (default: the same),
        needed where ranks may run different branches; `keep`, keep the weights between forward and backward.
        Of stage 0: `bucket`, bytes of gradients up to which neighbouring units are joined to one.

        Beside other parallelisms: `elsewhere`, the ranks of parameters marked `.over = key` (experts); `owner_among(record,
        rank)`, who counts a record that ranks of other groups hold too, given the one of this group that would; `parts`, the
        modules in which the model runs (default: the model itself); `later`, whom its linear layers ask (`parallel.split`).
        """
        _refuse(stage, group, replicas)
        self.model, self.group, self.stage = model, group, stage
        self.sharing = Sharing(group, replicas if replicas and replicas.size > 1 else None, gathers)
        self.elsewhere, self.owner_among = elsewhere or {}, owner_among
        self.parts, self.later = list(parts or [model]), later or Later()
        parameters = dict(model.named_parameters())
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to train")
        sample = next(iter(parameters.values()))
        if sample.is_meta and fill is None:
            raise ValueError("a model on the meta device has no values: pass fill=, such as the draw of (seed, name)")
        self.formats = (formats or Formats(sample.dtype)).settled()
        device = device or (group.wire.device if sample.is_meta else sample.device)
        host = torch.device("cpu") if offload else None
        self.units = [
            self._unit(name, {n: parameters[n] for n in names}, device, host, fill)
            for name, names in self._grouped(parameters, bucket).items()
        ]
        rehouse(model, self.units)
        self.trainable = [unit for unit in reversed(self.units) if not unit.frozen and unit.padded]
        """in the order of reduction"""
        self._watch(keep)
        self._begin()

    def _watch(self, keep: bool) -> None:
        """Find which units each part uses, have stage 3 bring their weights, and take each gradient as it comes."""
        self._used = [self._units_in(part, self.trainable) for part in self.parts]  # by part, in the order of reduction
        self.gathers = [Gather(part, self._units_in(part, self.units), keep) for part in self.parts] if self.stage == 3 else []
        """of stage 3, by part"""
        for gather in self.gathers:
            gather.left = self._launch_ready
        self._homes = {id(p): (unit, name) for unit in self.trainable for name, p in unit.parameters.items()}
        for unit, name in self._homes.values():
            unit.parameters[name].register_post_accumulate_grad_hook(self._hook(unit, name))

    def _begin(self) -> None:
        """Nothing is announced, and nothing on its way."""
        self._open: int | None = None  # the part whose backward has been announced
        self._walking: Gather | None = None  # that brings this backward its weights
        self._unfinished = set(range(len(self.parts)))  # parts whose last backward of the step is still to be announced
        self._queue: list[Unit] = []  # what this backward reduces
        self._turn = 0  # units of the queue whose reduction has been launched
        self._reduced: set[str] = set()  # units whose last reduction of the step has been launched
        self._waiting: dict[str, set[str]] = {}  # unit -> parameters whose gradient is still to come
        self._flying: list[tuple[Unit, Tensor, Work, bool]] = []  # with whether this is its last of the step
        self._summing: list[tuple[Unit, Tensor, Work]] = []  # over the replicas
        self._publishing: list[Work] = []

    def start_step(self) -> None:
        """Begin an optimizer step: gradients are zero, nothing is reduced."""
        self._unfinished, self._reduced = set(range(len(self.parts))), set()
        for unit in self.trainable:
            unit.clear_gradients()

    def before_backward(
        self, last: bool, part: int = 0, kind: str = "B", awaited: Collection[nn.Parameter] | None = None
    ) -> None:
        """Announce the next backward, and whether it is the last of this step: at stages 0 and 1 only that one reduces.

        `kind`: "B", a whole one; or of a backward in two, "I", which never reduces, since weights' gradients are to follow, and
        "W", these gradients, handed over by `deposit`, for which stage 3 gathers nothing. `awaited`: the parameters whose
        gradients this backward brings (default: all of its part), so that a unit need not wait for others.
        """
        self.after_backward()
        self._open = part
        self._walking = self.gathers[part] if self.gathers and kind != "W" else None
        if last:
            self._unfinished.discard(part)
        self._queue = [] if kind == "I" else [unit for unit in self._used[part] if self.stage >= 2 or self._is_last(unit)]
        self._turn = 0
        self._waiting = {
            unit.name: {name for name, p in unit.parameters.items() if awaited is None or p in awaited} for unit in self._queue
        }

    def after_backward(self) -> None:
        """Reduce what this backward has not reached. Left out, the next `before_backward`, or `finish`, does it."""
        if self._open is None:
            return
        self._open = None
        if self._walking:
            self._walking.end_backward()
        self._reduce_rest()

    def deposit(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add `grad`, of the parameter's shape, to its gradient, as a backward outside autograd: see `before_backward`."""
        self._arrived(*self._homes[id(parameter)], grad)

    def finish(self) -> None:
        """Wait until `unit.total` holds the sum over all ranks of what all backwards of the step have added."""
        self.after_backward()
        self._unfinished = set()  # where no backward was announced as the last one
        self._queue, self._turn = [unit for unit in self.trainable if unit.name not in self._reduced], 0
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
            gathered = comm.all_gather(unit.shard, unit.sharing.group, out=unit.weights, tag="weight", async_op=True)
            self._publishing.append(gathered)

    def settle(self) -> None:
        """Wait until every published weight is where forward finds it."""
        for work in self._publishing:
            work.wait()
        self._publishing = []
        for gather in self.gathers:
            gather.forget()

    def weights(self) -> list[tuple[Slice, Tensor]]:
        """The weights that this rank keeps, in their widest form: (record, flat tensor), the masters' own memory."""
        held = ((unit, unit.shard if unit.frozen else unit.master) for unit in self.units)
        return [(record, own[place]) for unit, own in held for record, place in self.records(unit)]

    def gradients(self) -> list[tuple[Slice, Tensor]]:
        """The summed gradients that this rank keeps, (record, flat tensor), the buffers' own memory.

        They are there after `finish`, and gone at the next `start_step`.
        """
        held = ((unit, unit.total) for unit in self.units if not unit.frozen)
        return [(record, own[place]) for unit, own in held for record, place in self.records(unit)]

    def travelling(self) -> list[Tensor]:
        """Gradients that are not summed yet: as autograd left them, or on their way."""
        left = [p.grad for unit in self.trainable for p in unit.parameters.values() if p.grad is not None]
        left += [grad for unit in self.trainable for grad in unit.arrived.values()]
        return [*left, *(flight[1] for flight in (*self._flying, *self._summing))]

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The model with all its weights whole, to look at. Collective at stage 3, where they are freed again at the end."""
        with ExitStack() as stack:
            for gather in self.gathers:
                stack.enter_context(gather.everything())
            yield self.model

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name, wherever it lies."""
        return next(unit.parameters[name] for unit in self.units if name in unit.parameters)

    def _grouped(self, parameters: dict[str, nn.Parameter], bucket: int) -> dict[str, list[str]]:
        """Which parameters form which unit, in the model's order. No unit lies in two parts, but for a tied parameter's."""
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        ours = units_of(self.model)
        grouped: dict[str, list[str]] = {}
        for part in self.parts:
            inside = set(map(id, part.parameters()))
            units = {unit: names for unit, names in ours.items() if unit not in grouped and id(parameters[names[0]]) in inside}
            if self.stage == 0:
                units = joined(units, sizes, bucket // self.formats.reduce.itemsize)
            grouped |= units
        assert sum(map(len, grouped.values())) == len(parameters), "a parameter lies in no part"
        return grouped

    def _units_in(self, part: nn.Module, units: list[Unit]) -> list[Unit]:
        inside = set(map(id, part.parameters()))
        return [unit for unit in units if any(id(parameter) in inside for parameter in unit.parameters.values())]

    def _unit(
        self, name: str, held: dict[str, nn.Parameter], device: torch.device, host: torch.device | None, fill: Fill | None
    ) -> Unit:
        """One unit with its initial values."""
        over = getattr(next(iter(held.values())), "over", None)
        unit = Unit(name, held, self.stage, self.elsewhere[over] if over else self.sharing, self.formats, device, host)
        if fill:
            unit.fill(fill)
        else:
            self._agree(unit, held, device)
        return unit

    def records(self, unit: Unit) -> list[tuple[Slice, slice]]:
        """What this rank keeps of a unit: the record of each part, and its place in whatever lies over the own range."""
        if self.stage:
            copies = ("replicate",) if unit.sharing.replicas else ()
        else:
            copies = ("dp", "cp") if unit.sharing is self.sharing else (unit.sharing.group.name,)
        found = []
        for name, a, b, place in unit.pieces():
            record = unit.parameters[name].slice
            owner = self.owner_among(record, unit.owner)
            record = record if b - a == record.numel else record.cut(a, b)
            found.append((replace(record, owner=owner, replicated=(*record.replicated, *copies)), place))
        return found

    def _agree(self, unit: Unit, own: dict[str, nn.Parameter], device: torch.device) -> None:
        """Give every rank the values that place 0 of the first replica has."""
        flat = torch.zeros(unit.padded, dtype=self.formats.master, device=device)
        for name, (a, b) in unit.ranges.items():
            flat[a:b].copy_(own[name].detach().flatten())
        for group in filter(None, (unit.sharing.replicas, unit.sharing.group)):
            comm.broadcast(flat, group, src=0, tag="weight")
        unit.assign(0, flat)

    def _is_last(self, unit: Unit) -> bool:
        """Whether every part that uses this unit has announced its last backward of the step."""
        return not any(unit in self._used[part] for part in self._unfinished)

    def _hook(self, unit: Unit, name: str):
        def ready(parameter: nn.Parameter) -> None:
            """Runs when backward has added everything it has to add to this parameter's gradient."""
            grad, parameter.grad = parameter.grad, None
            if grad is not None:  # put off
                self._arrived(unit, name, grad)

        return ready

    def _arrived(self, unit: Unit, name: str, grad: Tensor) -> None:
        if self.stage >= 2 and self._open is None:
            raise RuntimeError(
                f"a backward that was not announced has reached {name}: call before_backward() before every backward"
            )
        done = unit.name in self._reduced if self.stage < 2 else unit in self._queue[: self._turn]
        if done:
            raise RuntimeError(
                f"the gradient of {name} grew after {unit.name} had been reduced: call before_backward() before every "
                f"backward, with last=True before the last one of a step only, and add losses up before it"
            )
        unit.collect(name, grad)
        if unit.name in self._waiting:
            self._waiting[unit.name].discard(name)
            self._launch_ready()

    def _launch_ready(self) -> None:
        """Reduce the units that are complete, in order, up to the first that is not."""
        for unit in self._queue[self._turn :]:
            if not self._complete(unit):
                return
            self._reduce(unit)

    def _complete(self, unit: Unit) -> bool:
        """Whether a unit's gradient will grow no more in this backward."""
        if self._walking and self._walking.in_order:
            return self._walking.has_left(unit)
        return not self._waiting[unit.name]

    def _reduce_rest(self) -> None:
        """Reduce the units that are left, with what has come of their gradients."""
        for unit in self._queue[self._turn :]:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Launch the reduction of one unit."""
        if self.stage >= 2 and self._flying:
            self._land()  # one buffer travels at a time, while backward makes the gradients of the next unit
        carrier, (a, b) = unit.carrier(), unit.own
        if self.stage == 0:
            work = comm.all_reduce(carrier, unit.sharing.group, tag="grad", async_op=True)
        else:
            work = comm.reduce_scatter(carrier, unit.sharing.group, out=carrier[a:b], tag="grad", async_op=True)
        last = self._is_last(unit)
        if last:
            self._reduced.add(unit.name)
        self._flying.append((unit, carrier, work, last))
        self._turn += 1

    def _land(self) -> None:
        """Wait for the oldest reduction and keep its result. After its last of a step, a unit is summed over replicas."""
        unit, carrier, work, last = self._flying.pop(0)
        work.wait()
        part = carrier[unit.own[0] : unit.own[1]]
        if self.stage >= 2:
            unit.add(part)
        elif carrier is not unit.grads:
            unit.total.copy_(part)
        replicas = unit.sharing.replicas
        if replicas and last:
            carrier = unit.total.to(self.formats.reduce)
            self._summing.append((unit, carrier, comm.all_reduce(carrier, replicas, tag="grad", async_op=True)))


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
