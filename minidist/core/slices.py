"""Which part of which whole tensor a local tensor holds. Norms, counts, checkpoints and resharding all derive from it.

The record has three levels:
1. the whole, unpadded tensor: its name in the plain model and its shape;
2. one or more boxes of it: a tensor-parallel cut is one box, a fused matrix several, a replicated or padded part its own;
3. under ZeRO, a flat range [a, b) of those boxes, laid row-major one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

OWN, COPY, PAD = "own", "copy", "pad"


@dataclass(frozen=True)
class Box:
    """The elements `start <= index < stop` of a whole tensor, per dim.

    `kind`: "own" (counted here), "copy" (the same elements are counted on another rank: a replicated kv head), or "pad"
    (elements that exist only locally: an uneven vocabulary; only the box's extent means anything).
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    kind: str = OWN

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """The record of one local tensor. `flat` is the range [a, b) of the concatenated boxes that is held; None: all.

    `replicated` names the mesh axes over which other ranks hold exactly the same elements; `owner` is the one global rank
    among them that counts (in norms and parameter counts) and stores (in checkpoints) them.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    flat: tuple[int, int] | None = None
    replicated: tuple[str, ...] = ()
    owner: int = 0

    def __post_init__(self):
        for box in self.boxes:
            inside = box.kind == PAD or all(0 <= a <= b <= n for a, b, n in zip(box.start, box.stop, self.shape, strict=True))
            assert inside, f"{self.name}: box {box} leaves the whole {self.shape}"
        a, b = self.range
        assert 0 <= a <= b <= sum(box.numel for box in self.boxes), f"{self.name}: flat range [{a}, {b}) leaves its boxes"

    @classmethod
    def whole(cls, name: str, shape: Iterable[int], replicated: tuple[str, ...] = (), owner: int = 0) -> Slice:
        """The record of an uncut tensor."""
        shape = tuple(shape)
        return cls(name, shape, (Box((0,) * len(shape), shape),), None, replicated, owner)

    @property
    def range(self) -> tuple[int, int]:
        """The flat range that is held, given or implied."""
        return self.flat if self.flat is not None else (0, sum(box.numel for box in self.boxes))

    @property
    def numel(self) -> int:
        """Local elements, padding included."""
        a, b = self.range
        return b - a

    def cut(self, a: int, b: int) -> Slice:
        """The record of elements [a, b) of this local tensor, flattened (a ZeRO shard of it)."""
        first = self.range[0]
        return Slice(self.name, self.shape, self.boxes, (first + a, first + b), self.replicated, self.owner)

    def runs(self, kinds: tuple[str, ...] = (OWN, COPY)) -> list[tuple[int, int, int]]:
        """Contiguous pieces as (offset in the local tensor, offset in the flattened whole, length), in local order.

        Only boxes of these kinds; padding has no place in the whole and is never among them.
        """
        table = self.run_table(kinds)
        return [tuple(row) for row in table.tolist()]

    def run_table(self, kinds: tuple[str, ...] = (OWN, COPY)) -> np.ndarray:
        """`runs` as one int64 array (runs, 3); cheap also for a column slice with thousands of runs."""
        low, high = self.range
        tables, offset = [], 0
        for box in self.boxes:
            if box.kind in kinds and box.kind != PAD and box.numel:
                tables.append(_clip(_box_runs(box, self.shape, offset), low, high))
            offset += box.numel
        table = np.concatenate(tables) if tables else np.empty((0, 3), np.int64)
        table[:, 0] -= low
        return table

    def counted(self) -> int:
        """Elements of the whole that the owner counts: "own" boxes only."""
        return int(self.run_table((OWN,))[:, 2].sum())

    def to_json(self) -> dict:
        """A JSON-able form, read back by `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict) -> Slice:
        """The inverse of `to_json`, also after a trip through JSON text (tuples come back as lists)."""
        boxes = tuple(Box(tuple(b["start"]), tuple(b["stop"]), b["kind"]) for b in record["boxes"])
        flat = None if record["flat"] is None else tuple(record["flat"])
        return cls(record["name"], tuple(record["shape"]), boxes, flat, tuple(record["replicated"]), record["owner"])


def assemble(pieces: Iterable[tuple[Slice, Tensor]]) -> Tensor:
    """Put local pieces of one whole tensor back together (on the CPU, in the pieces' dtype).

    Raises ValueError where an element is missing or two pieces own the same one: a wrong whole is never returned.
    """
    pieces = list(pieces)
    first, sample = pieces[0]
    whole = torch.empty(math.prod(first.shape), dtype=sample.dtype)
    seen = np.zeros(whole.numel(), np.uint8)
    for record, local in pieces:
        if (record.name, record.shape) != (first.name, first.shape):
            raise ValueError(f"pieces of two tensors: {record.name} {record.shape} and {first.name} {first.shape}")
        local = local.detach().reshape(-1).cpu()
        for at, to, length in record.runs((OWN,)):
            whole[to : to + length] = local[at : at + length]
            seen[to : to + length] += 1
    if (seen != 1).any():
        raise ValueError(
            f"{first.name} {list(first.shape)}: {int((seen == 0).sum())} elements are missing and "
            f"{int((seen > 1).sum())} are owned twice"
        )
    return whole.reshape(first.shape)


def extract(record: Slice, whole: Tensor) -> Tensor:
    """The local tensor (1-D, padding zero) that `record` describes, cut out of the whole one."""
    assert tuple(whole.shape) == record.shape, f"{record.name}: {tuple(whole.shape)} is not {record.shape}"
    flat, local = whole.reshape(-1), whole.new_zeros(record.numel)
    for at, start, length in record.runs():
        local[at : at + length] = flat[start : start + length]
    return local


def shared(record: Slice, piece: Slice) -> np.ndarray:
    """What `piece` owns of the elements of `record`, two slices of one whole tensor, as int64 (runs, 3).

    Each run is (offset in the local tensor of `record`, offset in that of `piece`, length).
    """
    wanted, owned = record.run_table(), piece.run_table((OWN,))
    owned = owned[owned[:, 1].argsort()]  # they do not overlap, so their ends are sorted too
    first = np.searchsorted(owned[:, 1] + owned[:, 2], wanted[:, 1], side="right")
    counts = np.searchsorted(owned[:, 1], wanted[:, 1] + wanted[:, 2]) - first
    nth = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # 0, 1, ... within each wanted run
    a, b = np.repeat(wanted, counts, axis=0), owned[np.repeat(first, counts) + nth]
    start, stop = np.maximum(a[:, 1], b[:, 1]), np.minimum(a[:, 1] + a[:, 2], b[:, 1] + b[:, 2])
    return np.stack([a[:, 0] + start - a[:, 1], b[:, 0] + start - b[:, 1], stop - start], axis=1)


def move(runs: np.ndarray, source: Tensor, into: Tensor) -> None:
    """Copy `runs` (offset in `into`, offset in `source`, length) between flat tensors, as `shared` gives them."""
    for to, at, length, count, to_step, at_step in _regular(runs):
        rows = source.as_strided((count, length), (at_step, 1), source.storage_offset() + at)
        into.as_strided((count, length), (to_step, 1), into.storage_offset() + to).copy_(rows)


def count(runs: np.ndarray, into: Tensor) -> None:
    """Add one to the elements of the flat tensor `into` where `runs` lie."""
    for to, _, length, count, to_step, _ in _regular(runs):
        into.as_strided((count, length), (to_step, 1), into.storage_offset() + to).add_(1)


def _regular(runs: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Runs of one length at one distance together, as those of a column slice: (to, at, length, count, the two steps)."""
    steps = np.diff(runs, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(1)) + 1  # where a step differs from the one before
    first = 0
    while first < len(runs):
        last = first  # of the runs that go together
        if first < len(steps) and steps[first][2] == 0 and (steps[first][:2] > 0).all():
            later = changes[changes > first]
            last = int(later[0]) if len(later) else len(runs) - 1
        step = steps[first] if last > first else (0, 0)
        yield (*runs[first].tolist(), last - first + 1, int(step[0]), int(step[1]))
        first = last + 1


def by_name(pieces: Iterable[tuple[Slice, Tensor]]) -> Iterator[tuple[str, list[tuple[Slice, Tensor]]]]:
    """Group pieces by the whole tensor they belong to, in order of first appearance."""
    groups: dict[str, list[tuple[Slice, Tensor]]] = {}
    for record, local in pieces:
        groups.setdefault(record.name, []).append((record, local))
    yield from groups.items()


def _box_runs(box: Box, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """Runs of one box, its first element at local `offset`: (local, whole, length) per contiguous piece."""
    dims = len(shape)
    inner = dims  # dims from `inner` on are held whole, so they and the dim before them form one run
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides = [math.prod(shape[d + 1 :]) for d in range(dims)]
    length = math.prod(box.shape[inner:])
    starts = np.zeros(1, np.int64)
    for d in range(inner):
        starts = (starts[:, None] + np.arange(box.start[d], box.stop[d]) * strides[d]).reshape(-1)
    if dims:
        starts = starts + sum(box.start[d] * strides[d] for d in range(inner, dims))
    local = offset + np.arange(len(starts), dtype=np.int64) * length
    return np.stack([local, starts, np.full_like(local, length)], axis=1)


def _clip(table: np.ndarray, low: int, high: int) -> np.ndarray:
    """The parts of runs whose local offsets fall into [low, high)."""
    begin = np.maximum(table[:, 0], low)
    end = np.minimum(table[:, 0] + table[:, 2], high)
    keep = end > begin
    return np.stack([begin, table[:, 1] + begin - table[:, 0], end - begin], axis=1)[keep]
