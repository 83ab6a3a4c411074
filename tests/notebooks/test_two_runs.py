"""Case C55: a notebook run twice, each run the other's load, says the same but for clocks, process numbers and pictures.
Case C56: headless and without ipywidgets it runs as well, and each widget still has its figure and its words."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
LESSONS = sorted(ROOT.glob("lessons/[0-9]*.ipynb"))
CHANGING = [  # what may differ from run to run, and nothing else
    (r"data:image/[^\"]+", "PICTURE"),
    (r"process \d+", "process N"),
    (r"0x[0-9a-f]+", "ADDRESS"),
    (r"/tmp/[\w./-]+", "PATH"),
    (r"from [\d.]+ to", "from N to"),
    (r"~?\d[\d.,e+-]*( ?(?:ms|us|µs|ns|s|[GM]B/s|[GT]FLOP/s|tokens/s|times))\b", r"N\1"),
]
MEASURED = {  # cells that show what only a clock or a race decides: pictures of times, and 05's tensor that was read too early
    "01": ("roof-measure", "widget"),
    "05": ("partial-run",),
    "07": ("time-run", "widget"),
}
NO_WIDGETS = "import sys\nsys.modules['ipywidgets'] = None"  # an import of it then fails


def execute(path: Path, folder: Path, first: str) -> list:
    """The executed code cells of a run in a kernel of its own; `first` runs before the first of them."""
    book = nbformat.read(path, 4)
    book.cells.insert(0, nbformat.v4.new_code_cell(first, id="before"))
    folder.mkdir()
    env = {**os.environ, "MINIDIST_STRICT": "1", "MINIDIST_COURSE": str(folder), "PYTHONPATH": str(ROOT)}
    client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=env)
    return [cell for cell in book.cells if cell.cell_type == "code" and cell.id != "before"]


def said(cell) -> list[str]:
    """What a reader sees of a cell: its text as one stream, rich outputs by their plainest form, cleaned."""
    text, rich = "", []
    for output in cell.outputs:
        if output.output_type == "stream":
            text += output.text
        elif "application/vnd.jupyter.widget-view+json" not in output.data:
            plainest = next(output.data[kind] for kind in ("text/html", "text/markdown", "text/plain") if kind in output.data)
            if not plainest.startswith("<script>"):  # a script that serves live controls is not for reading
                rich.append(plainest)
    cleaned = []
    for part in (text, *rich):
        for pattern, word in CHANGING:
            part = re.sub(pattern, word, part)
        cleaned.append(re.sub(r" +", " ", part))
    return cleaned


FIRST_ONLY = [path if path.name[:2] == "00" else pytest.param(path, marks=pytest.mark.full) for path in LESSONS]


@pytest.mark.parametrize("path", FIRST_ONLY, ids=lambda path: path.stem)
def test_two_runs_at_once_one_of_them_without_ipywidgets_say_the_same(path, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda first: execute(path, tmp_path / f"course{len(first)}", first), ("import sys", NO_WIDGETS))
    widgets = 0
    for mine, theirs in zip(one, other, strict=True):
        if mine.id not in MEASURED.get(path.name[:2], ()):
            assert said(mine) == said(theirs), f"cell {mine.id}"
        if "widget" in mine.metadata.get("tags", []):
            widgets += 1
            assert "widget-view+json" in str(mine.outputs) and "widget-view+json" not in str(theirs.outputs)
            shown = "".join(output.get("data", {}).get("text/html", "") for output in theirs.outputs)
            assert shown.count("<img") == 1 and len(re.search('alt="([^"]+)"', shown)[1]) > 40, mine.id
    assert widgets, "no widget was compared"
