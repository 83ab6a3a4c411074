"""Schedules as pictures: the list alone, or with the times that the simulator found, in the figure of `core.timeline`.

A real run is drawn by `core.timeline.timeline(tapes)` itself. Import it where a figure is drawn: it brings matplotlib.
"""

from __future__ import annotations

from minidist.core.tape import Span, Tape
from minidist.core.timeline import AltFigure, timeline
from minidist.parallel.pipeline.actions import Schedule
from minidist.parallel.pipeline.simulate import Timeline, simulate


def draw(
    what: Schedule | Timeline,
    *,
    title: str | None = None,
    unit: str = "units",
    width: float | None = None,
    height: float | None = None,
) -> AltFigure:
    """One row a rank, one bar an action; micro-batches as numbers, chunks as shades, waiting as grey.

    A schedule is timed with one unit for F, I and W and two for a whole backward, on links that take no time; a `Timeline` has
    times of its own, shown in `unit`: "ms" or "s" where they are seconds, "units" where they are of no clock. `width` and
    `height` of a row are inches. `figure.alt` says the same in words, with the bubble by both its definitions and the most
    micro-batches that each rank holds. ScheduleError for a schedule that comes to a halt.
    """
    found = simulate(what) if isinstance(what, Schedule) else what
    name = f"Schedule {what.name}" if isinstance(what, Schedule) else "Simulated pipeline"
    return timeline(tapes(found), title=title or name, unit=unit, width=width, height=height, peaks=found.in_flight_peak)


def tapes(found: Timeline) -> list[Tape]:
    """A simulated pipeline as one tape a rank, to be drawn or to be written as a trace (`core.trace.write`)."""
    made = []
    for rank, row in enumerate(found.spans):
        made.append(Tape(rank))
        made[-1].spans = [Span(span.name, float(span.start), float(span.finish)) for span in row]
    return made
