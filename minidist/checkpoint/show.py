"""What lies in a checkpoint, as a table and as a picture of which rank's file holds what. Reads the manifest alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from minidist.checkpoint.manifest import MOMENTS, Manifest, Piece

ROWS = 40  # a picture of more rows than this shows blocks instead of tensors


def summary(manifest: Manifest) -> dict[str, Any]:
    """The checkpoint in figures: sizes in bytes, by kind and by file."""
    raw = manifest.raw
    kinds: Counter[str] = Counter()
    files: dict[str, Counter[str]] = {name: Counter() for name in manifest.files}
    for name, entry in manifest.tensors.items():
        kind = "/".join(name.split("/")[:2]) if name.startswith(MOMENTS) else "weights"
        for piece in entry.pieces:
            size = piece.slice.counted() * getattr(torch, entry.dtype).itemsize
            kinds[kind] += size
            files[piece.file][kind] += size
    return {
        "checkpoint": str(manifest.folder),
        "step": manifest.step,
        "samples": raw.get("samples"),
        "finite": manifest.finite,
        "format_version": raw["format_version"],
        "minidist": raw.get("minidist"),
        "torch": raw.get("torch"),
        "layout": raw.get("layout"),
        "state": manifest.state,
        "parameters": sum(math.prod(entry.shape) for entry in manifest.weights.values()),
        "tensors": len(manifest.tensors),
        "bytes": dict(kinds),
        "files": {name: {"bytes": manifest.files[name], **files[name]} for name in files},
        "cut_short": manifest.short_files(),
    }


def table(manifest: Manifest, names: str | None = None) -> str:
    """The summary in words; with `names`, a regular expression, also the pieces of the tensors that it finds."""
    found = summary(manifest)
    layout = {key: value for key, value in (found["layout"] or {}).items() if value not in (None, 0, 1, False, "")}
    axes = ", ".join(f"{axis} {layout[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep") if axis in layout) or "one rank"
    lines = [
        f"{found['checkpoint']}: step {found['step']:,}, {found['samples'] or 0:,} samples, "
        f"written by minidist {found['minidist']} (format {found['format_version']}) with torch {found['torch']}",
        f"{found['parameters']:,} parameters in {len(manifest.weights)} tensors, from {axes}"
        + ("" if found["finite"] else "; NOT ALL NUMBERS ARE FINITE"),
        *(f"  {kind:<24}{size:>16,} bytes" for kind, size in found["bytes"].items()),
    ]
    for name, sizes in found["files"].items():
        parts = ", ".join(f"{kind} {size:,}" for kind, size in sizes.items() if kind != "bytes")
        torn = "  CUT SHORT OR MISSING" if name in found["cut_short"] else ""
        lines.append(f"  {name:<24}{sizes['bytes']:>16,} bytes: {parts}{torn}")
    if names is not None:
        lines += _pieces(manifest, re.compile(names))
    return "\n".join(lines)


def plot(manifest: Manifest, out: Path) -> str:
    """Draw which share of each tensor, or of each block where there are many, lies in which file; the picture in words."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, files, shares = _shares(manifest)
    figure = Figure(figsize=(max(5.0, 2.5 + 0.7 * len(files)), 1.2 + 0.24 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            if share:
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=7, color="white" if share > 0.7 else "black")
    axes.set_xticks(range(len(files)), [re.sub(r"\D", "", name).lstrip("0") or "0" for name in files])
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xticks([x - 0.5 for x in range(1, len(files))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(rows))], minor=True)
    axes.grid(which="minor", color="0.8", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    axes.set(xlabel="written by rank", title=f"step {manifest.step:,}, who holds what")
    words = "; ".join(
        f"{name}: " + ", ".join(f"{share:.0%} in {file}" for file, share in zip(files, row, strict=True) if share)
        for name, row in zip(rows, shares, strict=True)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, metadata={"Description": words})
    return words


def _shares(manifest: Manifest) -> tuple[list[str], list[str], list[list[float]]]:
    """(rows, files, share of the row that the file holds)."""
    weights = {name: place for place, name in enumerate(manifest.weights)}  # in the model's order; each moment's after them
    names = sorted(manifest.tensors, key=lambda name: (name.rpartition("/")[0], weights[name.rpartition("/")[2]]))
    grouped = {name: name for name in names} if len(names) <= ROWS else {name: _group(name) for name in names}
    files, held, whole = list(manifest.files), Counter(), Counter()
    for name in names:
        entry = manifest.tensors[name]
        whole[grouped[name]] += math.prod(entry.shape)
        for piece in entry.pieces:
            held[grouped[name], piece.file] += piece.slice.counted()
    rows = [row for row in dict.fromkeys(grouped.values()) if whole[row]]
    return rows, files, [[held[row, file] / whole[row] for file in files] for row in rows]


def _group(name: str) -> str:
    """The block that a tensor is of, moments apart."""
    moments, _, weight = name.rpartition("/")
    block = re.match(r"blocks\.\d+|[^.]+", weight)
    return f"{moments}/{block[0]}" if moments else block[0]


def _pieces(manifest: Manifest, names: re.Pattern) -> list[str]:
    lines = []
    for name, entry in manifest.tensors.items():
        if names.search(name):
            lines.append(f"{name} {list(entry.shape)} {entry.dtype}")
            lines += [f"    {piece.file}: {_where(piece)}" for piece in entry.pieces]
    return lines or [f"no tensor's name matches {names.pattern!r}"]


def _where(piece: Piece) -> str:
    """Which part of the whole a piece is, in words."""
    boxes = " + ".join(
        "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True)) + "]"
        for box in piece.slice.boxes
        if box.kind == "own"
    )
    flat = "" if piece.slice.flat is None else f", elements {piece.slice.flat[0]:,} to {piece.slice.flat[1]:,} of it laid flat"
    return f"{boxes or 'nothing of its own'}{flat}, {piece.slice.counted():,} elements"
