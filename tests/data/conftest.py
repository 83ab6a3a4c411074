"""Small token files whose tokens say where they come from."""

from pathlib import Path

import numpy as np
import pytest

from minidist.data import TokenFile


@pytest.fixture
def numbered(tmp_path: Path):
    """numbered(n): a token file in which token i is i + 1 (no separator inside)."""

    def make(n: int) -> TokenFile:
        path = tmp_path / f"n{n}"
        TokenFile.build(path, [np.arange(1, n)], vocab=n + 1, separator=0, tokenizer="byte")
        file = TokenFile(path)
        file.array = np.arange(1, n + 1)  # the separators at both ends would only complicate the arithmetic
        return file

    return make
