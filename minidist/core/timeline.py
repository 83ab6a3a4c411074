"""The timeline: what every rank sent and waited for, drawn from the tapes. Serves lessons, traces and pipelines.

Import it where a figure is drawn and not before: it brings matplotlib, which no training run needs.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
    width: float = 9.0,
    height: float = 0.42,
) -> AltFigure:
    """One row a rank, one bar an operation from launch to finish, in ms since the first launch of any rank.

    `tapes` comes in rank order and its times from one clock (time.monotonic() of one host); `labels` name its rows
    otherwise, each `height` inches high. Operations under way at once lie in lanes below each other. One that never
    finished runs to the right edge with an open end. Teaching checks are left out. `figure.alt` says the same in words.
    """
    labels = labels or [f"rank {tape.rank}" for tape in tapes]
    rows = [_visible(tape) for tape in tapes]
    if not any(rows):
        raise ValueError("the tapes are empty, so there is nothing to draw: run a collective first")
    start, stop = _span(rows)
    figure = AltFigure(figsize=(width, 1.1 + height * len(rows)), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    for row, lines in enumerate(rows):
        for line, (middle, height) in zip(lines, _lanes(lines), strict=True):
            colour, hatch = LOOKS.get(line.op, OTHER)
            finish = stop if line.finish is None else line.finish
            left, length = (line.launch - start) * 1e3, max(finish - line.launch, 0.0) * 1e3
            edge = "black" if line.finish is not None else "none"
            axes.barh(row + middle, length, left=left, height=height, color=colour, hatch=hatch, edgecolor=edge, linewidth=0.8)
            if line.finish is None:
                paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
                axes.annotate(" never finished", (left, row + middle), va="center", fontsize=8, bbox=paper)
    ops = sorted({line.op for lines in rows for line in lines}, key=lambda op: (op not in LOOKS, op))
    keys = [Patch(facecolor=LOOKS.get(op, OTHER)[0], hatch=LOOKS.get(op, OTHER)[1], edgecolor="black", label=op) for op in ops]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max((stop - start) * 1e3, 1e-3))
    axes.set_xlabel("ms since the first launch")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.alt = f"{title}.\n{read_out(tapes, labels)}"
    return figure


def read_out(tapes: Sequence[Tape], labels: Sequence[str] | None = None) -> str:
    """The timeline in words: a line a row, times in ms since the first launch."""
    labels = labels or [f"rank {tape.rank}" for tape in tapes]
    rows = [_visible(tape) for tape in tapes]
    if not any(rows):
        return "no rank has sent anything"
    start, _ = _span(rows)
    return "\n".join(f"{label}: {_in_words(lines, start)}" for label, lines in zip(labels, rows, strict=True))


def _visible(tape: Tape) -> list[Line]:
    return [line for line in tape.lines if line.tag != "check"]


def _span(rows: Sequence[Sequence[Line]]) -> tuple[float, float]:
    lines = [line for row in rows for line in row]
    start = min(line.launch for line in lines)
    stop = max(line.launch if line.finish is None else line.finish for line in lines)
    return start, stop + 0.05 * (stop - start) if any(line.finish is None for line in lines) else stop


def _lanes(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """(middle relative to the row, height) of each line's bar: a lane that is free at its launch, the topmost one."""
    free: list[float] = []  # by lane: when its last bar ends
    lanes = []
    for line in lines:
        lane = next((i for i, end in enumerate(free) if end <= line.launch), len(free))
        free[lane : lane + 1] = [float("inf") if line.finish is None else line.finish]
        lanes.append(lane)
    height = 0.62 / max(len(free), 1)
    return [((lane + 0.5) * height - 0.31, height) for lane in lanes]


def _in_words(lines: Sequence[Line], start: float) -> str:
    if not lines:
        return "nothing"
    if len(lines) <= LINES_IN_WORDS:
        return ", ".join(_one(line, start) for line in lines)
    parts = []
    for op in dict.fromkeys(line.op for line in lines):
        same = [line for line in lines if line.op == op]
        total = sum(line.finish - line.launch for line in same if line.finish is not None)
        parts.append(f"{len(same)} x {op}, {total * 1e3:.1f} ms in all")
    return ", ".join(parts)


def _one(line: Line, start: float) -> str:
    launch = (line.launch - start) * 1e3
    if line.finish is None:
        return f"{line.op} from {launch:.1f} ms, never finished"
    return f"{line.op} from {launch:.1f} to {(line.finish - start) * 1e3:.1f} ms"
