"""`lab` and `grade` hand over to the course with what was asked."""

import json
from pathlib import Path

import pytest

from minidist.course import lab as course_lab

ROOT = Path(__file__).parents[2]


def test_lab_passes_its_options_on(minidist, monkeypatch):
    asked = []
    monkeypatch.setattr(course_lab, "lab", lambda *args, **kwargs: asked.append((args, kwargs)) or 0)
    assert minidist("lab").code == minidist("lab", "--dir", "d", "--no-browser", "--port", "9000").code == 0
    assert asked == [((None,), {"browser": True, "port": None}), (("d",), {"browser": False, "port": 9000})]


@pytest.mark.parametrize("folder, code", [("exercises", 1), ("solutions", 0)])
def test_grade_is_1_below_full_marks_and_0_at_full_marks(minidist, folder, code):
    notebook = ROOT / folder / "00_ranks.ipynb"
    said = minidist("grade", notebook, "--json", "--seed", "3")
    results = json.loads(said.out)
    assert said.code == code, said
    assert all(result["points"] == (result["max"] if code == 0 else 0) and result["seed"] == 3 for result in results)
    if code:  # nothing runs, so it is quick to ask again
        assert "total: 0 of" in minidist("grade", notebook).out
