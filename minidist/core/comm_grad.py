"""Autograd twins: each collective as a differentiable function whose backward is its conjugate collective.

The rule behind the table: the loss is the sum of what all ranks hold, so the backward of an operation is its transpose.

| function        | forward                  | backward                  | for instance                                   |
|-----------------|--------------------------|---------------------------|------------------------------------------------|
| `fan_out`       | identity                 | all-reduce                | a replicated input meets column-cut weights    |
| `fan_in`        | all-reduce               | identity                  | partial sums meet a replicated consumer        |
| `all_reduce`    | all-reduce               | all-reduce                | statistics that every rank uses differently    |
| `all_gather`    | all-gather               | reduce-scatter            | a sequence shard made whole                    |
| `reduce_scatter`| reduce-scatter           | all-gather                | partial sums back to sequence shards           |
| `split`         | keep my part             | all-gather                | a replicated tensor cut into shards            |
| `unsplit`       | all-gather               | keep my part              | shards made whole for a replicated consumer    |
| `all_to_all`    | all-to-all               | all-to-all, splits swapped| tokens to experts                              |
| `broadcast`     | broadcast from src       | sum to src                | one rank's value used by all                   |
| `send` / `recv` | send / receive           | receive / send            | hidden states between stages                   |

`fan_out`, `fan_in`, `split` and `unsplit` are for replicated consumers (every rank computes the same loss, counted once);
Shoeybi et al. 2019, "Megatron-LM", section 3, calls the first two f and g. The others are for ranks whose losses add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist.core import comm
from minidist.core.mesh import Group


class _Conjugate(torch.autograd.Function):
    """Run `forward(x)` now and `backward(grad)` later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.conjugate = backward
        return forward(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.conjugate(grad), None, None


def fan_out(x: Tensor, group: Group, *, tag: str = "act") -> Tensor:
    """x as it is; its gradient is summed over the group."""
    return _Conjugate.apply(x, _same, lambda g: comm.all_reduce(g.clone(), group, tag=tag))


def fan_in(x: Tensor, group: Group, *, tag: str = "act") -> Tensor:
    """x summed over the group; the gradient passes through."""
    return _Conjugate.apply(x, lambda x: comm.all_reduce(x.clone(), group, tag=tag), _same)


def all_reduce(x: Tensor, group: Group, *, tag: str = "act") -> Tensor:
    """x summed over the group; its gradient too."""
    return _Conjugate.apply(
        x, lambda x: comm.all_reduce(x.clone(), group, tag=tag), lambda g: comm.all_reduce(g.clone(), group, tag=tag)
    )


def all_gather(x: Tensor, group: Group, dim: int = 0, *, tag: str = "act") -> Tensor:
    """Every rank's x side by side along `dim`; each piece's gradient is summed over the group and returned to its rank."""
    return _Conjugate.apply(
        x, lambda x: comm.all_gather(x, group, dim=dim, tag=tag), lambda g: comm.reduce_scatter(g, group, dim=dim, tag=tag)
    )


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, *, tag: str = "act") -> Tensor:
    """This rank's part along `dim` of the sum over the group; the parts' gradients are gathered."""
    return _Conjugate.apply(
        x, lambda x: comm.reduce_scatter(x, group, dim=dim, tag=tag), lambda g: comm.all_gather(g, group, dim=dim, tag=tag)
    )


def split(x: Tensor, group: Group, dim: int = 0, *, tag: str = "act") -> Tensor:
    """This rank's n-th part of a replicated x along `dim`; the parts' gradients are gathered."""
    return _Conjugate.apply(x, lambda x: _my_part(x, group, dim), lambda g: comm.all_gather(g, group, dim=dim, tag=tag))


def unsplit(x: Tensor, group: Group, dim: int = 0, *, tag: str = "act") -> Tensor:
    """Every rank's x side by side along `dim`, for consumers that are replicated; my piece's gradient is my part of theirs."""
    return _Conjugate.apply(x, lambda x: comm.all_gather(x, group, dim=dim, tag=tag), lambda g: _my_part(g, group, dim))


def all_to_all(
    x: Tensor, group: Group, send: Sequence[int] | None = None, recv: Sequence[int] | None = None, *, tag: str = "expert"
) -> Tensor:
    """`send[i]` rows to place i, `recv[i]` rows from it; gradients travel back the same ways."""
    return _Conjugate.apply(
        x, lambda x: comm.all_to_all(x, group, send, recv, tag=tag), lambda g: comm.all_to_all(g, group, recv, send, tag=tag)
    )


def broadcast(x: Tensor, group: Group, src: int = 0, *, tag: str = "act") -> Tensor:
    """The x of place `src`; its gradient is the sum over the group there and zero elsewhere."""

    def to_source(grad: Tensor) -> Tensor:
        total = comm.all_reduce(grad.clone(), group, tag=tag)
        return total if group.rank == src else torch.zeros_like(total)

    return _Conjugate.apply(x, lambda x: comm.broadcast(x.clone(), group, src, tag=tag), to_source)


def send(x: Tensor, group: Group, dst: int, *, tag: str = "act") -> Tensor:
    """Send x; returns an empty tensor to call `backward()` on, which receives x's gradient from `dst`."""

    def forward(x: Tensor) -> Tensor:
        comm.send(x, group, dst, tag=tag)
        return x.new_zeros(())

    return _Conjugate.apply(x, forward, lambda _: comm.recv(torch.empty_like(x, requires_grad=False), group, dst, tag=tag))


def recv(like: Tensor, group: Group, src: int, *, tag: str = "act") -> Tensor:
    """Receive a tensor of `like`'s shape and dtype; its gradient is sent to `src`. `like` must require grad."""
    return _Conjugate.apply(
        like,
        lambda x: comm.recv(torch.empty_like(x), group, src, tag=tag),
        lambda g: torch.zeros_like(comm.send(g.contiguous(), group, src, tag=tag)),
    )


def _same(x: Tensor) -> Tensor:
    return x


def _my_part(x: Tensor, group: Group, dim: int) -> Tensor:
    if x.shape[dim] % group.size:
        raise ValueError(f"split of {list(x.shape)} over {group.size} ranks: dim {dim} does not divide; pad it first")
    return x.chunk(group.size, dim)[group.rank].contiguous()
