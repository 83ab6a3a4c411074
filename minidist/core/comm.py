"""Everything that crosses a rank boundary: each collective and transfer once, blocking or async, leaving its line on the tape.

All reductions are sums (or max and min): no average exists here, so no scale can hide in one. `x` may be strided, and may lie
on a GPU while the group speaks gloo: it then goes through a contiguous copy on the right device. Arguments named `src`, `dst`
and `peer` are places in the group. `tag` says why (core.tape.TAGS); with `async_op=True` a `Work` comes back. Autograd does not
see these; differentiable twins are in core.comm_grad.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.core import device as devices
from minidist.core.check import compare, entry
from minidist.core.mesh import Group
from minidist.core.tape import TAGS, Bytes, Line, booked
from minidist.core.work import PolledHandle, StreamHandle, ThreadedHandle, Work, caller

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these two and warns under the old names
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group, op: str = "sum", *, tag: str = "act", async_op: bool = False) -> Any:
    """Replace `x` (any shape) on every rank by the sum, max or min over the group. Returns x."""
    if op not in REDUCTIONS:
        raise ValueError(f"op = {op!r}: use sum, max or min. For a mean, sum and divide once, by the true count")
    wire = _to_wire(x, group)

    def start():
        return dist.all_reduce(wire, REDUCTIONS[op], group=group.handle, async_op=True)

    return _run("all_reduce", x, group, _bytes(x), start, lambda: _from_wire(wire, x), tag, async_op, detail=op)


def all_gather(
    x: Tensor, group: Group, out: Tensor | None = None, dim: int = 0, *, tag: str = "act", async_op: bool = False
) -> Any:
    """Concatenate every rank's `x` (the same shape everywhere) along `dim`. Returns the whole, in `out` if given."""
    n, first = group.size, _dim_first(x, dim, "all_gather")
    direct = dim == 0 and out is not None and _fits(out, group)  # else pieces meet in a buffer, gathered dim first
    whole = out if direct else _to_wire(first.new_empty(n * first.shape[0], *first.shape[1:]), group)
    if out is not None:
        _expect_shape(out, (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]), "all_gather")
    piece = _to_wire(first, group)

    def start():
        return _gather_flat(whole.view(-1), piece.view(-1), group=group.handle, async_op=True)

    def result():
        if n == 1:
            whole.copy_(piece)
        return out if direct else _home(whole, x, dim, out)

    return _run("all_gather", x, group, n * _bytes(x), start, result, tag, async_op)


def reduce_scatter(
    x: Tensor, group: Group, out: Tensor | None = None, dim: int = 0, *, tag: str = "act", async_op: bool = False
) -> Any:
    """Sum `x` over the group and keep this rank's n-th part along `dim`. Returns that part, in `out` if given."""
    n, first = group.size, _dim_first(x, dim, "reduce_scatter")
    if x.shape[dim] % n:
        raise ValueError(
            f"reduce_scatter of {list(x.shape)} over {n} ranks: dim {dim} does not divide; pad it to a multiple of {n}"
        )
    whole = _to_wire(first, group)
    direct = dim == 0 and out is not None and _fits(out, group)
    part = out if direct else whole.new_empty(whole.shape[0] // n, *whole.shape[1:])
    if out is not None:
        _expect_shape(out, (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]), "reduce_scatter")

    def start():
        return _scatter_flat(part.view(-1), whole.view(-1), group=group.handle, async_op=True)

    def result():
        if n == 1:
            part.copy_(whole)
        return out if direct else _home(part, x, dim, out)

    return _run("reduce_scatter", x, group, _bytes(x), start, result, tag, async_op)


