"""Reading a checkpoint: slices and whole tensors out of pieces written at any layout, and putting them into a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minidist.checkpoint import tensorfile
from minidist.checkpoint.choose import others
from minidist.checkpoint.manifest import Manifest, Piece, read_manifest
from minidist.core import slices
from minidist.core.slices import Slice


class Reader:
    """An open checkpoint, from which slices of tensors are read one at a time, whatever the layout that wrote it.

    Use it in a `with`. Only the pieces that a slice overlaps are read, so a rank that asks for its own slices reads what it
    needs, and its files are mapped into memory. What is read is checked against its hashes, block by block: ValueError names
    the file that is missing or damaged, and a whole checkpoint beside it.
    """

    def __init__(self, folder: Path):
        self.manifest = read_manifest(Path(folder))
        short = self.manifest.short_files()
        if short:
            folder = self.manifest.folder
            raise ValueError(f"{folder}: {', '.join(short)} missing or cut short; {others(folder)}")
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, record: Slice) -> Tensor:
        """The local tensor (record.numel,) that `record` describes, on the CPU in its stored dtype; padding is zero."""
        entry, folder = self.manifest.tensors.get(record.name), self.manifest.folder
        if entry is None or entry.shape != record.shape:
            what = f"is {list(entry.shape)}, not {list(record.shape)}" if entry else "is missing"
            raise ValueError(f"{folder}: {record.name} {what}; {others(folder)}")
        if not entry.pieces:
            raise ValueError(f"{folder}: {record.name} has no stored piece; {others(folder)}")
        local = torch.zeros(record.numel, dtype=getattr(torch, entry.dtype))
        seen = torch.zeros(record.numel, dtype=torch.uint8)
        for piece in entry.pieces:
            runs = slices.shared(record, piece.slice)
            if len(runs):
                stored = self._stored(piece, entry.dtype, runs)
                slices.move(runs, stored, local)
                slices.count(runs, seen)
        wanted = int(record.run_table()[:, 2].sum())
        if (seen > 1).any() or (seen == 1).sum() != wanted:
            raise ValueError(
                f"{folder}: of {record.name} {list(record.shape)}, {wanted - int((seen > 0).sum())} elements are missing and "
                f"{int((seen > 1).sum())} are stored twice; {others(folder)}"
            )
        return local

    def verify(self) -> Iterator[tuple[str, str | None]]:
        """Read everything once and compare it with its hashes: (file and key, None or what is wrong), a stored piece each."""
        for entry in self.manifest.tensors.values():
            for piece in entry.pieces:
                try:
                    everything = np.array([[0, 0, piece.slice.numel]])
                    self._stored(piece, entry.dtype, everything)
                except ValueError as error:
                    yield f"{piece.file}: {piece.key}", str(error)
                else:
                    yield f"{piece.file}: {piece.key}", None

    def _stored(self, piece: Piece, dtype: str, runs: np.ndarray) -> Tensor:
        """One stored piece, flat, mapped into memory; the blocks that `runs` (shared with the piece) touch are checked."""
        path = self.manifest.folder / piece.file
        if piece.file not in self._files:
            self._files[piece.file] = _open(path, self._stack)
        try:
            tensor = self._files[piece.file].get_tensor(piece.key).flatten()
        except (KeyError, SafetensorError) as error:
            raise self._damaged(path, f"{piece.key} cannot be read ({error})") from None
        if str(tensor.dtype) != f"torch.{dtype}":
            raise self._damaged(path, f"{piece.key} is of {tensor.dtype}, not {dtype}")
        if tensor.numel() != piece.slice.numel:
            raise self._damaged(path, f"{piece.key} has {tensor.numel()} elements, not {piece.slice.numel}")
        size = self.manifest.block or max(tensor.numel() * tensor.element_size(), 1)
        data, length = tensorfile.raw(tensor), size // tensor.element_size()
        for block in _touched(runs, length):
            part = data[block * size : (block + 1) * size]
            if block >= len(piece.sha256) or hashlib.sha256(part).hexdigest() != piece.sha256[block]:
                raise self._damaged(path, f"{piece.key} is not what was written")
        return tensor

    def _damaged(self, path: Path, what: str) -> ValueError:
        return ValueError(f"{path}: damaged, {what}; {others(self.manifest.folder)}")


def load(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and every whole tensor of the model, on the CPU in the dtype it was stored in; see `Reader`."""
    with Reader(folder) as reader:
        shapes = {name: entry.shape for name, entry in reader.manifest.weights.items()}
        return reader.manifest, {name: reader.read(Slice.whole(name, shape)).view(shape) for name, shape in shapes.items()}


def match(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str = "checkpoint") -> None:
    """Refuse tensors that do not fit, all misfits in one error: missing, unexpected and mis-shaped names together."""
    missing = sorted(wanted.keys() - found.keys())
    unexpected = sorted(found.keys() - wanted.keys())
    shaped = [
        f"{name} is {list(found[name].shape)}, not {list(wanted[name].shape)}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name].shape != wanted[name].shape
    ]
    faults = (("missing", missing), ("unexpected", unexpected), ("of another shape", shaped))
    if any(names for _, names in faults):
        text = "; ".join(f"{len(names)} {kind}: {', '.join(names)}" for kind, names in faults if names)
        raise ValueError(f"{what} does not fit the model: {text}")


def fill(model: nn.Module, tensors: dict[str, Tensor], *, partial: bool = False, what: str = "checkpoint") -> int:
    """Copy whole tensors into a plain model by name, cast to its dtype; the number of tensors copied.

    Anything that does not fit raises (see `match`) before a single weight changes. With `partial`, names that only one
    side has are left alone and counted in a printed line; a wrong shape is still refused.
    """
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # a tied weight once, under its first name
    if partial:
        common = found_in_both(tensors, wanted)
        print(
            f"{what}: {len(common)} tensors loaded, {len(wanted) - len(common)} of the model left as they were, "
            f"{len(tensors) - len(common)} of the checkpoint unused"
        )
        tensors, wanted = {n: tensors[n] for n in common}, {n: wanted[n] for n in common}
    match(tensors, wanted, what)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
    return len(wanted)


def found_in_both(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names in both, in the model's order."""
    return [name for name in wanted if name in tensors]


def _touched(runs: np.ndarray, length: int) -> list[int]:
    """The blocks of `length` elements of a piece in which runs (offset in another tensor, offset in the piece, length) lie."""
    first, last = runs[:, 1] // length, (runs[:, 1] + np.maximum(runs[:, 2], 1) - 1) // length
    return sorted({block for a, b in np.unique(np.stack([first, last], 1), axis=0).tolist() for block in range(a, b + 1)})


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged ({error}); {others(path.parent)}") from None
