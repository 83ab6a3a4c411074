"""The build tool: bytes from sources, answers out, and a refusal for what would hide a failure."""

import json
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
from minidist.course import build

ROOT = Path(__file__).parents[2]

LESSON = """\
# %% [markdown] name="head"
# # Title
# Four ranks send 24 bytes.

# %% name="run"
# %%ranks 4
print(rank)

# %% name="claim"
claim("00.bytes", 24, 24)
"""

SOLUTION = """\
# %% [markdown] name="spec"
# Write it.

# %% name="answer-00-1" tags=["answer"]
def double(x):
    # BEGIN ANSWER
    two = 2
    return two * x
    # END ANSWER
    # STUB: raise NotImplementedError("00.1")
"""


@pytest.fixture
def tree(tmp_path):
    for kind, text in (("lessons", LESSON), ("solutions", SOLUTION)):
        (tmp_path / kind / "src").mkdir(parents=True)
        (tmp_path / kind / "src" / "00_x.py").write_text(text)
    return tmp_path


def run(tree, *options):
    return build.main(["--root", str(tree), *options])


def cells(path):
    return json.loads(path.read_text())["cells"]


def test_the_committed_notebooks_are_their_sources_and_every_prose_number_is_vouched_for(capsys):
    assert build.main(["--check", "--root", str(ROOT)]) == 0, capsys.readouterr().out


def test_a_built_notebook_has_names_for_ids_no_outputs_and_its_magic(tree):
    assert run(tree) == 0
    head, code, _ = cells(tree / "lessons/00_x.ipynb")
    assert (head["id"], code["id"]) == ("head", "run")
    assert code["outputs"] == [] and code["execution_count"] is None
    assert "".join(code["source"]) == "%%ranks 4\nprint(rank)"
    text = (tree / "lessons/00_x.ipynb").read_text()
    assert text.startswith('{\n "cells": [\n  {\n   "cell_type"') and text.endswith("}\n")


def test_the_exercise_has_the_stub_and_the_solution_the_answer(tree):
    assert run(tree) == 0
    (_, exercise), (_, solution) = cells(tree / "exercises/00_x.ipynb"), cells(tree / "solutions/00_x.ipynb")
    assert "".join(exercise["source"]) == 'def double(x):\n    raise NotImplementedError("00.1")'
    assert "".join(solution["source"]) == "def double(x):\n    two = 2\n    return two * x"


def test_check_sees_an_edit_by_hand_a_missing_notebook_and_one_without_source(tree, capsys):
    run(tree)
    assert run(tree, "--check") == 0
    built = tree / "lessons/00_x.ipynb"
    built.write_text(built.read_text().replace("print", "PRINT"))
    assert run(tree, "--check") == 1 and "lessons/00_x.ipynb: not what its source says" in capsys.readouterr().out
    run(tree)
    (tree / "exercises/00_x.ipynb").unlink()
    assert run(tree, "--check") == 1 and "exercises/00_x.ipynb: not what" in capsys.readouterr().out
    run(tree)
    (tree / "lessons/01_y.ipynb").write_text("{}")
    assert run(tree, "--check") == 1 and "01_y.ipynb: has no source" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (' name="run"', "", "cell 2 needs a name"),
        ('name="claim"', 'name="run"', "two cells are named 'run'"),
        ('name="run"', 'name="a b"', "needs a name of letters"),
        ("print(rank)", "input('?')", "'input(', which hides failures"),
        ("print(rank)", "# NBVAL_SKIP", "'NBVAL_SKIP', which hides failures"),
        ('name="run"', 'name="run" tags=["raises-exception"]', "'raises-exception', which hides failures"),
        ('name="run"', 'name="run" tags=["nbval-skip"]', "'nbval-skip', which hides failures"),
        ("print(rank)", "# BEGIN ANSWER\nx\n# END ANSWER", "lessons have none"),
        ("24, 24", "8, 8", "cell 'head': 24 has neither a claim nor a source"),
    ],
)
def test_a_source_that_would_hide_something_is_refused_by_name(tree, capsys, old, new, message):
    (tree / "lessons/src/00_x.py").write_text(LESSON.replace(old, new, 1))
    assert run(tree) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "message"),
    [("    # END ANSWER\n", "1 BEGIN ANSWER and 0 END"), ("    # STUB: raise", "no '# STUB: ' line")],
)
def test_an_answer_that_would_leak_or_leave_a_hole_is_refused(tree, capsys, old, message):
    (tree / "solutions/src/00_x.py").write_text(SOLUTION.replace(old, "    # " if "STUB" in old else ""))
    assert run(tree) == 1
    assert message in capsys.readouterr().out


def test_too_many_code_cells_are_refused(tree, capsys):
    more = "".join(f'\n# %% name="c{i}"\n{i}\n' for i in range(build.MOST_CODE_CELLS))
    (tree / "lessons/src/00_x.py").write_text(LESSON + more)
    assert run(tree) == 1 and "32 code cells: cut to 30" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prose", "loose"),
    [
        ("Rank 2 waits for ranks 0, 1 and 3 in lesson 7, 45 minutes.", []),
        ("An H100 does `989` in [989 TF](https://example.org/h100).", []),
        ("It is 1,024 bytes, 3.5 times as many.", ["1,024", "3.5"]),
        ("## 12 things\n\n1. one", []),
        ("```\n99\n```", []),
    ],
)
def test_numbers_in_prose_need_a_claim_or_a_source(prose, loose):
    cells = [{"type": "markdown", "name": "m", "tags": [], "source": prose}]
    assert [text.split(": ")[1].split(" ")[0] for text in build.loose_numbers(cells)] == loose
