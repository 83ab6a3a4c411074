"""Notebooks as files: read the cells of one, find the course's own, in a checkout or in the installed package."""

from __future__ import annotations

import json
from pathlib import Path

from minidist.course.session import Cell


def read(path: str | Path) -> dict:
    """The notebook as JSON; ValueError with the remedy for what is not one."""
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content["cells"], list):
            raise TypeError
        return content
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file: give the path of a notebook (.ipynb)") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not a notebook: give a file that Jupyter saved (.ipynb)") from None


def read_cells(path: str | Path) -> list[Cell]:
    """Code cells in order, with ids and tags."""
    cells = []
    for raw in read(path)["cells"]:
        if raw.get("cell_type") != "code":
            continue
        source = raw.get("source", "")
        text = source if isinstance(source, str) else "".join(source)
        cells.append(Cell(raw.get("id", ""), text, tuple(raw.get("metadata", {}).get("tags", []))))
    return cells


def shipped(kind: str) -> Path:
    """Folder of our "lessons", "exercises" or "solutions": the tree of a checkout, else the data of the installed package."""
    package = Path(__file__).parent
    for place in (package.parent.parent / kind, package / "data" / kind):
        if any(place.glob("*.ipynb")):
            return place
    raise ValueError(f"this installation has no {kind}: install minidist from its wheel or run it from its checkout")
