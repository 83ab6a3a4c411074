"""The figures of a run, one function each with its unit, and the file they are written to.

Every figure is that of the whole job, not of the rank that happens to write it: callers pass sums over all ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def mean_loss(loss_sum: float, tokens: int) -> float | None:
    """Loss in nats a token: the sum over all tokens of all ranks divided once. None where no token was valid."""
    return loss_sum / tokens if tokens else None


def perplexity(loss_sum: float, tokens: int) -> float | None:
    """exp(nats a token), of the whole sum: never a mean of per-rank perplexities. None where no token was valid."""
    if not tokens:
        return None
    mean = loss_sum / tokens
    return math.exp(mean) if mean < 709 else math.inf  # exp(710) leaves float64


def tokens_per_s(tokens: int, seconds: float) -> float:
    """Tokens a second of the whole job, from the tokens of all ranks and the wall time of the step."""
    return tokens / seconds


def mfu(tokens: int, flops_a_token: float, seconds: float, devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation, a share of 1 (PaLM: Chowdhery et al., 2022, appendix B), by `flops.CONVENTION`.

    `flops_a_token` of forward and backward, from `flops.train_flops`; `peak_flops` of one device in FLOPs a second. None
    where the peak is not known: a guess would look like a measurement.
    """
    return tokens * flops_a_token / (seconds * devices * peak_flops) if peak_flops else None


class Writer:
    """`metrics.jsonl`: one JSON object a line, whole lines only, each visible to a reader as soon as it is written.

    Numbers that JSON lacks are written as "NaN", "Infinity" and "-Infinity", which `float()` reads. With `after`, the rows up
    to that step are kept, and those of later steps, which a resumed run takes again, are not.
    """

    def __init__(self, path: Path, after: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read(path) if row["step"] <= after] if after and path.exists() else []
        half = path.with_suffix(".half")
        half.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(half, path)
        # One write of a whole line in append mode: a reader, or a copy after a crash, sees no torn line but the last.
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND, 0o644)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        row = {key: _finite(value) for key, value in row.items()}
        os.write(self._file, (json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file; the rows are in it already."""
        os.close(self._file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line torn by a crash is left out, a damaged one elsewhere is refused."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            if line:
                yield json.loads(line)
        except ValueError:
            if number != len(lines):
                raise ValueError(f"{path}, line {number}: damaged, {line[:60]!r} is not a JSON object") from None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
