"""Format version 2 of a checkpoint: what lies in its folder, and reading its manifest.

    checkpoints/step-000500/
        manifest.json               written last; a folder without it is not a checkpoint
        rank-00000.safetensors      the tensors that rank 0 owns: each element is stored once in the whole job
        rank-00001.safetensors

The manifest says of every tensor its whole shape, its dtype, and its pieces: the file, the key in it, the slice record
(`core.slices`) and the SHA-256 of each block of its bytes. So a reader needs no knowledge of the layout that wrote it, and
checks what it reads without reading the rest. Weights have the names of the plain model, in their widest form (the masters);
the optimizer's moments are `moments/exp_avg/NAME` and so on, cut like the weight. All else that a run needs to go on is in
`state`, and nothing of it depends on the layout either.

Version 1 had no moments, no state, and one hash a piece; it stays readable. A later minidist may add keys, which are
ignored here; what an old reader would misread gets a higher format version.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minidist.core.slices import Slice

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
BLOCK = 16 * 2**20  # bytes that one hash covers: small beside a tensor, large beside its hash
MOMENTS = "moments/"


@dataclass(frozen=True)
class Piece:
    """One stored part of a tensor."""

    file: str
    """name of the safetensors file, in the folder of the manifest"""
    key: str
    """its key in that file"""
    sha256: tuple[str, ...]
    """of each block of its bytes, row-major, little-endian"""
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
    """optimizer steps run"""
    files: dict[str, int]
    """name of every tensor file -> its length in bytes"""
    tensors: dict[str, Entry]
    raw: dict[str, Any]

    @property
    def order(self) -> int:
        """Its number among the saves of its folder: a run that was rolled back saves an earlier step later. 0: unknown."""
        return int(self.raw.get("order", 0))

    @property
    def block(self) -> int | None:
        """Bytes that one hash covers; None (version 1): all of the piece."""
        return self.raw.get("block_bytes")

    @property
    def state(self) -> dict[str, Any]:
        """What a run needs to go on, apart from tensors; empty in version 1."""
        return self.raw.get("state", {})

    @property
    def finite(self) -> bool:
        """Whether all its numbers were finite: a run that has diverged saves what nobody wants to go on from."""
        return self.raw.get("finite", True)

    @property
    def weights(self) -> dict[str, Entry]:
        """The tensors of the model, without the optimizer's moments."""
        return {name: entry for name, entry in self.tensors.items() if not name.startswith(MOMENTS)}

    def short_files(self) -> list[str]:
        """The files that are missing, or not as long as they were written: a torn copy. Cheap: nothing is read."""
        found = {name: self.folder / name for name in self.files}
        return [name for name, path in found.items() if not path.is_file() or path.stat().st_size != self.files[name]]


def step_name(step: int) -> str:
    """The folder of a step: names sort like numbers up to a million steps."""
    return f"step-{step:06d}"


def rank_file(rank: int) -> str:
    """The tensor file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def moment(key: str, name: str) -> str:
    """The name under which the moment `key` ("exp_avg") of the weight `name` is stored."""
    return f"{MOMENTS}{key}/{name}"


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
        found = Manifest(folder, int(raw["step"]), files, tensors, raw)
        assert found.order >= 0 and (found.block or BLOCK) % 16 == 0 and isinstance(found.state, dict), "order, block or state"
        return found
    except NewerFormat:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: damaged ({what}); choose another checkpoint") from None


def readable(head: dict[str, Any], tensors: dict[str, Any]) -> str:
    """The text of a manifest: JSON with one line a tensor, so that a person can read that of a real model."""
    text = json.dumps(head, indent=1)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items())
    return f'{text[:-2]},\n "tensors": {{\n{lines}\n }}\n}}\n'


class NewerFormat(ValueError):
    """Written by a later minidist: not damage, so it is never passed over for an older checkpoint."""


def _entry(name: str, entry: dict[str, Any]) -> Entry:
    pieces = tuple(
        Piece(_plain(piece["file"]), str(piece["key"]), _hashes(piece["sha256"]), Slice.from_json(piece["slice"]))
        for piece in entry["pieces"]
    )
    shape = tuple(entry["shape"])
    if not isinstance(getattr(torch, entry["dtype"], None), torch.dtype):
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    if any((piece.slice.name, piece.slice.shape) != (name, shape) for piece in pieces):
        raise ValueError(f"a piece of {name} is of another tensor")
    return Entry(shape, entry["dtype"], pieces)


def _hashes(found: str | list[str]) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else tuple(map(str, found))  # one of the whole piece in version 1


def _plain(name: str) -> str:
    """A file name of this folder: a manifest from elsewhere must not point out of it."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise ValueError(f"file name {name!r}")
    return name
