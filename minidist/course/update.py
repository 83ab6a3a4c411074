"""Bring a learner's notebook up to date, cell by cell, without overwriting anything of theirs.

Three versions meet: *base*, which we shipped last time; *ours*, which we ship now; *theirs*, which they worked on. A cell is
known by its id and compared by its source. Of the base only ids and hashes are kept, in `.minidist/base.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minidist.course import notebook

Base = dict[str, str]  # id -> hash of the source, in the order of the notebook


@dataclass
class Merge:
    """What an update makes of one notebook."""

    cells: list[dict]
    """the learner's notebook from now on"""
    refreshed: list[str]
    """ids of cells that were untouched and are ours again: changed, added or gone"""
    conflicts: list[str]
    """ids of cells that both have changed; theirs stay"""


def source(cell: dict) -> str:
    """Text of a raw cell, whichever of the two ways Jupyter wrote it."""
    text = cell.get("source", "")
    return text if isinstance(text, str) else "".join(text)


def fingerprint(cells: list[dict]) -> Base:
    """The base that these cells make."""
    return {cell.get("id", ""): hashlib.sha256(source(cell).encode()).hexdigest() for cell in cells}


def merge(base: Base | None, ours: list[dict], theirs: list[dict]) -> Merge:
    """Merge cell by cell. ValueError where theirs cannot be told apart by id; without a base every difference is a conflict."""
    names = [cell.get("id", "") for cell in theirs]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError("its cells have lost their ids")
    now, mine = fingerprint(ours), fingerprint(theirs)
    if base is None:
        differing = [name for name in now if mine.get(name) != now[name]]
        return Merge(theirs, [], differing)
    by_id = {cell["id"]: cell for cell in ours} | {cell["id"]: cell for cell in theirs}
    fresh = {cell["id"]: cell for cell in ours}
    kept, refreshed, conflicts = {}, [], []
    for name in {**mine, **now}:  # theirs first, in their order
        was, is_ours, is_theirs = base.get(name), now.get(name), mine.get(name)
        if is_ours in (is_theirs, was):  # nothing new from us: what they have, or do not have, stays
            take = is_theirs
        elif is_theirs == was:  # they have not touched it
            take, by_id[name] = is_ours, fresh.get(name)
            refreshed.append(name)
        else:
            take = is_theirs
            conflicts.append(name)
        if take is not None:
            kept[name] = by_id[name]
    shared = [name for name in mine if name in base]
    moved = shared != [name for name in base if name in mine]
    order = weave(list(mine), list(now)) if moved else weave(list(now), list(mine))
    return Merge([kept[name] for name in order if name in kept], refreshed, conflicts)


def weave(first: list[str], second: list[str]) -> list[str]:
    """The order of `first`; what only `second` has comes after what it follows there."""
    order = list(first)
    before = None
    for name in second:
        if name not in first:
            order.insert(order.index(before) + 1 if before is not None else 0, name)
        before = name
    return order


def read_base(folder: Path) -> dict[str, Base]:
    """The bases of all notebooks of a course folder: {"lessons/00_ranks.ipynb": {...}}. None known where it is damaged."""
    try:
        found = json.loads((folder / ".minidist" / "base.json").read_bytes())
        return {name: dict(base) for name, base in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def write_base(folder: Path, bases: dict[str, Base]) -> None:
    """Keep them, whole or not at all."""
    (folder / ".minidist").mkdir(exist_ok=True)
    replace(folder / ".minidist" / "base.json", json.dumps(bases, indent=1))


def write(path: Path, content: dict, unless_changed_from: bytes) -> bool:
    """Put a merged notebook in place of the one that was read; False where it has been saved meanwhile, which wins."""
    if path.read_bytes() != unless_changed_from:
        return False
    replace(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return True


def replace(path: Path, text: str) -> None:
    """Write beside and rename: a crash leaves the old file or the new one."""
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            os.chmod(beside, path.stat().st_mode & 0o777)
        else:
            os.chmod(beside, 0o644)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def bring_back(path: Path, name: str, shipped: Path) -> str:
    """Put the shipped cell `name` into a notebook. An edited one stays right above it, as raw text under another id.

    Returns what was done, in words. ValueError where the notebook cannot be read.
    """
    before = path.read_bytes()
    content, ours = notebook.read(path), notebook.read(shipped)["cells"]
    (fresh,) = (cell for cell in ours if cell.get("id") == name)
    cells = content["cells"]
    at = next((i for i, cell in enumerate(cells) if cell.get("id") == name), None)
    if at is not None and source(cells[at]) == source(fresh):
        return f"{path.name}: the cell {name} is there, untouched: nothing to do"
    if at is None:
        cells.insert(_place(cells, ours, name), fresh)
        said = f"{path.name}: the cell {name} is back"
    else:
        taken = {cell.get("id") for cell in cells}
        kept = next(f"{name}-old{n or ''}" for n in range(len(cells) + 1) if f"{name}-old{n or ''}" not in taken)
        old = {"cell_type": "raw", "id": kept, "metadata": {}, "source": cells[at].get("source", "")}
        cells[at : at + 1] = [old, fresh]
        said = f"{path.name}: the cell {name} is as we ship it; what you had stands above it, as the raw cell {kept}"
    if not write(path, content, before):
        raise ValueError(f"{path}: it was saved just now: close it in JupyterLab and try again")
    return f"{said}. If JupyterLab has it open: File, Reload Notebook from Disk"


def _place(cells: list[dict], ours: list[dict], name: str) -> int:
    """Where a missing cell belongs: after the nearest cell before it, in our order, that is still there."""
    present = {cell.get("id"): i for i, cell in enumerate(cells)}
    order = [cell["id"] for cell in ours]
    before = [present[other] for other in order[: order.index(name)] if other in present]
    return before[-1] + 1 if before else 0