def all_to_all(
    x: Tensor,
    group: Group,
    send: Sequence[int] | None = None,
    recv: Sequence[int] | None = None,
    *,
    tag: str = "expert",
    async_op: bool = False,
) -> Any:
    """Send `send[i]` rows of `x` (rows, ...) to place i, receive `recv[i]` from it (None: equal shares). Returns what came."""
    n = group.size
    if (send is None or recv is None) and x.shape[0] % n:
        raise ValueError(f"all_to_all of {x.shape[0]} rows over {n} ranks: they do not divide; pass send= and recv=")
    send, recv = list(send or [x.shape[0] // n] * n), list(recv or [x.shape[0] // n] * n)
    if len(send) != n or len(recv) != n or sum(send) != x.shape[0]:
        raise ValueError(
            f"all_to_all of {x.shape[0]} rows over {n} ranks: send={send}, recv={recv} need {n} items, send their sum"
        )
    wire = _to_wire(x, group)
    got = wire.new_empty(sum(recv), *x.shape[1:])

    def start():
        return dist.all_to_all_single(got, wire, recv, send, group=group.handle, async_op=True)

    def result():
        return got.to(x.device) if n > 1 else x.clone()

    elsewhere = (x.shape[0] - send[group.rank]) * prod(x.shape[1:]) * x.element_size()
    return _run(
        "all_to_all", x, group, _bytes(x), start, result, tag, async_op, sent=elsewhere, detail={"send": send, "recv": recv}
    )


def broadcast(x: Tensor, group: Group, src: int = 0, *, tag: str = "weight", async_op: bool = False) -> Any:
    """Replace `x` on every rank by that of place `src`. Returns x."""
    wire, root = _to_wire(x, group), _member(group, src, "src")

    def start():
        return dist.broadcast(wire, group=group.handle, group_src=src, async_op=True)

    return _run("broadcast", x, group, _bytes(x), start, lambda: _from_wire(wire, x), tag, async_op, peer=root)


def gather(x: Tensor, group: Group, dst: int = 0, *, tag: str = "act", async_op: bool = False) -> Any:
    """Every rank's `x` (the same shape everywhere) as a list on place `dst`; None on the others."""
    wire, root = _to_wire(x, group), _member(group, dst, "dst")
    parts = [torch.empty_like(wire) for _ in group.ranks] if group.rank == dst else None

    def start():
        return dist.gather(wire, parts, group=group.handle, group_dst=dst, async_op=True)

    def result():
        return [x.clone()] if group.size == 1 else parts and [part.to(x.device) for part in parts]

    return _run("gather", x, group, group.size * _bytes(x), start, result, tag, async_op, peer=root)


def send(x: Tensor, group: Group, dst: int, *, tag: str = "act", async_op: bool = False) -> Any:
    """Send `x` to place `dst`, whose matching `recv` has its shape and dtype. Complete when `x` may be reused; returns x."""
    work = exchange([("send", x, dst)], group, tag=tag, async_op=True)[0]
    return work if async_op else work.wait()


def recv(x: Tensor, group: Group, src: int, *, tag: str = "act", async_op: bool = False) -> Any:
    """Receive into `x` what place `src` sent. Returns x."""
    work = exchange([("recv", x, src)], group, tag=tag, async_op=True)[0]
    return work if async_op else work.wait()


def exchange(
    transfers: Sequence[tuple[str, Tensor, int]], group: Group, *, tag: str = "act", async_op: bool = False
) -> list[Any]:
    """Launch several transfers at once: ("send" or "recv", tensor, place of the peer). Returns their results in order.

    Launching all before waiting for any is what keeps a ring of sends from deadlocking. All are checked before any is launched.
    """
    buffers, starts = [], []
    for kind, x, peer in transfers:
        _member(group, peer, "peer")
        if group.ranks[peer] == group.wire.rank:
            raise ValueError(f"{kind} to myself (place {peer} of {group.name}): copy the tensor instead")
        buffers.append(_to_wire(x, group))
        starts.append(
            dist.P2POp(dist.isend if kind == "send" else dist.irecv, buffers[-1], group=group.handle, group_peer=peer)
        )
    noted = [_note(kind, x, group, _bytes(x), tag, peer=group.ranks[peer]) for kind, x, peer in transfers]
    launched = _Batch(starts)
    works = []
    for i, ((kind, x, _), wire) in enumerate(zip(transfers, buffers, strict=True)):

        def result(wire=wire, x=x, kind=kind):
            return x if kind == "send" else _from_wire(wire, x)

        works.append(_launch(*noted[i], group, lambda i=i: launched[i], result, True))
    return works if async_op else [work.wait() for work in works]


def barrier(group: Group, *, tag: str = "control") -> None:
    """Return once every rank of the group has come."""
    nothing = torch.empty(0)
    _run("barrier", nothing, group, 0, lambda: dist.barrier(group=group.handle, async_op=True), lambda: None, tag, False)


class _Batch:
    """Transfers launched together, when the first of them is asked for."""

    def __init__(self, transfers: list[dist.P2POp]):
        self._transfers, self._works = transfers, None

    def __getitem__(self, i: int) -> dist.Work | None:
        if self._works is None:
            self._works = dist.batch_isend_irecv(self._transfers)
        return self._works[i] if i < len(self._works) else self._works[0]  # NCCL answers with one for all


def _run(
    op: str,
    x: Tensor,
    group: Group,
    payload: int,
    start: Callable[[], dist.Work],
    result: Callable[[], Any],
    tag: str,
    async_op: bool,
    *,
    sent: Bytes | None = None,
    peer: int | None = None,
    detail: object = None,
) -> Any:
    """The one path of every operation: line on the tape, entry on the board, check, launch, wait."""
    noted = _note(op, x, group, payload, tag, sent=sent, peer=peer, detail=detail)
    return _launch(*noted, group, start, result, async_op)


def _note(
    op: str,
    x: Tensor,
    group: Group,
    payload: int,
    tag: str,
    *,
    sent: Bytes | None = None,
    peer: int | None = None,
    detail: object = None,
) -> tuple[Line, int]:
    """Before anything moves: refuse what cannot be, leave the line and the entry, compare. Returns line and entry's number."""
    if tag not in TAGS:
        raise ValueError(f"tag = {tag!r}: use one of {', '.join(TAGS)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op} of a tensor that requires grad would silently cut it from the graph: use its twin in core.comm_grad, "
            f"or pass x.detach() (for a parameter's value)"
        )
    wire = group.wire
    counter = f"{wire.rank}->{peer}" if op == "send" else f"{peer}->{wire.rank}" if op == "recv" else group.name
    group.calls[counter] = seq = group.calls.get(counter, 0) + 1
    if sent is None:
        sent = booked(op, payload, group.size, at_root=peer == wire.rank)
    dtype = str(x.dtype).removeprefix("torch.")
    line = Line(
        op, group.name, group.ranks, payload, sent, dtype, tuple(x.shape), tag, seq, time.monotonic(), None, caller(), peer
    )
    wire.tape.lines.append(line)
    if group.size == 1 or not wire.board:
        return line, 0
    wire.board.enter(wire.rank, entry(line, group, detail))
    if wire.check:
        compare(line, group)
    return line, wire.board.written(wire.rank)


def _launch(
    line: Line, number: int, group: Group, start: Callable[[], dist.Work], result: Callable[[], Any], async_op: bool
) -> Any:
    """Start what has been noted; its result, or the Work to wait for."""

    def begin(on_done: Callable[[], None]):
        backend = dist.get_backend(group.handle)
        if backend != "gloo":
            return StreamHandle(start(), on_done)
        if line.op in ("send", "recv", "reduce_scatter"):
            return ThreadedHandle(start(), group.wire.timeout_s, on_done)
        return PolledHandle(start(), on_done)

    work = Work(line, number, group, begin if group.size > 1 else None, result)
    return work if async_op else work.wait()


def _fits(x: Tensor, group: Group) -> bool:
    """Whether the backend can take `x` as it is. Not on a delay line: what is still on its way must not be there already."""
    return x.is_contiguous() and not _staged(x, group) and not group.wire.delay


def _staged(x: Tensor, group: Group) -> bool:
    """Whether a GPU's tensor has to go through host memory, because the group speaks gloo."""
    return devices.is_gpu(x) and group.handle is not None and dist.get_backend(group.handle) == "gloo"


def _to_wire(x: Tensor, group: Group) -> Tensor:
    """`x` as the backend can take it: contiguous (gloo reads storage, not views), on its device; x's own memory if it fits."""
    x = x.detach()
    if group.wire.delay:
        x = x.clone()
    return (x.cpu() if _staged(x, group) else x).contiguous()


def _from_wire(wire: Tensor, x: Tensor) -> Tensor:
    """Bring the backend's result home into `x`, where `_to_wire` had to copy."""
    shared = wire.untyped_storage()._cdata == x.untyped_storage()._cdata
    return x if shared else x.copy_(wire)


def _home(wire: Tensor, x: Tensor, dim: int, out: Tensor | None) -> Tensor:
    """A result laid out dim first, back on x's device, its dims in order, in `out` if given."""
    value = wire.to(x.device).movedim(0, dim)
    return value if out is None else out.copy_(value)


def _dim_first(x: Tensor, dim: int, op: str) -> Tensor:
    if not 0 <= dim < x.dim():
        raise ValueError(
            f"{op} along dim {dim} of a tensor of shape {list(x.shape)}: give dim 0 to {x.dim() - 1} (a scalar needs view(1))"
        )
    return x.movedim(dim, 0)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _member(group: Group, place: int, what: str) -> int:
    if not 0 <= place < group.size:
        raise ValueError(f"{what} = {place}: {group.name} has places 0 to {group.size - 1}")
    return group.ranks[place]


def _expect_shape(out: Tensor, shape: Sequence[int], op: str) -> None:
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{op}: out has shape {list(out.shape)}, the result has {list(shape)}")
