"""Tensor and sequence parallelism: a plain model's large matrices cut over ranks, and its norms over the sequence.

Tensor parallel (Shoeybi et al. 2019, "Megatron-LM", section 3): matrices come in pairs. The first of a pair is cut by columns
(its outputs), the second by rows (its inputs), so that what lies between them, heads or hidden features, is a rank's own, and
one all-reduce of the second's partial sums makes the result whole. Sequence parallel (Korthikanti et al. 2022, "Reducing
Activation Recomputation", section 4.2.2): that all-reduce falls into a reduce-scatter after the pair and an all-gather before
the next; between them norms, dropout and the residual stream work on a shard of the sequence.

Bytes that a rank sends for one block, forward and backward, of hidden states of X bytes over n ranks, in units of (n-1)/n X:
8 for tensor parallel (4 all-reduces); 8 with sequence parallel when the gathered input is kept for the weight gradient; 10 when
it is gathered again in backward instead, which keeps n times less of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.core import comm, comm_grad
from minidist.core.mesh import Group
from minidist.core.slices import COPY, OWN, PAD, Box, Slice, extract
from minidist.model.transformer import Transformer
from minidist.parallel.replicas import Partial
from minidist.parallel.split import Later, product
from minidist.parallel.vocabulary import all_logits, embed, loss_sum

COLUMN, ROW = "column", "row"
CUTS = {
    "attention.q": COLUMN,
    "attention.k": COLUMN,
    "attention.v": COLUMN,
    "attention.o": ROW,
    "ffn.gate": COLUMN,
    "ffn.up": COLUMN,
    "ffn.down": ROW,
    "ffn.shared.gate": COLUMN,
    "ffn.shared.up": COLUMN,
    "ffn.shared.down": ROW,
}
"""what is done to the linear layers of a block; embedding and head are cut by vocabulary, everything else is replicated"""


def apply(model: Transformer, group: Group, *, sp: bool = False, regather: bool = True, later: Later | None = None) -> None:
    """Cut `model` over `group`. With `sp`, norms and the residual stream work on this rank's shard of the sequence.

    `regather`: under sp, gather the input of column-cut layers again in backward instead of keeping it. `later`: where weight
    gradients go that a pipeline puts off.
    Parameters get their slices; on the meta device nothing is allocated. Every rank then calls the model with the same
    tokens, and its `loss_sum` takes the logits of this rank's part of the vocabulary.
    """
    later = later or Later()
    for name, module in list(model.named_modules()):
        how = CUTS.get(name.split(".", 2)[-1]) if name.startswith("blocks.") else None
        if how == COLUMN:
            copies = model.cfg.kv_heads if name.endswith(("attention.k", "attention.v")) else 0
            cut_columns(module, name, group, heads=copies)
        elif how == ROW:
            cut(module, "weight", name, 1, group)
            module.forward = partial(row, module, group, sp, later)
        if hasattr(module, "project"):
            module.project = partial(columns, group, sp, regather, later)
    for name, module in (("embedding", model.embedding), ("head", None if model.cfg.tied else model.head)):
        if module is not None:  # a pipeline's stage may lack it
            cut(module, "weight", name, 0, group)
    model.tie()
    for name, module in model.named_modules():
        replicate(module, name, summed=sp)
    if model.embedding is not None:
        model.embedding.forward = partial(embed, model.embedding, group, sp)
    if model.head is not None:
        model.head.forward = lambda x: columns(group, sp, regather, later, x, model.head)[0]
    model.loss_sum = partial(loss_sum, group, model.cfg.vocab)
    model.all_logits = partial(all_logits, group, model.cfg.vocab)


# Parameters


def cut(module: nn.Module, key: str, name: str, dim: int, group: Group) -> None:
    """Keep this rank's part along `dim` of parameter `key` of the module called `name`. What does not divide is padded."""
    old = module._parameters[key]
    size = -(-old.shape[dim] // group.size)  # rounded up
    start = min(group.rank * size, old.shape[dim])
    stop = min(start + size, old.shape[dim])
    boxes = [_box(old, dim, start, stop, OWN)] if stop > start else []
    if stop - start < size:
        boxes.append(_box(old, dim, old.shape[dim], old.shape[dim] + size - (stop - start), PAD))
    _put(module, key, Slice(f"{name}.{key}", tuple(old.shape), tuple(boxes)))


def cut_columns(linear: nn.Linear, name: str, group: Group, heads: int = 0) -> None:
    """Keep this rank's outputs of a linear layer. With fewer (kv) `heads` than ranks, one head is held by several of them.

    The gradients of such copies are parts of one sum; the first rank of them counts and stores the head.
    """
    for key, old in list(linear.named_parameters()):
        if not heads or heads % group.size == 0:
            cut(linear, key, name, 0, group)
            continue
        each = group.size // heads  # ranks to a head: Layout.expect_model lets nothing else through
        head, rows = group.rank // each, old.shape[0] // heads
        kind = OWN if group.rank % each == 0 else COPY
        _put(linear, key, Slice(f"{name}.{key}", tuple(old.shape), (_box(old, 0, head * rows, (head + 1) * rows, kind),)))
        linear._parameters[key].partial = Partial(head, heads)


def replicate(module: nn.Module, name: str, summed: bool) -> None:
    """Note that all ranks hold what is not cut of this module. `summed`: each sees some tokens only, so gradients are parts."""
    for key, old in module.named_parameters(recurse=False):
        if not hasattr(old, "slice"):
            old.slice = Slice.whole(f"{name}.{key}", old.shape, replicated=("tp",))
            if summed:
                old.partial = Partial()


def _box(old: Tensor, dim: int, start: int, stop: int, kind: str) -> Box:
    first, last = [0] * old.dim(), list(old.shape)
    first[dim], last[dim] = start, stop
    return Box(tuple(first), tuple(last), kind)


def _put(module: nn.Module, key: str, record: Slice) -> None:
    """Replace a parameter by the part of it that `record` describes."""
    old = module._parameters[key]
    dim = next((d for d in range(old.dim()) if any(box.shape[d] != old.shape[d] for box in record.boxes)), 0)
    shape = list(old.shape)
    shape[dim] = sum(box.shape[dim] for box in record.boxes)
    value = old.new_empty(shape) if old.is_meta else extract(record, old.detach()).view(shape)
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    new.slice = record
    setattr(module, key, new)


# Layers


def columns(group: Group, sp: bool, regather: bool, later: Later, x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Column-cut layers on one input, with one collective each way for all of them.

    x is the whole (B,S,D), or under `sp` this rank's shard (B,S/n,D); each result (B,S,features of this rank).
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    return _Columns.apply(x, group, sp, regather, later, len(layers), *weights, *biases)


def row(layer: nn.Linear, group: Group, sp: bool, later: Later, x: Tensor) -> Tensor:
    """A row-cut layer: partial sums made whole (B,S,D), or under `sp` this rank's shard of them. The bias counts once (C38)."""
    part = product(x, layer.weight, later)
    whole = comm_grad.reduce_scatter(part, group, dim=1) if sp else comm_grad.fan_in(part, group)
    return whole if layer.bias is None else whole + layer.bias


class _Columns(torch.autograd.Function):
    """x W' + b for several weights. Backward sums the input's gradient over the ranks while it computes the weights'."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sp: bool, regather: bool, later: Later, count: int, *params: Tensor | None
    ) -> Any:
        weights, biases = params[:count], params[count:]
        whole = comm.all_gather(x.detach(), group, dim=1).contiguous() if sp else x
        ctx.group, ctx.sp, ctx.again, ctx.later, ctx.weights = group, sp, sp and regather, later, weights
        ctx.save_for_backward(x if ctx.again else whole, *weights)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        gathering = comm.all_gather(x.detach(), ctx.group, dim=1, async_op=True) if ctx.again else None
        part = grads[0] @ weights[0]  # of the input's gradient: what comes through this rank's features
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            part += grad @ weight
        whole = gathering.wait() if gathering else x
        if ctx.sp:
            summing = comm.reduce_scatter(part, ctx.group, dim=1, async_op=True)
        else:
            summing = comm.all_reduce(part, ctx.group, async_op=True)
        of_weights = ctx.later.grads(ctx.weights, grads, whole)
        needed = ctx.needs_input_grad[6 + len(weights) :]
        of_biases = [grad.flatten(0, -2).sum(0) if need else None for grad, need in zip(grads, needed, strict=True)]
        return summing.wait(), None, None, None, None, None, *of_weights, *of_biases
