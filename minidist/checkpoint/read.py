"""Reading a checkpoint: whole tensors out of pieces written at any layout, and putting them into a model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minidist.checkpoint.manifest import Entry, Manifest, digest, read_manifest
from minidist.core import slices


def load(folder: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and every whole tensor, on the CPU in the dtype it was stored in.

    Every byte is checked against its checksum: ValueError names the file that is missing or damaged.
    """
    manifest = read_manifest(Path(folder))
    short = manifest.short_files()
    if short:
        raise ValueError(f"{manifest.folder}: {', '.join(short)} missing or cut short; choose another checkpoint")
    with ExitStack() as stack:
        files = {name: _open(manifest.folder / name, stack) for name in manifest.files}
        return manifest, {name: _whole(manifest, name, entry, files) for name, entry in manifest.tensors.items()}


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
    wanted = dict(model.named_parameters())  # a tied weight once, under its first name
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


def _whole(manifest: Manifest, name: str, entry: Entry, files: dict[str, Any]) -> Tensor:
    parts = []
    for piece in entry.pieces:
        path = manifest.folder / piece.file
        try:
            tensor = files[piece.file].get_tensor(piece.key)
        except (KeyError, SafetensorError) as error:
            raise ValueError(f"{path}: damaged, {piece.key} cannot be read ({error}); choose another checkpoint") from None
        if digest(tensor) != piece.sha256 or str(tensor.dtype) != f"torch.{entry.dtype}":
            raise ValueError(f"{path}: damaged, {piece.key} is not what was written; choose another checkpoint")
        if tensor.numel() != piece.slice.numel:
            raise ValueError(f"{path}: damaged, {piece.key} has {tensor.numel()} elements, not {piece.slice.numel}")
        parts.append((piece.slice, tensor))
    if not parts:
        raise ValueError(f"{manifest.folder}: {name} has no stored piece; choose another checkpoint")
    return slices.assemble(parts)
