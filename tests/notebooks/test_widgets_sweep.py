"""Every control of every lesson's widget, driven through the kernel to its ends and through its middle: each drawing is a
picture with its words, none ends in an error. How long a drawing takes is reported against 150 ms, never asserted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipywidgets")

ROOT = Path(__file__).parents[2]
WITH_WIDGETS = [path for path in sorted(ROOT.glob("lessons/[0-9]*.ipynb")) if '"widget"' in path.read_text()]
FRAME_MS = 150
SWEEP = """
import json, re, time
from minidist.course import session

def settings(control):
    if hasattr(control, "options"):
        return list(control.options)
    span = control.max - control.min
    near = [control.min + control.step * round(span * part / control.step) for part in (0, 0.25, 0.5, 0.75, 1)]
    return [type(control.value)(min(value, control.max)) for value in near]

def leaves(box):
    return [leaf for child in box.children for leaf in leaves(child)] if hasattr(box, "children") else [box]

swept = []
for whole in session.current.widgets:
    *controls, picture = leaves(whole)
    drawings = []
    for control in controls:
        for value in settings(control):
            if value == control.value:
                continue
            began = time.perf_counter()
            control.value = value
            took = (time.perf_counter() - began) * 1e3
            shown = picture.value
            alt = re.search('alt="([^"]+)"', shown)
            drawings.append([control.description, str(value), round(took), bool(alt and len(alt[1]) > 20), shown.count("<img")])
    swept.append({
        "labels": [control.description for control in controls],
        "eager": [control.description for control in controls if getattr(control, "continuous_update", False)],
        "drawings": drawings,
    })
print("SWEPT", json.dumps([swept, session.current.errors]))
"""


@pytest.mark.parametrize("path", WITH_WIDGETS, ids=lambda path: path.stem)
def test_every_control_of_every_widget_draws(path, tmp_path, record_property, capsys):
    book = nbformat.read(path, 4)
    at = max(i for i, cell in enumerate(book.cells) if "widget" in cell.metadata.get("tags", []))
    book.cells[at + 1 :] = [nbformat.v4.new_code_cell(SWEEP, id="sweep")]  # what comes after the last widget is not needed
    env = {**os.environ, "MINIDIST_STRICT": "1", "MINIDIST_COURSE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=env)
    text = "".join(output.text for output in book.cells[-1].outputs if output.output_type == "stream")
    swept, errors = json.loads(text.split("SWEPT", 1)[1])
    assert errors == []
    planted = sum("widget" in cell.metadata.get("tags", []) for cell in book.cells)
    assert len(swept) >= planted > 0
    for widget in swept:
        assert all(widget["labels"]) and widget["eager"] == []
        assert {row[0] for row in widget["drawings"]} == set(widget["labels"]), "a control that never moved"
        for label, value, _, worded, pictures in widget["drawings"]:
            assert worded and pictures == 1, f"{label} = {value}"
    times = sorted(row[2] for widget in swept for row in widget["drawings"])
    report = f"{len(times)} drawings, median {times[len(times) // 2]} ms, slowest {times[-1]} ms (aim: {FRAME_MS})"
    record_property("frames", report)
    with capsys.disabled():
        print(f"\n{path.stem}: {report}")
