"""Recompute and offload: backward keeps fewer activations, runs their forward again, or fetches them from host memory.

Full (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): a block keeps its input alone; when backward comes
to it, its forward runs again and fills in the rest. Selective (Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 4.2): only the core of attention runs again, from q, k and v to its output and not the
projections, because it keeps much and costs little. There that is the S x T scores and their softmax. Our attention runs as a
fused kernel (Dao et al. 2022, "FlashAttention") that repeats the scores itself and never keeps them; left to drop are its
log-sum-exp and, where rows hold several documents, its mask, S elements a token. An attention written as plain formulas loses
all that the paper says.

Bytes kept for backward by L blocks on B x S tokens, as measured on a CPU: e bytes an element and w = max(e, 4) in what norms
and softmax keep, width D, H query and G key heads of K features, feed-forward F. One block's own:

    i = BS (w (4 D + 2 + H) + e (2 D + 2 H K + 2 G K + 4 F)), with dropout 2 BSD more, with documents e BS^2 more

Its input x, e BSD, is among them; in 16 bits a wide copy of it is instead, and then "i - x" below is i.

| mode            | after forward                          | while backward is in a block                          |
|-----------------|----------------------------------------|-------------------------------------------------------|
| none            | L i                                    | the same                                              |
| full            | L x                                    | i - x more                                            |
| blocks, every k | r x + (L - r) i, where r = ceil(L / k) | i - x more, in one that is recomputed                 |
| attention       | L (i - w BSH - e BS^2 [documents])     | w BSH + e BS^2 [documents] + e BSHK more (the output) |

`apply` changes what `block.forward` is, not how a block is called. So the hooks on a block, by which stage 3 gathers its
weights before and frees them after, stay outside: a re-run triggers none of them and finds the weights that backward needs.
That also makes torch's early stop right, which leaves the re-run as soon as the last kept tensor is there: without dropout the
product with ffn.down, a fifth of a block's work, is not repeated. It leaves by an exception; a hook after a module inside a
block may not run in a re-run, and must not be needed there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from minidist.core.device import is_gpu
from minidist.parallel.config import Recompute


def apply(model: nn.Module, settings: Recompute) -> None:
    """Make the blocks that `model.blocks` holds recompute and offload as the settings say. Once, and after every parallelism
    that replaces a block's attention. Values and gradients stay the same, bit for bit.
    """
    for k, block in enumerate(getattr(model, "blocks", ())):
        what = settings.select if settings.mode == "selective" else settings.mode
        if what == "full" or (what == "blocks" and k % settings.every == 0):
            block.forward = partial(repeated, block.forward)
        elif what == "attention":
            block.attention.attend = partial(repeated, block.attention.attend)
        if settings.offload:
            block.forward = partial(offloaded, block, block.forward)


def repeated(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """forward(...), of which backward keeps the tensors among `args` alone, and runs it again when it needs the rest.

    The engine's dropout is a hash of what it drops, so a re-run draws the same mask by itself (C15). torch's generator is put
    back for the re-run all the same, and then forward to where it was: a foreign module may draw from it.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


# The re-run


class _Here(threading.local):
    """Per thread: on a GPU, autograd runs backward, and so the re-run, in a thread of its own."""

    depth = 0


_here = _Here()


class _Rerun:
    """The time of a re-run. Entered again in every backward over a graph that is kept."""

    def __enter__(self) -> None:
        _here.depth += 1

    def __exit__(self, *error: object) -> None:
        _here.depth -= 1


def _contexts() -> tuple[nullcontext, _Rerun]:
    return nullcontext(), _Rerun()


def rerunning() -> bool:
    """Whether the forward that calls this is being repeated in backward: then counts and statistics were taken already."""
    return _here.depth > 0


# Offload


def offloaded(block: nn.Module, forward: Callable[..., Any], x: Tensor, *shared: Any, **named: Any) -> Any:
    """forward(x, ...), whose activations wait for backward in host memory. What all blocks share is not moved: weights, and
    the arguments after the hidden state x, such as rotary angles.

    With a recomputed forward, what it keeps is its input, so that is what moves. Memory moves once however many operations
    keep it, and is released when forward ends, so one block's activations at a time are on the device.
    """
    others = tree_leaves((shared, named, list(block.parameters()), list(block.buffers())))
    stays = {_memory(other) for other in others if isinstance(other, Tensor)}
    # Memory -> its copy, and a tensor that holds the memory: while it does, no other tensor can be given the same address.
    moved: dict[tuple[int, int, torch.dtype], tuple[Parked, Tensor]] = {}

    def pack(kept: Tensor) -> Any:
        if _memory(kept) in stays:
            return kept
        key = (_memory(kept), kept._version, kept.dtype)  # a tensor written to since its copy is moved again
        if key not in moved:
            moved[key] = (Parked(kept), kept)
        return moved[key][0], kept.size(), kept.stride(), kept.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parked, *view = packed
        return parked.fetch().as_strided(*view)

    try:
        with saved_tensors_hooks(pack, unpack):
            return forward(x, *shared, **named)
    finally:
        moved.clear()


class Parked:
    """The memory behind a tensor, copied to the host; on its device again from its first use in backward to its last.

    On a GPU the host memory is pinned and no copy makes the host wait: copies take their turn in the stream of the computation.
    """

    def __init__(self, x: Tensor):
        elements = x.untyped_storage().nbytes() // x.element_size()
        self.device, self._back = x.device, None
        self.host = torch.empty(elements, dtype=x.dtype, pin_memory=is_gpu(x))
        """(elements of the whole storage,), on the CPU"""
        self.host.copy_(x.detach().as_strided((elements,), (1,), 0), non_blocking=True)

    def fetch(self) -> Tensor:
        """(elements,) on the device. Kept for the next use: autograd lets go of this object after the last one."""
        if self._back is None:
            self._back = self.host.to(self.device, non_blocking=True)
        return self._back


def _memory(x: Tensor) -> int:
    """A name for the memory of x, the same for all views of it."""
    return x.untyped_storage()._cdata
