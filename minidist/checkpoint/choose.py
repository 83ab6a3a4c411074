"""Which checkpoint of a folder is meant: the newest one that is whole, and which of the older ones may go."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from minidist.checkpoint.manifest import MANIFEST, Manifest, NewerFormat, read_manifest


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


def latest(folder: Path, *, finite: bool = False) -> Path | None:
    """The finished checkpoint that was saved last in a checkpoints folder, or None; with `finite`, of the finite ones.

    One that is damaged, torn or passed over is named in a warning. A newer format raises: what it holds must not be lost.
    """
    for found in whole_ones(folder, tell=True):
        if found.finite or not finite:
            return found.folder
        warnings.warn(f"passed over a checkpoint: {found.folder}: not all of its numbers are finite", stacklevel=2)
    return None


def whole_ones(folder: Path, *, tell: bool = False) -> list[Manifest]:
    """The finished checkpoints of a checkpoints folder that have all their files, last saved first; `tell`: warn of the others.

    Of two that were saved before saves were counted, the one of the higher step is the later.
    """
    found = []
    for path in sorted(_folders(folder), key=_step, reverse=True):
        try:
            manifest = read_manifest(path)
        except NewerFormat:
            raise
        except ValueError as error:
            if tell:
                warnings.warn(f"passed over a checkpoint: {error}", stacklevel=3)
            continue
        short = manifest.short_files()
        if not short:
            found.append(manifest)
        elif tell:
            warnings.warn(f"passed over a checkpoint: {path}: {', '.join(short)} missing or cut short", stacklevel=3)
    return sorted(found, key=lambda manifest: (manifest.order, manifest.step), reverse=True)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove the checkpoints that are not wanted any more, and return them; `keep` = 0 wants all.

    One of finite numbers goes when `keep` later ones of finite numbers are whole; one that has diverged when `keep` later ones
    of any kind are. So the last good one never goes, and what is damaged is left for a person to look at.
    """
    if not keep:
        return []
    gone, finite = [], 0
    for later, found in enumerate(whole_ones(folder)):
        if (finite if found.finite else later) >= keep:
            shutil.rmtree(found.folder)
            gone.append(found.folder)
        finite += found.finite
    return gone


def others(folder: Path) -> str:
    """What to take instead of the checkpoint `folder`, in words: the whole one beside it that was saved last."""
    try:
        found = [manifest.folder for manifest in whole_ones(folder.parent) if manifest.folder != folder and manifest.finite]
    except NewerFormat:
        found = []
    return f"choose another checkpoint, {found[0]} is whole" if found else "choose another checkpoint"


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
