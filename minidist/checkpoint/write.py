"""Writing a checkpoint: all ranks together, in a folder beside its place, renamed into it as the last thing.

A reader therefore sees a whole checkpoint or none, whenever the power goes. If one rank cannot write (a full disk), all
ranks raise the same words instead of some of them waiting for it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import minidist
from minidist.checkpoint.manifest import FORMAT_VERSION, MANIFEST, digest, rank_file, step_name
from minidist.core import comm
from minidist.core.mesh import Mesh
from minidist.core.slices import Slice


def save(
    folder: Path,
    step: int,
    tensors: list[tuple[Slice, Tensor]],
    mesh: Mesh,
    *,
    config: dict[str, Any],
    data: dict[str, Any],
    samples: int,
) -> Path:
    """Write `folder`/step-000500 for step 500 and return its path. Collective: every rank calls it.

    `tensors` are this rank's local tensors; each is stored by the rank that its slice names as owner. `config` is the
    resolved configuration, `data` the header of the token file, `samples` the position in the sample stream. A
    checkpoint of the same step is replaced. OSError, on every rank alike, if any rank could not write.
    """
    final = Path(folder) / step_name(step)
    partial = final.with_name(f".{final.name}.partial")
    alone = mesh.rank == 0
    _together(mesh, final, lambda: _start(partial) if alone else None)
    records = _together(mesh, final, lambda: _write_own(partial, tensors, mesh.rank))
    head = {
        "format_version": FORMAT_VERSION,
        "minidist": minidist.__version__,
        "torch": torch.__version__,
        "step": step,
        "samples": samples,
        "layout": asdict(mesh.layout),
        "config": config,
        "data": data,
    }
    _together(mesh, final, lambda: _publish(partial, final, head, records) if alone else None)
    return final


def _start(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # what a save that died left
    partial.mkdir(parents=True)


def _write_own(partial: Path, tensors: list[tuple[Slice, Tensor]], rank: int) -> dict[str, Any]:
    """Write this rank's file. Its part of the manifest: {"file", "bytes", "pieces"}; no file for a rank without any."""
    stored, pieces, seen = {}, [], Counter()
    for record, local in tensors:
        if record.owner != rank:
            continue
        seen[record.name] += 1
        key = record.name if seen[record.name] == 1 else f"{record.name}#{seen[record.name]}"
        # A copy: safetensors refuses views that share memory, and segments of a flat buffer do.
        stored[key] = local.detach().cpu().clone(memory_format=torch.contiguous_format)
        dtype = str(local.dtype).removeprefix("torch.")
        pieces.append({"key": key, "dtype": dtype, "sha256": digest(stored[key]), "slice": record.to_json()})
    if not stored:
        return {"file": None, "bytes": 0, "pieces": []}
    path = partial / rank_file(rank)
    save_file(stored, path)
    _sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "pieces": pieces}


def _publish(partial: Path, final: Path, head: dict[str, Any], records: list[dict[str, Any]]) -> None:
    tensors: dict[str, dict[str, Any]] = {}
    for record in records:
        for piece in record["pieces"]:
            name, shape, dtype = piece["slice"]["name"], piece["slice"]["shape"], piece.pop("dtype")
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "pieces": []})
            assert (entry["shape"], entry["dtype"]) == (shape, dtype), f"{name}: ranks disagree on its shape or dtype"
            entry["pieces"].append({"file": record["file"], **piece})
    for name, entry in tensors.items():
        stored = sum(Slice.from_json(piece["slice"]).counted() for piece in entry["pieces"])
        assert stored == torch.Size(entry["shape"]).numel(), f"{name} {entry['shape']}: {stored} elements were stored"
    files = {record["file"]: {"bytes": record["bytes"]} for record in records if record["file"]}
    path = partial / MANIFEST
    path.write_text(_readable({**head, "files": files}, tensors), encoding="utf-8")
    _sync(path)
    _sync(partial)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    _sync(final.parent)  # the rename itself must survive a power cut before the old one goes
    shutil.rmtree(old, ignore_errors=True)


def _readable(head: dict[str, Any], tensors: dict[str, Any]) -> str:
    """JSON with one line a tensor, so that a person can read the manifest of a real model."""
    text = json.dumps(head, indent=1)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items())
    return f'{text[:-2]},\n "tensors": {{\n{lines}\n }}\n}}\n'


def _together(mesh: Mesh, final: Path, action: Callable[[], Any]) -> list[Any]:
    """Run `action` on every rank and return all results by rank, or raise the first failure on every rank."""
    try:
        outcome = {"result": action()}
    except Exception as error:  # whatever it is, the others must hear of it instead of waiting
        outcome = {"failure": f"{type(error).__name__}: {error}"}
    outcomes = _exchange(outcome, mesh)
    for rank, other in enumerate(outcomes):
        if "failure" in other:
            raise OSError(f"{final}: the checkpoint was not written, rank {rank} failed: {other['failure']}")
    return [other["result"] for other in outcomes]


def _exchange(value: Any, mesh: Mesh) -> list[Any]:
    """A JSON value of every rank, by rank: lengths first, then the texts padded to the longest."""
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = comm.all_gather(torch.tensor([len(text)], device=mesh.device), mesh.world, tag="control").tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    texts = comm.all_gather(padded.to(mesh.device), mesh.world, tag="control").cpu().reshape(len(lengths), -1)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(texts, lengths, strict=True)]


def _sync(path: Path) -> None:
    """Have the operating system put a file, or the names in a folder, on the disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
