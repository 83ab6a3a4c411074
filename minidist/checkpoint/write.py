"""Writing a checkpoint: every rank its own file, in a folder beside its place, which rank 0 renames into it as the last thing.

A reader therefore sees a whole checkpoint or none, whenever the power goes. Ranks tell each other through that folder, not
through collectives, so a checkpoint can be written in the background while training goes on: a rank that has written its file
leaves a note of it, and rank 0, once it has all notes, publishes the checkpoint, or says what failed. Either way all ranks hear
of it, and if one rank cannot write (a full disk) all raise the same words instead of some of them waiting for it.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minidist.checkpoint import tensorfile
from minidist.checkpoint.choose import prune, whole_ones
from minidist.checkpoint.manifest import BLOCK, MANIFEST, rank_file, readable, step_name
from minidist.core.slices import Slice

Pieces = Sequence[tuple[Slice, Tensor]]
FAILED = "failed.json"


@dataclass
class Attempt:
    """One rank's part of one save: what it writes where, and how it hears of the others."""

    final: Path
    partial: Path
    """the folder that the ranks write into; its name is the same on all ranks, and of this attempt alone"""
    rank: int
    ranks: int
    head: dict[str, Any]
    """of the manifest: all but files and tensors; what rank 0 has counts"""
    keep: int
    patience_s: float
    given_up: threading.Event
    """set where this rank ends, and need not hear of the others any more"""

    def run(self, pieces: Pieces) -> None:
        """Write the CPU tensors among `pieces` that this rank owns, and wait until the checkpoint is published.

        OSError, with the same words on every rank, if any rank could not write.
        """
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
            note = self._write_own(pieces)
        except Exception as error:  # whatever it is, the others must hear of it instead of waiting
            (self.partial / rank_file(self.rank)).unlink(missing_ok=True)  # on a full disk, this makes room for the note
            note = {"failure": f"{type(error).__name__}: {error}"}
        _leave(self.partial / note_file(self.rank), note)
        if self.rank == 0:
            self._publish()
        else:
            self._hear()

    def _write_own(self, pieces: Pieces) -> dict[str, Any]:
        """Write this rank's file; its part of the manifest. No file for a rank that owns nothing."""
        stored: dict[str, Tensor] = {}
        records, seen = [], Counter()
        for record, local in pieces:
            if record.owner != self.rank:
                continue
            seen[record.name] += 1
            key = record.name if seen[record.name] == 1 else f"{record.name}#{seen[record.name]}"
            stored[key] = local.detach().reshape(-1)
            dtype = str(local.dtype).removeprefix("torch.")
            records.append({"key": key, "dtype": dtype, "slice": record.to_json()})
        if not stored:
            return {"file": None, "bytes": 0, "finite": True, "pieces": []}
        path = self.partial / rank_file(self.rank)
        hashes = tensorfile.write(path, stored, BLOCK)
        finite = all(bool(tensor.isfinite().all()) for tensor in stored.values())
        for record in records:
            record["sha256"] = hashes[record["key"]]
        return {"file": path.name, "bytes": path.stat().st_size, "finite": finite, "pieces": records}

    def _publish(self) -> None:
        """Rank 0: wait for all notes, and make a checkpoint of what lies there, or say why there is none."""
        notes = [self._wait_for(rank) for rank in range(self.ranks)]
        failures = [f"rank {rank} failed: {note['failure']}" for rank, note in enumerate(notes) if "failure" in note]
        try:
            if not failures:
                self._rename(notes)
        except Exception as error:
            failures = [f"rank 0 failed: {type(error).__name__}: {error}"]
        if failures:
            for path in self.partial.glob("*"):
                path.unlink()
            _leave(self.partial / FAILED, {"failure": failures[0]})
            raise self._error(failures[0])
        prune(self.final.parent, self.keep)

    def _rename(self, notes: list[dict[str, Any]]) -> None:
        tensors = _joined(notes)
        files = {note["file"]: {"bytes": note["bytes"]} for note in notes if note["file"]}
        order = 1 + max((found.order for found in whole_ones(self.final.parent)), default=0)
        finite = all(note["finite"] for note in notes)
        head = {**self.head, "order": order, "finite": finite, "block_bytes": BLOCK, "files": files}
        with open(self.partial / MANIFEST, "w", encoding="utf-8") as file:
            file.write(readable(head, tensors))
            file.flush()
            os.fsync(file.fileno())
        for rank in range(self.ranks):
            (self.partial / note_file(rank)).unlink()
        sync(self.partial)
        old = self.final.with_name(f".{self.final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.final.exists():
            os.rename(self.final, old)
        os.rename(self.partial, self.final)
        sync(self.final.parent)  # the rename itself must survive a power cut before the old one goes
        shutil.rmtree(old, ignore_errors=True)

    def _wait_for(self, rank: int) -> dict[str, Any]:
        path = self.partial / note_file(rank)
        if self._until(path.exists):
            return json.loads(path.read_text(encoding="utf-8"))
        if self.given_up.is_set():
            return {"failure": "rank 0 ended before it had written its file"}
        return {"failure": f"no note of it in {self.patience_s:g} s; has it died, or do the hosts not share this folder?"}

    def _hear(self) -> None:
        """The other ranks: wait until rank 0 has published, or has said what failed."""
        failed = self.partial / FAILED
        if not self._until(lambda: failed.exists() or not self.partial.exists()):
            raise self._error(f"rank 0 has not said how it ended in {self.patience_s:g} s")
        if self.partial.exists():
            raise self._error(json.loads(failed.read_text(encoding="utf-8"))["failure"])

    def _until(self, true: Callable[[], bool]) -> bool:
        """Look often at first, then every 50 ms; False past the deadline, or where this rank gives up."""
        deadline, nap = time.monotonic() + self.patience_s, 0.5e-3
        while not true():
            if time.monotonic() > deadline or self.given_up.wait(nap):
                return true()
            nap = min(1.5 * nap, 0.05)
        return True

    def _error(self, what: str) -> OSError:
        return OSError(f"{self.final}: the checkpoint was not written, {what}")


def note_file(rank: int) -> str:
    """What a rank leaves for rank 0: its part of the manifest, or why there is none."""
    return f"rank-{rank:05d}.json"


def sync(folder: Path) -> None:
    """Have the operating system put the names in a folder on the disk now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def debris(folder: Path) -> list[Path]:
    """What saves that died have left in a checkpoints folder."""
    return [path for pattern in (".step-*.partial*", ".step-*.old") for path in folder.glob(pattern)]


def partial_name(step: int, attempt: str) -> str:
    """The name of the folder in which a save is made."""
    return f".{step_name(step)}.partial-{attempt}"


def _leave(path: Path, note: dict[str, Any]) -> None:
    """Write a small JSON file that is seen whole or not at all."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(note), encoding="utf-8")
    os.rename(half, path)


def _joined(notes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The manifest's table of tensors. AssertionError unless every element of each is stored exactly once."""
    tensors: dict[str, dict[str, Any]] = {}
    for note in notes:
        for piece in note["pieces"]:
            name, shape, dtype = piece["slice"]["name"], piece["slice"]["shape"], piece.pop("dtype")
            entry = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "pieces": []})
            assert (entry["shape"], entry["dtype"]) == (shape, dtype), f"{name}: ranks disagree on its shape or dtype"
            entry["pieces"].append({"file": note["file"], **piece})
    for name, entry in tensors.items():
        stored = sum(Slice.from_json(piece["slice"]).counted() for piece in entry["pieces"])
        assert stored == torch.Size(entry["shape"]).numel(), f"{name} {entry['shape']}: {stored} elements were stored"
    return tensors
