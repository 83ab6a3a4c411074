"""Ranks of these tests: none stays behind."""

import pytest

from minidist import ranks


@pytest.fixture(scope="package", autouse=True)
def no_ranks_left():
    yield
    ranks.stop()
