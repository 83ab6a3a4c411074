"""What training keeps in memory on one rank, by kind, counted on the storages that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minidist.train.step import Step

KINDS = ("weights", "gathered", "gradients", "master", "moments")


def held(step: Step) -> dict[str, int]:
    """Bytes of the state that this rank holds now, by kind; memory that serves two kinds counts under the first.

    weights: those that stay, whole or the own shard; gathered: whole ones of stage 3, live at this moment; gradients: the
    buffers in which they are summed, and those that collect or travel; master and moments: what the optimizer works on.
    """
    zero = step.zero
    shard = zero.stage == 3
    kinds = {
        "weights": [unit.shard if shard else unit.weights for unit in zero.units],
        "gathered": [unit.weights for unit in zero.units] if shard else [],
        "gradients": [*(unit.grads for unit in zero.units if unit.grads is not None), *zero.travelling()],
        "master": [unit.master for unit in zero.units if unit.master is not None],
        "moments": list(_moments(step)),
    }
    seen: set[int] = set()
    return {kind: sum(_new_bytes(tensor, seen) for tensor in tensors) for kind, tensors in kinds.items()}


@contextmanager
def activations(step: Step) -> Iterator[Callable[[], int]]:
    """Watch a forward within the context; a function that says how many bytes it has kept for backward, beside the state."""
    state = {unit.weights.untyped_storage()._cdata for unit in step.zero.units}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in state:
            kept[tensor.untyped_storage()._cdata] = tensor.detach()  # held, so that no other storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def padding(step: Step) -> int:
    """Elements of this job's flat buffers that exist only so that they can be cut evenly."""
    return sum(unit.padded - unit.numel for unit in step.zero.units)


def _moments(step: Step) -> Iterable[Tensor]:
    for one in step.optimizers:
        for state in one.optimizer.state.values():
            yield from (value for key, value in state.items() if torch.is_tensor(value) and key != "step")


def _new_bytes(tensor: Tensor, seen: set[int]) -> int:
    """Bytes of the tensor's storage, 0 where it was seen before."""
    storage = tensor.untyped_storage()
    if storage._cdata in seen:
        return 0
    seen.add(storage._cdata)
    return storage.nbytes()
