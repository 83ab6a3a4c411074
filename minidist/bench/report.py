"""What a bench says: one row a comparison, from what the ranks saw, as a table and in plain words where we lose."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minidist.bench.measure import Series


class Unequal(Exception):
    """The two sides did not compute the same thing, so their times mean nothing."""


@dataclass(frozen=True)
class Row:
    """One comparison. Ratios are ours / theirs: below 1 we are better."""

    name: str
    peer: str
    size: str
    ranks: int
    pairs: int
    time_ratio: float
    """median of the ratios of the pairs"""
    time_ratio_low: float
    """lower quartile of the ratios of the pairs"""
    time_ratio_high: float
    """upper quartile"""
    ours_s: float
    """median seconds of a step"""
    peer_s: float
    bytes_ratio: float
    ours_bytes: int
    """most bytes that a rank held at once during a step"""
    peer_bytes: int
    loss_difference: float
    """largest relative difference of the losses of any step"""
    loss_bound: float
    """the difference that would have been refused"""


def row(name: str, peer: str, size: str, seen: Sequence[Series], bound: float) -> Row:
    """The row of what the ranks saw, `seen` by rank. Raises Unequal where a loss differs by more than `bound`, relatively.

    A step lasts as long as its slowest rank; a side holds what its fullest rank holds.
    """
    difference = same_losses(name, peer, seen, bound)
    ours, theirs = ([max(step) for step in zip(*(series.seconds[side] for series in seen), strict=True)] for side in (0, 1))
    low, middle, high = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    held = [max(series.peaks[side] for series in seen) for side in (0, 1)]
    return Row(
        name=name,
        peer=peer,
        size=size,
        ranks=len(seen),
        pairs=len(ours),
        time_ratio=middle,
        time_ratio_low=low,
        time_ratio_high=high,
        ours_s=statistics.median(ours),
        peer_s=statistics.median(theirs),
        bytes_ratio=held[0] / held[1],
        ours_bytes=held[0],
        peer_bytes=held[1],
        loss_difference=difference,
        loss_bound=bound,
    )


def same_losses(name: str, peer: str, seen: Sequence[Series], bound: float) -> float:
    """Largest relative difference of our loss and theirs, over all steps and ranks. Raises Unequal above `bound`."""
    worst = 0.0
    for series in seen:
        for number, (ours, theirs) in enumerate(zip(*series.losses, strict=True)):
            difference = abs(ours - theirs) / abs(theirs)
            if not difference <= bound:  # a NaN is not equal either
                raise Unequal(
                    f"{name} and {peer} do not compute the same: the loss of step {number} is {ours:.7g} here and {theirs:.7g} "
                    f"there, {difference:.1e} apart, more than {bound:.0e}. No time is reported; look for the cause with "
                    f"`pytest tests/parity`"
                )
            worst = max(worst, difference)
    return worst


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile), linear between values; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(rows: Sequence[Row]) -> str:
    """Aligned lines for a person."""
    head = (
        "",
        "size",
        "against",
        "ours",
        "torch",
        "time ratio",
        "quartiles",
        "ours held",
        "torch held",
        "bytes ratio",
        "losses",
    )
    lines = [head]
    for one in rows:
        lines.append(
            (
                one.name,
                one.size,
                one.peer,
                f"{one.ours_s:.4f} s",
                f"{one.peer_s:.4f} s",
                f"{one.time_ratio:.3f}",
                f"{one.time_ratio_low:.3f}-{one.time_ratio_high:.3f}",
                f"{one.ours_bytes / 1e6:.2f} MB",
                f"{one.peer_bytes / 1e6:.2f} MB",
                f"{one.bytes_ratio:.3f}",
                f"{one.loss_difference:.0e}",
            )
        )
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    words = 3  # columns of words, the rest are figures
    return "\n".join(
        "  ".join(
            cell.ljust(width) if k < words else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def to_json(rows: Sequence[Any]) -> str:
    """One JSON object a line, one line a row; the rows of any bench."""
    return "\n".join(json.dumps(asdict(one)) for one in rows)


def verdict(rows: Sequence[Row]) -> str:
    """Plain words: every place where we lose, or that there is none."""
    lost = []
    for one in rows:
        if one.time_ratio > 1:
            close = ", within the spread of the pairs" if one.time_ratio_low <= 1 else ""
            lost.append(f"slower: {one.name} {one.size}, {one.time_ratio:.3f} times the step of {one.peer}{close}")
        if one.bytes_ratio > 1:
            lost.append(f"larger: {one.name} {one.size}, {one.bytes_ratio:.3f} times the bytes of {one.peer}")
    if not lost:
        return "We lose nowhere: no median ratio of time or bytes is above 1."
    return "\n".join(["Where we lose:", *(f"  {line}" for line in lost)])
