"""From settings to a schedule: what `layout.schedule` and `layout.chunks` mean for a number of micro-batches.

Nothing is remembered here: a schedule's file may be edited between two runs of one process.
"""

from __future__ import annotations

from pathlib import Path

from minidist.core.layout import Layout
from minidist.parallel.pipeline import schedules, text
from minidist.parallel.pipeline.actions import Program, Schedule, ScheduleError
from minidist.parallel.pipeline.program import early, forward_only, lower
from minidist.parallel.pipeline.verify import verify


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """The verified schedule of a step of `micro_batches`. ValueError, with the remedy, where there is none."""
    if not _is_file(layout):
        made = schedules.make(_name(layout), layout.pp, micro_batches, _chunks(layout))
    else:
        made = _read(layout)
        if made.micro_batches != micro_batches:
            raise ValueError(
                f"layout.schedule = {layout.schedule}: written for {made.micro_batches} micro-batches, a step of this run has "
                f"{micro_batches}: change train.global_batch or train.micro_batch, or the file"
            )
    try:
        verify(made)
    except ScheduleError as error:
        raise ScheduleError(f"layout.schedule = {layout.schedule}: {error}") from None
    return made


def stages_by_rank(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """By place on the pp axis, the stages that it holds, by chunk; the same for every number of micro-batches."""
    return _read(layout).stages if _is_file(layout) else schedules.stages_of(_name(layout), layout.pp, _chunks(layout))


def programs(layout: Layout, micro_batches: int) -> tuple[Program, ...]:
    """What every rank does in a step, transfers included."""
    return early(lower(schedule_of(layout, micro_batches)))


def forward_programs(layout: Layout, micro_batches: int) -> tuple[Program, ...]:
    """What every rank does to bring micro-batches through the model once, for evaluation."""
    return early(lower(forward_only(stages_by_rank(layout), micro_batches)))


def splits(layout: Layout) -> bool:
    """Whether the schedule has backwards in two."""
    some = _read(layout) if _is_file(layout) else schedules.make(_name(layout), layout.pp, 2 * layout.pp, _chunks(layout))
    return any(action.kind == "I" for actions in some.lists for action in actions)


def _name(layout: Layout) -> str:
    return layout.schedule if layout.pp > 1 else "1f1b"


def _chunks(layout: Layout) -> int:
    if layout.pp == 1:
        return 1
    return layout.chunks or (2 if layout.schedule in ("interleaved", "bfs", "zb-v", "dualpipe-v") else 1)


def _is_file(layout: Layout) -> bool:
    return layout.pp > 1 and layout.schedule not in schedules.NAMES


def _read(layout: Layout) -> Schedule:
    path = Path(layout.schedule)
    if not path.is_file():
        raise ValueError(f"layout.schedule = {layout.schedule!r}: neither a file nor one of {', '.join(schedules.NAMES)}")
    try:
        found = text.read(path)
    except ValueError as error:
        raise ValueError(f"layout.schedule = {layout.schedule}: {error}") from None
    if found.ranks != layout.pp:
        raise ValueError(
            f"layout.schedule = {layout.schedule}: written for {found.ranks} ranks, but layout.pp = {layout.pp}: "
            f"use layout.pp = {found.ranks}, or another schedule"
        )
    if layout.chunks and any(len(held) != layout.chunks for held in found.stages):
        raise ValueError(
            f"layout.chunks = {layout.chunks}: the file {layout.schedule} says how many stages a rank holds, leave it out"
        )
    return found
