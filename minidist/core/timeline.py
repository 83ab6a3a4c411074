"""The timeline: what every rank worked on, sent and waited for, drawn from the tapes. Serves lessons, traces and pipelines.

Import it where a figure is drawn and not before: it brings matplotlib, which no training run needs.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minidist.core import bars, spans
from minidist.core.tape import Line, Tape

# Okabe and Ito's colours, told apart with any colour vision; the hatch tells them apart without colours.
LOOKS = {
    "all_reduce": ("#56B4E9", ""),
    "all_gather": ("#E69F00", "//"),
    "reduce_scatter": ("#009E73", "\\\\"),
    "all_to_all": ("#F0E442", "xx"),
    "broadcast": ("#CC79A7", ".."),
    "gather": ("#D55E00", "--"),
    "send": ("#FFFFFF", "///"),
    "recv": ("#BBBBBB", "\\\\\\"),
    "barrier": ("#777777", "||"),
    "backward": ("#FFFFFF", "oo"),  # no operation: what a lesson draws beside them
}
OTHER = ("#DDDDDD", "++")
UNITS = {"ms": 1e3, "s": 1.0, "units": 1.0}  # of the time axis -> how many make a second of the tapes
LINES_IN_WORDS = 6  # operations of a rank that the read-out lists one by one; more are summed up


class AltFigure(Figure):
    """A figure that carries its alternative text and shows itself in a notebook with it. No pyplot state."""

    alt: str = ""

    def _repr_html_(self) -> str:
        return picture(self, self.alt)

    def __repr__(self):
        return self.alt or super().__repr__()


def picture(figure: Figure, words: str) -> str:
    """A figure as HTML: a PNG with `words` as its alternative text, and the same words to read under it."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144, bbox_inches="tight")
    source, words = base64.b64encode(image.getvalue()).decode(), html.escape(words, quote=True)
    return (
        f'<figure style="margin:0"><img style="max-width:100%" alt="{words}" src="data:image/png;base64,{source}">'
        f'<figcaption><pre style="white-space:pre-wrap;word-break:normal;margin:0.4em 0">{words}</pre></figcaption></figure>'
    )


