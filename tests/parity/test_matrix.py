"""Any legal layout trains like one process: the generated matrix, up to 8 ranks (`pytest -m matrix`, here or with the others).

It ends with the table of errors, which $MATRIX_TABLE = some file keeps.
"""

import random

import pytest
from parity import layouts
from parity.harness import distance
from parity.layouts import SETTINGS, configuration, cover, legal_pairs, name, nearest, pairs, words

from minidist.parallel.pipeline import schedules

BOUND = 1e-10


def pytest_generate_tests(metafunc):
    """The cases, which take seconds to choose: not for those who have not asked for them."""
    if "case" in metafunc.fixturenames:
        unwanted = "not matrix" in metafunc.config.option.markexpr
        metafunc.parametrize("case", [] if unwanted else cover(), ids=name)


@pytest.mark.matrix
def test_trains_like_one_process(case, reference, record_property):
    config = configuration(case)
    error = distance(config, reference, timeout_s=240)  # ring attention on 8 ranks and two cores takes its time
    record_property("axes", layouts.axes(config))
    record_property("error", error)
    assert error <= BOUND


@pytest.mark.matrix
def test_every_two_values_meet():
    """Those of cases that were found otherwise, namely drawn: the rule of what is legal together leaves nothing out."""
    cases, draw = cover(), random.Random(1)
    assert len(cases) >= 300 and len(set(map(name, cases))) == len(cases)
    covered = {pair for case in cases for pair in pairs(case)}
    assert covered == set(legal_pairs())
    for _ in range(3000):
        drawn = nearest(tuple(draw.randrange(len(values)) for values in SETTINGS.values()))
        assert covered.issuperset(pairs(drawn)), name(drawn)


@pytest.mark.matrix
def test_what_is_never_legal():
    """Sizes that do not divide heads, the sequence or experts, and chunks for schedules that have their own number of them."""
    used = [set(numbers) for numbers in zip(*cover(), strict=True)]
    refused = {
        words(value)
        for values, numbers in zip(SETTINGS.values(), used, strict=True)
        for number, value in enumerate(values)
        if number not in numbers
    }
    assert refused == {
        *("cp5", "cp7", "tp5", "tp7", "tp8", "experts-ep5", "experts-ep7"),
        *(f"{schedule}-chunks3" for schedule in schedules.NAMES if schedule not in ("interleaved", "bfs")),
    }
