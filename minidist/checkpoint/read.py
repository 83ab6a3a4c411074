"""Reading a checkpoint: slices and whole tensors out of pieces written at any layout, and putting them into a model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minidist.checkpoint.manifest import Manifest, Piece, digest, read_manifest
from minidist.core import slices
from minidist.core.slices import Slice


class Reader:
    """An open checkpoint, from which slices of tensors are read one at a time, whatever the layout that wrote it.

    Use it in a `with`. Only the pieces that a slice overlaps are read, so a rank that asks for its own slices reads what it
    needs. What is read is checked against its checksum: ValueError names the file that is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.manifest = read_manifest(Path(folder))
        short = self.manifest.short_files()
        if short:
            raise ValueError(f"{self.manifest.folder}: {', '.join(short)} missing or cut short; choose another checkpoint")
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
            raise ValueError(f"{folder}: {record.name} {what}; choose another checkpoint")
        if not entry.pieces:
            raise ValueError(f"{folder}: {record.name} has no stored piece; choose another checkpoint")
        local = torch.zeros(record.numel, dtype=getattr(torch, entry.dtype))
        seen = np.zeros(record.numel, np.uint8)
        for piece in entry.pieces:
            runs = slices.shared(record, piece.slice).tolist()
            stored = self._stored(piece, entry.dtype) if runs else None
            for to, at, length in runs:
                local[to : to + length] = stored[at : at + length]
                seen[to : to + length] += 1
        wanted = int(record.run_table()[:, 2].sum())
        if (seen > 1).any() or (seen == 1).sum() != wanted:
            raise ValueError(
                f"{folder}: of {record.name} {list(record.shape)}, {wanted - int((seen > 0).sum())} elements are missing and "
                f"{int((seen > 1).sum())} are stored twice; choose another checkpoint"
            )
        return local

    def _stored(self, piece: Piece, dtype: str) -> Tensor:
        """One stored piece, flat, checked."""
        path = self.manifest.folder / piece.file
        if piece.file not in self._files:
            self._files[piece.file] = _open(path, self._stack)
        try:
            tensor = self._files[piece.file].get_tensor(piece.key)
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"{path}: damaged, {piece.key} cannot be read ({error}); choose another checkpoint") from None
        if digest(tensor) != piece.sha256 or str(tensor.dtype) != f"torch.{dtype}":
            raise ValueError(f"{path}: damaged, {piece.key} is not what was written; choose another checkpoint")
        if tensor.numel() != piece.slice.numel:
            raise ValueError(f"{path}: damaged, {piece.key} has {tensor.numel()} elements, not {piece.slice.numel}")
        return tensor.flatten()


def load(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and every whole tensor, on the CPU in the dtype it was stored in; see `Reader`."""
    with Reader(folder) as reader:
        shapes = {name: entry.shape for name, entry in reader.manifest.tensors.items()}
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


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged ({error}); choose another checkpoint") from None
