"""`bench memory`: what is held at each stage is the closed form and its padding, and the picture says the same."""

import json

import pytest

from minidist.bench import memory, report
from minidist.cli import main


@pytest.fixture(scope="module")
def rows():
    return memory.run(3)


def test_each_stage_holds_its_closed_form(rows):
    assert [one.stage for one in rows] == [0, 1, 2, 3]
    for one in rows:
        assert one.parameters == 1_292_280 and one.padding == 0
        assert one.held == {"gathered": 0, **one.closed_form}
    assert [sum(one.held.values()) / one.parameters for one in rows] == [18, 6 + 12 / 3, 2 + 16 / 3, 18 / 3]
    most = [one.most["gathered"] for one in rows]
    assert most[:3] == [0, 0, 0] and most[3] > 0
    assert len({one.most["activations"] for one in rows}) == 1, "what a forward keeps does not depend on the stage"


def test_table_and_picture(rows, tmp_path):
    text = memory.table(rows)
    assert "18.000" in text and "1,292,280 parameters" in text
    memory.plot(rows, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    assert [json.loads(line)["stage"] for line in report.to_json(rows).splitlines()] == [0, 1, 2, 3]


def test_bad_ranks(capsys):
    assert main(["bench", "memory", "--ranks", "0"]) == 2
    assert "--ranks 0: give at least 1" in capsys.readouterr().err
