"""Any legal layout trains like one process: a few that this run has drawn. The whole matrix is in test_matrix.py.

A failure is shrunk to few ranks with few settings, and printed with the seed that draws it again.
"""

import random

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from parity.harness import compare
from parity.layouts import SETTINGS, Case, configuration, name, nearest, shape

from minidist.core.layout import AXES

LIKELY = SETTINGS | {"model": SETTINGS["model"][:6]}  # more than 4 ranks along ep are refused in most shapes
QUICK = LIKELY | {"batch": SETTINGS["batch"][:2]}  # 8 micro-batches take too long here
SIZES = st.sampled_from((1, 2, 1, 2, 1, 2, 3, 4))
CASES = st.builds(
    lambda sizes, others: nearest((shape(sizes), *others)),
    st.tuples(*[SIZES] * len(AXES)),
    st.tuples(*(st.integers(0, len(values) - 1) for values in list(QUICK.values())[1:])),
)
SEED: list[int] = []
TRIED: dict[Case, Exception | None] = {}
"""case -> how it failed; many draws are refused into the same one"""


def pytest_generate_tests(metafunc):
    """The seed: a new one unless there is one on the command line."""
    stated = metafunc.config.getoption("--hypothesis-seed")
    SEED[:] = [random.randrange(10**9) if stated in (None, "random") else int(stated)]
    seed(SEED[0])(metafunc.function)


@pytest.mark.timeout(900)  # it takes long only where there is something to shrink
@settings(
    max_examples=6,
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=CASES)
def test_trains_like_one_process(case, reference):
    note(f"{name(case)}: --hypothesis-seed={SEED[0]} draws it again")
    if case not in TRIED:
        try:
            compare(configuration(case), reference, timeout_s=240)  # 8 ranks on two busy cores
            TRIED[case] = None
        except Exception as error:
            TRIED[case] = error
    if TRIED[case]:
        raise TRIED[case]
