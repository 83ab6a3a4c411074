"""The bars of work in the timeline: colour and pattern by kind, shade by chunk, the micro-batch's number where it fits.

A rank's strip is grey where it is idle. Import it where a figure is drawn and not before: it brings matplotlib.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from minidist.core import spans
from minidist.core.spans import Span
from minidist.core.tape import Tape

IDLE = "#E8E8E8"
SIZES = (8.0, 5.0)  # points of the largest and the smallest number in a bar
DIGIT = 0.64  # width of a digit, in sizes
MARGIN = 2.0  # points that a number leaves free of its bar


@dataclass(frozen=True)
class Look:
    """The measures of a timeline. Heights within a row are relative to its middle, a row being 1 high, downwards."""

    width: float
    """inches of the whole figure"""
    height: float
    """inches of a row"""
    margin: float
    """inches of title, axis and legend"""
    work: tuple[float, float]
    """top and bottom of the work of a row"""
    lanes: tuple[float, float]
    """top and bottom of the operations of a row"""

    @classmethod
    def of(cls, works: Sequence[Sequence[Span]], total: float, talk: bool, width: float | None, height: float | None) -> Look:
        """Measures for rows of work over `total` seconds, with operations under them if `talk`; None takes what suits."""
        if not any(works):
            return cls(width or 9.0, height or 0.42, 1.1, (0.0, 0.0), (-0.31, 0.31))
        lengths = sorted(span.finish - span.start for row in works for span in row)
        usual = lengths[len(lengths) // 4] or total or 1.0  # as long as most forwards
        width = width or min(16.0, max(9.0, 1.5 + 0.125 * total / usual))
        work, lanes = ((-0.4, 0.06), (0.09, 0.4)) if talk else ((-0.38, 0.38), (0.0, 0.0))
        return cls(width, height or (0.72 if talk else 0.42), 1.45, work, lanes)

    def points(self, share: float) -> float:
        """Points of a share of the time axis, roughly: labels and margins take an inch."""
        return (self.width - 1.0) * 72 * share


def draw(axes: Axes, tapes: Sequence[Tape], look: Look, start: float, stop: float, scale: float) -> None:
    """The work of each tape in its row, from `start` to `stop` seconds, `scale` units of the axis a second."""
    chunks = _chunks([spans.work(tape) for tape in tapes])
    size = _size(tapes, look, stop - start)
    top, thick = look.work[0], look.work[1] - look.work[0]
    for row, tape in enumerate(tapes):
        place = (row + top, thick)
        axes.broken_barh([(0, (stop - start) * scale)], place, facecolor=IDLE, edgecolor="none", zorder=0.6)
        groups = defaultdict(list)
        for span in spans.work(tape):
            kind, micro, chunk = spans.part(span.name)
            groups[kind, chunk].append(((span.start - start) * scale, (span.finish - span.start) * scale))
            text = span.name if micro is None else str(micro)
            room = look.points((span.finish - span.start) / (stop - start)) if stop > start else 0.0
            if room >= len(text) * DIGIT * size + MARGIN - 1e-6:
                _number(axes, text, (groups[kind, chunk][-1], row + top + thick / 2), size, shade(kind, chunk, chunks))
        for (kind, chunk), places in groups.items():
            face, hatch = shade(kind, chunk, chunks), spans.LOOKS.get(kind, spans.OTHER)[2]
            if hatch:  # the pattern apart from the frame, which is to be darker
                axes.broken_barh(places, place, facecolor=face, edgecolor=_ink(face), hatch=hatch, linewidth=0, zorder=1)
            axes.broken_barh(places, place, facecolor="none" if hatch else face, edgecolor="black", linewidth=0.6, zorder=1.1)
    for number, left in sorted(_steps(tapes).items()):
        axes.axvline((left - start) * scale, color="black", linestyle="--", linewidth=0.8, zorder=2)
        axes.annotate(
            f" step {number}", ((left - start) * scale, 1.0), xycoords=("data", "axes fraction"), fontsize=8, in_layout=False
        )
    if _steps(tapes):
        axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=11, pad=15)


def keys(works: Sequence[Sequence[Span]]) -> list[Patch]:
    """What the legend says of work: the kinds that are there, idle time, and shades where ranks have several chunks."""
    parts = [spans.part(span.name) for row in works for span in row]
    there, chunks = {part.kind for part in parts}, _chunks(works)
    found = []
    for kind in [*spans.LOOKS, ""]:
        if kind in there:
            words, colour, hatch = spans.LOOKS.get(kind, spans.OTHER)
            found.append(Patch(facecolor=colour, hatch=hatch, edgecolor="black", label=f"{kind} {words}".strip()))
    found.append(Patch(facecolor=IDLE, edgecolor="none", label="idle"))
    if chunks > 1:
        found += [
            Patch(facecolor=_paler("#555555", chunk, chunks), edgecolor="black", label=f"chunk {chunk}")
            for chunk in range(chunks)
        ]
    return found


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a kind of work on a chunk: the later of `chunks`, the paler."""
    return _paler(spans.LOOKS.get(kind, spans.OTHER)[1], chunk, chunks)


def _paler(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    white = 0.68 * chunk / max(chunks - 1, 1)
    return tuple(x + (1 - x) * white for x in to_rgb(colour))


def _ink(face: tuple[float, float, float]) -> tuple[float, float, float]:
    """The colour of a pattern on a bar: dark enough to be seen, pale enough to leave the number readable."""
    return tuple(0.55 * x for x in face)


def _chunks(works: Sequence[Sequence[Span]]) -> int:
    return 1 + max((spans.part(span.name).chunk for row in works for span in row), default=0)


def _steps(tapes: Sequence[Tape]) -> dict[int, float]:
    """Step -> when the first rank began it."""
    begun: dict[int, float] = {}
    for tape in tapes:
        for number, span in spans.steps(tape).items():
            begun[number] = min(span.start, begun.get(number, span.start))
    return begun


def _size(tapes: Sequence[Tape], look: Look, total: float) -> float:
    """One size for all numbers: the largest that fits all but the narrowest bars, within SIZES and the bars' height."""
    tallest = 0.7 * 72 * look.height * (look.work[1] - look.work[0])
    fits = [
        (look.points((span.finish - span.start) / total) - MARGIN) / (DIGIT * len(str(spans.part(span.name).micro)))
        for tape in tapes
        for span in spans.work(tape)
        if total and spans.part(span.name).micro is not None
    ]
    usual = sorted(fits)[len(fits) // 8] if fits else SIZES[0]
    return max(min(SIZES[0], tallest, usual), SIZES[1])


def _number(
    axes: Axes, text: str, place: tuple[tuple[float, float], float], size: float, face: tuple[float, float, float]
) -> None:
    (left, length), middle = place
    dark = 0.2126 * face[0] + 0.7152 * face[1] + 0.0722 * face[2] < 0.42  # then white is the clearer one
    paper = {"facecolor": face, "edgecolor": "none", "pad": 0.4}
    axes.text(
        left + length / 2,
        middle,
        text,
        ha="center",
        va="center_baseline",
        fontsize=size,
        color="white" if dark else "black",
        bbox=paper,
        zorder=3,
        clip_on=True,
        in_layout=False,  # it lies within the axes: measuring a thousand of them would take longer than drawing them
    )
