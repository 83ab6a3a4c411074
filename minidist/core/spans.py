"""What ranks worked on: the kinds of work and how each is drawn, a step cut out of a tape, busy and idle time as numbers.

The spans of a pipeline are called as its actions write themselves: F3 is the forward of micro-batch 3, B0.1 the backward of
micro-batch 0 on the rank's chunk 1. A span called "step 7" frames what a rank did in optimizer step 7 and is no work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidist.core.tape import Span, Tape

# Kind -> what it is, colour (Okabe and Ito's), hatch. No two share one, and none has both of an operation's in the timeline.
LOOKS = {
    "F": ("forward", "#0072B2", ""),
    "B": ("backward", "#D55E00", "///"),
    "I": ("backward, input", "#CC79A7", "..."),
    "W": ("backward, weights", "#F0E442", "\\\\\\"),
}
OTHER = ("other work", "#999999", "---")
_ACTION = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")
_STEP = re.compile(r"step (\d+)")


class Part(NamedTuple):
    """A span's name, taken apart."""

    kind: str
    """a key of LOOKS; "" for anything else"""
    micro: int | None
    chunk: int


def part(name: str) -> Part:
    """Kind, micro-batch and chunk of a span called `name`; of one that is no action, ("", None, 0)."""
    found = _ACTION.fullmatch(name)
    return Part(found[1], int(found[2]), int(found[3] or 0)) if found else Part("", None, 0)


def is_step(span: Span) -> bool:
    """Whether a span is the frame of an optimizer step."""
    return _STEP.fullmatch(span.name) is not None


def work(tape: Tape) -> list[Span]:
    """The spans that are work, in order of start: all but the frames of steps."""
    return sorted((span for span in tape.spans if not is_step(span)), key=lambda span: span.start)


def steps(tape: Tape) -> dict[int, Span]:
    """The frames of optimizer steps on this tape, by number."""
    return {int(found[1]): span for span in tape.spans if (found := _STEP.fullmatch(span.name))}


def frame(number: int, start: float, finish: float) -> Span:
    """The frame of an optimizer step; `start` and `finish` in seconds of time.monotonic()."""
    return Span(f"step {number}", start, finish)


def cut(
    tapes: Sequence[Tape], *, step: int | None = None, since: float | None = None, until: float | None = None
) -> list[Tape]:
    """Tapes with only what began in one optimizer step, or from `since` to `until` seconds after the first moment of all.

    ValueError where a tape has no such step, or nothing began in that time.
    """
    first, last = extent(tapes)
    made = []
    for tape in tapes:
        start, stop = first + (since or 0.0), float("inf") if until is None else first + until
        if step is not None:
            frames = steps(tape)
            if step not in frames:
                known = f"it has {', '.join(map(str, frames))}" if frames else "it has no steps, use since= and until="
                raise ValueError(f"step {step} is not on the tape of rank {tape.rank}: {known}")
            start, stop = max(start, frames[step].start), min(stop, frames[step].finish)
        one = Tape(tape.rank)
        one.lines = [line for line in tape.lines if start <= line.launch < stop]
        one.spans = [span for span in tape.spans if start <= span.start < stop]
        made.append(one)
    if not any(tape.lines or tape.spans for tape in made):
        raise ValueError(f"nothing began from {since} to {until} s: the tapes last {last - first:.3g} s")
    return made


def extent(tapes: Iterable[Tape]) -> tuple[float, float]:
    """The first and the last moment on any of the tapes, in seconds of their clock; (0, 0) if they are empty."""
    moments = [(span.start, span.finish) for tape in tapes for span in tape.spans]
    moments += [(line.launch, line.launch if line.finish is None else line.finish) for tape in tapes for line in tape.lines]
    return min((start for start, _ in moments), default=0.0), max((finish for _, finish in moments), default=0.0)


@dataclass(frozen=True)
class Shares:
    """How long ranks worked in the time that a pipeline took, in seconds (or units) of the tapes.

    The time is that from the first start on any rank to the last finish on any; of several steps, their sum, so that what
    lies between the pipelines of two steps counts for nothing. The two bubbles are those of the pipeline's simulator.
    """

    total: float
    ideal: float
    """work of the busiest rank; of several steps, the sum over them"""
    busy: tuple[float, ...]
    """by tape"""

    @property
    def idle(self) -> float:
        """Mean over the ranks of the time that one does nothing."""
        return self.total - sum(self.busy) / len(self.busy)

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time as a share of the ideal time: (p-1)/m for GPipe and 1F1B (Narayanan et al. 2021, section 2.2)."""
        return self.idle / self.ideal if self.ideal else 0.0

    @property
    def bubble_of_total(self) -> float:
        """Idle time as a share of the total: (p-1)/(m+p-1) for GPipe and 1F1B, the bubble rate of Qi et al. 2024."""
        return self.idle / self.total if self.total else 0.0


def shares(tapes: Sequence[Tape]) -> Shares | None:
    """Total and busy time of the work on the tapes; None where there is none."""
    rows, frames = [work(tape) for tape in tapes], [steps(tape) for tape in tapes]
    numbers = sorted(set().union(*frames))
    total, ideal, busy = 0.0, 0.0, [0.0] * len(rows)
    for number in numbers or [None]:
        within = [_within(row, of.get(number)) if numbers else row for row, of in zip(rows, frames, strict=True)]
        if any(within):
            each = [covered((span.start, span.finish) for span in row) for row in within]
            moments = [(span.start, span.finish) for row in within for span in row]
            total += max(finish for _, finish in moments) - min(start for start, _ in moments)
            ideal, busy = ideal + max(each), [sofar + more for sofar, more in zip(busy, each, strict=True)]
    return Shares(total, ideal, tuple(busy)) if any(rows) else None


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The time within at least one of the (start, finish)."""
    total, end = 0.0, float("-inf")
    for start, finish in sorted(intervals):
        total += max(0.0, finish - max(start, end))
        end = max(end, finish)
    return total


def in_words(
    tapes: Sequence[Tape], scale: float = 1e3, unit: str = "ms", peaks: Sequence[int] | None = None
) -> tuple[list[str], str]:
    """(what to say of each row, what to say of all): busy and idle time, the most in flight if given, and the bubble twice."""
    found = shares(tapes)
    if found is None:
        return [""] * len(tapes), ""
    rows = []
    for row, (tape, busy) in enumerate(zip(tapes, found.busy, strict=True)):
        idle, count = found.total - busy, len(work(tape))
        text = (
            f"busy {_short(busy * scale)} of {_short(found.total * scale)} {unit}{_of(busy, found.total)} in {count} actions, "
        )
        text += f"idle {_short(idle * scale)} {unit}{_of(idle, found.total)}"
        rows.append(text + (f", at most {peaks[row]} in flight" if peaks is not None else ""))
    of_ideal, of_total = (f"{share * 100:.1f} %" for share in (found.bubble_of_ideal, found.bubble_of_total))
    return rows, f"bubble: {of_ideal} of the ideal time, which is {of_total} of the total time"


def _short(number: float) -> str:
    """Four digits, and all that stand before the point."""
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def _of(share: float, total: float) -> str:
    return f" ({share / total * 100:.1f} %)" if total else ""


def _within(row: Iterable[Span], whole: Span | None) -> list[Span]:
    return [span for span in row if whole is not None and whole.start <= span.start < whole.finish]
