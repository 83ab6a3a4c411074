"""Format version 1 of a checkpoint: what lies in its folder, and reading its manifest.

    checkpoints/step-000500/
        manifest.json               written last; a folder without it is not a checkpoint
        rank-00000.safetensors      the tensors that rank 0 owns: each element is stored once in the whole job
        rank-00001.safetensors

The manifest says of every tensor its whole shape, its dtype, and its pieces: the file, the key in it, the slice record
(`core.slices`) and the SHA-256 of the bytes. So a reader needs no knowledge of the layout that wrote it. A later
minidist may add keys, which are ignored here; what an old reader would misread gets a higher format version.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist.core.slices import Slice

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Piece:
    """One stored part of a tensor."""

    file: str
    """name of the safetensors file, in the folder of the manifest"""
    key: str
    """its key in that file"""
    sha256: str
    """of its bytes, row-major, little-endian"""
    slice: Slice
    """which part of which whole tensor it is"""


@dataclass(frozen=True)
class Entry:
    """One whole tensor."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name without "torch.": float32, bfloat16, ..."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """A manifest, read and checked for form. `raw` is the whole JSON object: config, data, versions and all."""

    folder: Path
    step: int
    """optimizer steps taken"""
    files: dict[str, int]
    """name of every tensor file -> its length in bytes"""
    tensors: dict[str, Entry]
    raw: dict[str, Any]

    def short_files(self) -> list[str]:
        """The files that are missing, or not as long as they were written: a torn copy. Cheap: nothing is read."""
        found = {name: self.folder / name for name in self.files}
        return [name for name, path in found.items() if not path.is_file() or path.stat().st_size != self.files[name]]


def step_name(step: int) -> str:
    """The folder of a step: names sort like numbers up to a million steps, and `latest` sorts by number anyway."""
    return f"step-{step:06d}"


def rank_file(rank: int) -> str:
    """The tensor file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def digest(tensor: Tensor) -> str:
    """SHA-256 of a CPU tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. ValueError, by name, for an unfinished folder, damage, or a newer format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder}: not a finished checkpoint, it has no {MANIFEST}; choose another one")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw["format_version"]
        if version > FORMAT_VERSION:
            raise NewerFormat(
                f"{path}: format version {version}, but this minidist reads up to {FORMAT_VERSION}: "
                f"install a newer minidist (it was written by {raw.get('minidist', 'an unknown version')})"
            )
        tensors = {name: _entry(name, entry) for name, entry in raw["tensors"].items()}
        files = {_plain(name): int(record["bytes"]) for name, record in raw["files"].items()}
        return Manifest(folder, int(raw["step"]), files, tensors, raw)
    except NewerFormat:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: damaged ({what}); choose another checkpoint") from None


def resolve(path: Path) -> Path:
    """The checkpoint folder that `path` means: itself, or the newest finished one of a run or checkpoints folder."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder, give a run folder such as runs/tiny")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (folder / MANIFEST).is_file() or folder.name.startswith("step-"):
        return folder
    found = latest(folder)
    if found is None:
        raise ValueError(f"{path}: there is no finished checkpoint in it")
    return found


def latest(folder: Path) -> Path | None:
    """The newest finished checkpoint in a checkpoints folder, or None. A newer one that is damaged or torn is named in
    a warning and passed over."""
    steps = {int(m[1]): p for p in folder.glob("step-*") if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir()}
    for _, path in sorted(steps.items(), reverse=True):
        try:
            short = read_manifest(path).short_files()
        except NewerFormat:
            raise
        except ValueError as error:
            warnings.warn(f"passed over a checkpoint: {error}", stacklevel=2)
            continue
        if not short:
            return path
        warnings.warn(f"passed over a checkpoint: {path}: {', '.join(short)} missing or cut short", stacklevel=2)
    return None


class NewerFormat(ValueError):
    """Written by a later minidist: not damage, so it is never passed over for an older checkpoint."""


def _entry(name: str, entry: dict[str, Any]) -> Entry:
    pieces = tuple(
        Piece(_plain(piece["file"]), str(piece["key"]), str(piece["sha256"]), Slice.from_json(piece["slice"]))
        for piece in entry["pieces"]
    )
    shape = tuple(entry["shape"])
    if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    if any((piece.slice.name, piece.slice.shape) != (name, shape) for piece in pieces):
        raise ValueError(f"a piece of {name} is of another tensor")
    return Entry(shape, entry["dtype"], pieces)


def _plain(name: str) -> str:
    """A file name of this folder: a manifest from elsewhere must not point out of it."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ValueError(f"file name {name!r}")
    return name