def timeline(
    tapes: Sequence[Tape],
    *,
    title: str = "Who talked when",
    labels: Sequence[str] | None = None,
    width: float | None = None,
    height: float | None = None,
    step: int | None = None,
    since: float | None = None,
    until: float | None = None,
    unit: str = "ms",
    peaks: Sequence[int] | None = None,
) -> AltFigure:
    """One row a rank, one bar an operation from launch to finish, in ms since the first launch of any rank.

    `tapes` comes in rank order and its times from one clock (time.monotonic() of one host); `labels` name its rows
    otherwise, each `height` inches high, in a figure `width` inches wide. Operations under way at once lie in lanes below
    each other. One that never finished runs to the right edge with an open end. Teaching checks are left out.

    Where tapes have spans, these lie above the operations of their rank: see `core.bars`. `step`, or `since` and `until` in
    seconds after the first moment, show a part of the tapes. `unit` is "ms", "s", or "units" for a time without one. `peaks`
    has the micro-batches that each rank holds at most. `figure.alt` says the same in words.
    """
    labels = labels or [f"rank {tape.rank}" for tape in tapes]
    if (step, since, until) != (None, None, None):
        tapes = spans.cut(tapes, step=step, since=since, until=until)
    rows, works = [_visible(tape) for tape in tapes], [spans.work(tape) for tape in tapes]
    if not any(rows) and not any(works):
        raise ValueError("the tapes are empty, so there is nothing to draw: run a collective first")
    start, stop = _span(tapes)
    look = bars.Look.of(works, stop - start, any(rows), width, height)
    figure = AltFigure(figsize=(look.width, look.margin + look.height * len(rows)), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    _axis(axes, title, labels, (stop - start) * UNITS[unit], f"{unit} since the first {'start' if any(works) else 'launch'}")
    if any(works):
        bars.draw(axes, tapes, look, start, stop, UNITS[unit])
    for row, lines in enumerate(rows):
        _draw_lines(axes, row, lines, look, (start, stop, UNITS[unit]))
    _legend(figure, axes, works, sorted({line.op for lines in rows for line in lines}, key=lambda op: (op not in LOOKS, op)))
    figure.alt = f"{title}.\n{read_out(tapes, labels, unit=unit, peaks=peaks)}"
    return figure


def _draw_lines(axes: Axes, row: int, lines: Sequence[Line], look: bars.Look, window: tuple[float, float, float]) -> None:
    start, stop, scale = window
    for line, (middle, height) in zip(lines, _lanes(lines, look.lanes), strict=True):
        colour, hatch = LOOKS.get(line.op, OTHER)
        finish = stop if line.finish is None else line.finish
        left, length = (line.launch - start) * scale, max(finish - line.launch, 0.0) * scale
        edge = "black" if line.finish is not None else "none"
        corner = (left, row + middle - height / 2)
        axes.add_patch(Rectangle(corner, length, height, facecolor=colour, hatch=hatch, edgecolor=edge, linewidth=0.8))
        if line.finish is None:
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.annotate(" never finished", (left, row + middle), va="center", fontsize=8, bbox=paper)


def _axis(axes: Axes, title: str, labels: Sequence[str], length: float, label: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, max(length, 1e-3))
    axes.set_xlabel(label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, axes: Axes, works: Sequence[Sequence[spans.Span]], ops: Sequence[str]) -> None:
    """Beside the rows; below them where there is work, whose bars need the width."""
    looks = [LOOKS.get(op, OTHER) for op in ops]
    keys = [Patch(facecolor=c, hatch=h, edgecolor="black", label=op) for op, (c, h) in zip(ops, looks, strict=True)]
    if any(works):
        keys = [*bars.keys(works), *keys]
        columns = min(len(keys), int(figure.get_figwidth() / 1.5))
        figure.legend(handles=keys, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    else:
        axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)


def read_out(
    tapes: Sequence[Tape],
    labels: Sequence[str] | None = None,
    *,
    unit: str = "ms",
    peaks: Sequence[int] | None = None,
) -> str:
    """The timeline in words: a line a row, times in ms since the first launch; with work, the bubble in one line more."""
    labels = labels or [f"rank {tape.rank}" for tape in tapes]
    rows, (worked, bubble) = [_visible(tape) for tape in tapes], spans.in_words(tapes, UNITS[unit], unit, peaks)
    if not any(rows) and not bubble:
        return "no rank has sent anything"
    start, _ = _span(tapes)
    said = []
    for label, lines, text in zip(labels, rows, worked, strict=True):
        sent = _in_words(lines, start, UNITS[unit], unit) if lines or not bubble else ""
        said.append(f"{label}: {'; '.join(part for part in (text, sent) if part) or 'nothing'}")
    return "\n".join([*said, bubble] if bubble else said)


def _visible(tape: Tape) -> list[Line]:
    return [line for line in tape.lines if line.tag != "check"]


def _span(tapes: Sequence[Tape]) -> tuple[float, float]:
    """The first moment and the last; a twentieth more where something never finished, to have room for saying so."""
    shown = [Tape(tape.rank) for tape in tapes]
    for one, tape in zip(shown, tapes, strict=True):
        one.lines, one.spans = _visible(tape), tape.spans
    start, stop = spans.extent(shown)
    return start, stop + 0.05 * (stop - start) if any(line.finish is None for tape in shown for line in tape.lines) else stop


def _lanes(lines: Sequence[Line], room: tuple[float, float]) -> list[tuple[float, float]]:
    """(middle relative to the row, height) of each line's bar: a lane that is free at its launch, the topmost one.

    `room` is the (top, bottom) of all lanes relative to the row.
    """
    free: list[float] = []  # by lane: when its last bar ends
    lanes = []
    for line in lines:
        lane = next((i for i, end in enumerate(free) if end <= line.launch), len(free))
        free[lane : lane + 1] = [float("inf") if line.finish is None else line.finish]
        lanes.append(lane)
    height = (room[1] - room[0]) / max(len(free), 1)
    return [(room[0] + (lane + 0.5) * height, height) for lane in lanes]


def _in_words(lines: Sequence[Line], start: float, scale: float, unit: str) -> str:
    if not lines:
        return "nothing"
    if len(lines) <= LINES_IN_WORDS:
        return ", ".join(_one(line, start, scale, unit) for line in lines)
    parts = []
    for op in dict.fromkeys(line.op for line in lines):
        same = [line for line in lines if line.op == op]
        total = sum(line.finish - line.launch for line in same if line.finish is not None)
        parts.append(f"{len(same)} x {op}, {total * scale:.1f} {unit} in all")
    return ", ".join(parts)


def _one(line: Line, start: float, scale: float, unit: str) -> str:
    launch = (line.launch - start) * scale
    if line.finish is None:
        return f"{line.op} from {launch:.1f} {unit}, never finished"
    return f"{line.op} from {launch:.1f} to {(line.finish - start) * scale:.1f} {unit}"
