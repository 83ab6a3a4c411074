"""The recorder of graded ranks: sits on torch's process groups, below everything in Python that starts an operation.

A raw `torch.distributed` call leaves its line on the tape like one of `core.comm`. And every operation, whoever launched it,
is written at once to the ledger, a pipe that the rank cannot read back or rewind; the judge compares it with the tape.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.core import comm
from minidist.core.mesh import Mesh
from minidist.core.tape import Bytes, Line, booked

# method of a process group: (operation, argument with the tensors, whether they are one rank's share of the whole)
METHODS = {
    "allreduce": ("all_reduce", 0, False),
    "allreduce_coalesced": ("all_reduce", 0, False),
    "reduce": ("reduce", 0, False),
    "broadcast": ("broadcast", 0, False),
    "allgather": ("all_gather", 1, True),
    "allgather_coalesced": ("all_gather", 1, True),
    "_allgather_base": ("all_gather", 1, True),
    "all_gather_single": ("all_gather", 1, True),
    "all_gather_single_coalesced": ("all_gather", 1, True),
    "allgather_into_tensor_coalesced": ("all_gather", 1, True),
    "reduce_scatter": ("reduce_scatter", 1, False),
    "_reduce_scatter_base": ("reduce_scatter", 1, False),
    "reduce_scatter_single": ("reduce_scatter", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, False),
    "alltoall": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all", 1, False),
    "all_to_all_single": ("all_to_all", 1, False),
    "gather": ("gather", 1, True),
    "scatter": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv": ("recv", 0, False),
    "recv_anysource": ("recv", 0, False),
    "barrier": ("barrier", 0, False),
    "monitored_barrier": ("barrier", 0, False),
}


def install(mesh: Mesh, ledger: str) -> None:
    """Record this process's operations from now on: raw ones on `mesh`'s tape, all of them in the pipe at `ledger`."""
    pipe = os.open(ledger, os.O_WRONLY)
    engine, write, dumps = comm._launch.__code__, os.write, json.dumps  # as they are before a submission can touch them
    names = {group.ranks: group.name for group in reversed(mesh._groups.values())}
    counts: Counter = Counter()

    def note(method: str, ranks: tuple[int, ...], args: tuple) -> None:
        line = measured(method, ranks, mesh.rank, args)
        raw = not _on_stack(engine)
        if raw:
            line.group = names.get(ranks, "raw")
            counts[ranks] += 1
            line.seq, line.where = counts[ranks], _where()
            mesh.tape.lines.append(line)
        record = {"rank": mesh.rank, "op": line.op, "payload": line.payload, "sent": line.sent}
        write(pipe, dumps({**record, "peer": line.peer, "ranks": ranks, "raw": raw}).encode() + b"\n")

    for kind, ranks_of in ((dist.ProcessGroup, _members), (torch._C._distributed_c10d.Backend, _members_of_backend)):
        for method in METHODS:
            if hasattr(kind, method):
                setattr(kind, method, _recording(method, getattr(kind, method), ranks_of, note))


def _recording(method: str, original: Callable, ranks_of: Callable, note: Callable) -> Callable:
    def call(group, *args, **kwargs):
        note(method, ranks_of(group), (*args, *kwargs.values()))
        return original(group, *args, **kwargs)

    return call


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _members_of_backend(backend: object) -> tuple[int, ...]:
    return tuple(range(backend.size()))  # it does not know its global ranks; only a way around the tape comes here


def measured(method: str, ranks: tuple[int, ...], me: int, args: tuple) -> Line:
    """The line of a call of a process group's method, in the terms of core.tape."""
    op, place, share = METHODS[method]
    tensors = [] if op == "barrier" else list(_tensors(args[place : place + 1]))
    mine = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    payload, peer = mine * (len(ranks) if share else 1), _peer(op, ranks, args)
    first = tensors[0] if tensors else torch.empty(0)
    dtype, shape = str(first.dtype).removeprefix("torch."), tuple(first.shape)
    sent = _sent(op, payload, ranks, me, peer, args)
    return Line(op, "", ranks, payload, sent, dtype, shape, "act", 0, time.monotonic(), None, "", peer)


def _sent(op: str, payload: int, ranks: tuple[int, ...], me: int, peer: int | None, args: tuple) -> Bytes:
    n, own = len(ranks), ranks.index(me)
    if op == "reduce":  # a reduce-scatter, then its pieces to the root
        return booked("reduce_scatter", payload, n) + (0 if peer == me else booked("gather", payload, n))
    if op == "scatter":
        return payload * (n - 1) // n if peer == me else 0
    if op == "all_to_all":
        pieces = list(_tensors(args[1:2]))
        if len(pieces) > 1:
            return payload - pieces[own].numel() * pieces[own].element_size()
        splits = args[3] if len(args) > 3 and args[3] else None
        if splits and sum(splits):
            return payload - payload * splits[own] // sum(splits)
    return booked(op, payload, n, at_root=peer == me)


def _peer(op: str, ranks: tuple[int, ...], args: tuple) -> int | None:
    """The other (global) rank of a transfer, or the root."""
    if op in ("send", "recv"):
        return ranks[args[1]] if len(args) > 2 else None
    roots = [item.rootRank for item in args if hasattr(item, "rootRank")]
    return ranks[roots[0]] if roots and op in ("broadcast", "gather", "scatter", "reduce") else None


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _where() -> str:
    """file:line of the nearest frame in a cell; torch's own, and those of its decorators, say nothing."""
    frame = sys._getframe(1)
    while frame.f_back and not frame.f_code.co_filename.startswith("<cell "):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _on_stack(code: object) -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
