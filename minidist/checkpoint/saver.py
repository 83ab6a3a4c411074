"""Saving while training goes on: a snapshot in host memory is written by a thread, one save at a time.

The step stalls for the copy alone. What goes wrong later is raised by the next `save`, `poll` or `close`: a run that does
not look at how its last save ended does not end well either.
"""

from __future__ import annotations

import copy
import shutil
import threading
import uuid
from concurrent import futures
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

import minidist
from minidist.checkpoint.manifest import FORMAT_VERSION, step_name
from minidist.checkpoint.write import Attempt, Pieces, debris, partial_name
from minidist.core import comm
from minidist.core import device as devices
from minidist.core.mesh import Mesh


class Saver:
    """Writes the checkpoints of one run, `folder`/step-000500 and so on. Every rank of the mesh makes one and calls it alike.

    `keep`: so many finished checkpoints are left, the last saved ones (`choose.prune`); 0 leaves all. `background`: `save`
    returns when the tensors are copied. `patience_s`: how long a rank waits for the notes of the others. Use it in a `with`, at
    whose end the last save is waited for.
    """

    def __init__(self, folder: Path, mesh: Mesh, *, keep: int = 0, background: bool = False, patience_s: float = 600.0):
        self.folder, self.mesh = Path(folder), mesh
        self.keep, self.background, self.patience_s = keep, background, patience_s
        if mesh.rank == 0:  # before the others can have begun
            for path in debris(self.folder):
                shutil.rmtree(path, ignore_errors=True)
        self._name, self._count = _common_name(mesh), 0
        self._given_up = threading.Event()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="minidist-saver")
        self._writing: futures.Future | None = None
        self._copies: dict[str, Tensor] = {}  # host memory that the next snapshot takes again

    def save(
        self,
        step: int,
        pieces: Pieces,
        *,
        config: dict[str, Any],
        data: dict[str, Any],
        samples: int,
        state: dict[str, Any] | None = None,
    ) -> Path:
        """Save this rank's local tensors, each stored by the rank that its slice names as owner; the folder to be.

        `config` is the resolved configuration, `data` the header of the token file, `samples` the position in the sample
        stream, `state` what else a run needs to go on (JSON). A checkpoint of the same step is replaced. OSError, on every rank
        alike, if a rank could not write; with `background`, of the save before.
        """
        self.wait()
        self._count += 1
        final = self.folder / step_name(step)
        partial = final.with_name(partial_name(step, f"{self._name}-{self._count}"))
        head = {
            "format_version": FORMAT_VERSION,
            "minidist": minidist.__version__,
            "torch": torch.__version__,
            "step": step,
            "samples": samples,
            "layout": asdict(self.mesh.layout),
            "config": config,
            "data": data,
            "state": state or {},
        }
        head = copy.deepcopy(head)  # like the tensors: the caller goes on changing its counters (C26)
        rank, ranks = self.mesh.rank, self.mesh.world_size
        attempt = Attempt(final, partial, rank, ranks, head, self.keep, self.patience_s, self._given_up)
        if self.background:
            self._writing = self._thread.submit(attempt.run, self._snapshot(pieces))
        else:
            attempt.run([(record, local.detach().cpu()) for record, local in pieces if record.owner == rank])
        return final

    def poll(self) -> None:
        """Raise what went wrong in the background, if it is known by now. Never waits."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in the background is published. OSError if it was not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self, *, wait: bool = True) -> None:
        """Wait for the last save, unless this run ends in an error and its peers may be gone; then end the thread."""
        try:
            if wait:
                self.wait()
        finally:
            self._given_up.set()
            self._thread.shutdown()
            self._copies.clear()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(wait=kind is None)

    def _snapshot(self, pieces: Pieces) -> Pieces:
        """Copies in host memory of what this rank stores: training goes on and changes the originals (C26)."""
        found = []
        for place, (record, local) in enumerate(pieces):
            if record.owner != self.mesh.rank:
                continue
            key = f"{place} {record.name}"
            copy = self._copies.get(key)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                self._copies[key] = copy = devices.staging(local)
            copy.copy_(local.detach(), non_blocking=True)
            found.append((record, copy))
        devices.synchronize(self.mesh.device)
        return found


def save(folder: Path, step: int, pieces: Pieces, mesh: Mesh, **head: Any) -> Path:
    """One checkpoint, written before this returns: see `Saver.save`, whose other arguments it takes."""
    with Saver(folder, mesh) as saver:
        return saver.save(step, pieces, **head)


def _common_name(mesh: Mesh) -> str:
    """A name that no other saver has, the same on all ranks: rank 0 draws it."""
    drawn = torch.tensor(list(uuid.uuid4().bytes[:6]), dtype=torch.uint8, device=mesh.device)
    return bytes(comm.broadcast(drawn, mesh.world, src=0, tag="control").cpu().tolist()).hex()
