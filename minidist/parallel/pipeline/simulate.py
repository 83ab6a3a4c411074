"""The simulator: when every action of a schedule starts and ends, given how long each takes and how far apart ranks are.

Ranks work through their lists in order. An action starts when its rank is free and what it works on has arrived; a result
travels while its rank goes on with the next action, so nobody waits for a send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from minidist.core.tape import Span
from minidist.parallel.pipeline.actions import KINDS, Action, Schedule, ScheduleError

Need = tuple[str, int, int]  # a result: "F" (a stage's output) or "B" (the gradient of its input), stage, micro-batch
Link = float | Callable[[int, int], float]


@dataclass(frozen=True)
class Times:
    """Seconds that an action takes: one number for all stages, or one a stage. Any numbers do, Fractions too."""

    F: float | Sequence[float] = 1
    """forward"""
    I: float | Sequence[float] = 1
    """backward for the input"""
    W: float | Sequence[float] = 1
    """backward for the weights"""
    B: float | Sequence[float] | None = None
    """the whole backward; None means I + W"""

    def by_stage(self, stages: int) -> dict[str, list[float]]:
        """Seconds by kind and stage. ValueError for a row that has not `stages` entries, or a negative time."""
        rows = {field.name: getattr(self, field.name) for field in fields(self)}
        rows = {
            kind: list(row) if isinstance(row, Sequence) else [row] * stages for kind, row in rows.items() if row is not None
        }
        for kind, row in rows.items():
            if len(row) != stages:
                raise ValueError(f"times.{kind} has {len(row)} entries for {stages} stages: give one a stage, or one for all")
            if any(seconds < 0 for seconds in row):
                raise ValueError(f"times.{kind} = {min(row)}: give a time of at least 0")
        return {"B": [i + w for i, w in zip(rows["I"], rows["W"], strict=True)], **rows}


UNIT = Times()
"""one second for F, I and W, two for a whole backward"""


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found. Times are in the unit of the times given, from the start of the first action of all.

    There are two bubbles in the literature, and a number without its name says little. Both have the mean idle time of a
    rank, from the start of the step to the end of the last rank, above the line. Where all ranks have the same work, 1F1B and
    GPipe have (p-1)/m of the ideal time (Narayanan et al. 2021) and (p-1)/(m+p-1) of the total (Huang et al. 2019; Qi et al.
    2023 call that the bubble rate).
    """

    spans: tuple[tuple[Span, ...], ...]
    """by rank: its actions, in order"""
    busy: tuple[float, ...]
    """by rank: seconds of work"""
    in_flight_peak: tuple[int, ...]
    """by rank: most activations alive at once, each that of one micro-batch in one chunk: from the start of its F to the end of
    its B, or of its W where backward is split. Without a backward nothing is kept, and one is alive"""
    peak_bytes: tuple[int, ...] | None = None
    """by rank: the same in bytes, where the bytes of a stage were given"""

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(row[-1].finish for row in self.spans if row)

    @property
    def ideal(self) -> float:
        """Work of the busiest rank: with the same stages on the same ranks, no schedule is faster."""
        return max(self.busy)

    @property
    def idle(self) -> float:
        """Mean over the ranks of the time that one does nothing."""
        return self.makespan - sum(self.busy) / len(self.busy)

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time as a share of the ideal time. (makespan - work) / work where all ranks have the same work."""
        return self.idle / self.ideal

    @property
    def bubble_of_total(self) -> float:
        """Idle time as a share of the whole time. (makespan - work) / makespan where all ranks have the same work."""
        return self.idle / self.makespan


def simulate(schedule: Schedule, times: Times = UNIT, link: Link = 0, stage_bytes: Sequence[int] | None = None) -> Timeline:
    """Time a schedule.

    `times` are per stage, so of one chunk where a rank holds several. `link` is what a hidden state or its gradient needs
    from one rank to another: seconds, or a function of (from, to); between chunks of one rank it needs none. `stage_bytes`, of
    one micro-batch's activations by stage, adds `peak_bytes`.

    Raises ScheduleError where the ranks come to wait for each other, or an action is none.
    """
    stages = placed(schedule)
    seconds = times.by_stage(len(schedule.places))
    spans = _run(schedule, stages, seconds, link)
    work = [[seconds[a.kind][s] for a, s in zip(*pair, strict=True)] for pair in zip(schedule.lists, stages, strict=True)]
    peak_bytes = None
    if stage_bytes is not None:
        if len(stage_bytes) != len(schedule.places):
            raise ValueError(f"stage_bytes has {len(stage_bytes)} entries for {len(schedule.places)} stages: give one a stage")
        held = [[stage_bytes[stage] for stage in row] for row in schedule.stages]
        peak_bytes = tuple(map(_peak, schedule.lists, held))
    return Timeline(tuple(map(tuple, spans)), tuple(map(sum, work)), in_flight_peak(schedule), peak_bytes)


def in_flight_peak(schedule: Schedule) -> tuple[int, ...]:
    """By rank: most activations alive at once; see Timeline. It depends on each list alone, on no times."""
    return tuple(_peak(actions, [1] * len(row)) for actions, row in zip(schedule.lists, schedule.stages, strict=True))


def placed(schedule: Schedule) -> list[list[int]]:
    """By rank: the stage of each of its actions. ScheduleError for an action or a stage that makes no sense by itself."""
    if not schedule.lists or len(schedule.lists) != len(schedule.stages):
        raise ScheduleError(f"{len(schedule.lists)} lists for the stages of {len(schedule.stages)} ranks: give a list a rank")
    held = sorted(stage for row in schedule.stages for stage in row)
    for stage in {*held, *range(len(held))}:
        homes = [str(rank) for rank, row in enumerate(schedule.stages) for other in row if other == stage]
        if len(homes) != 1 or stage not in range(len(held)):
            found = f"is held by ranks {', '.join(homes)}" if len(homes) > 1 else "is held by no rank"
            found = found if stage in range(len(held)) else f"is beyond the {len(held)} that there are"
            raise ScheduleError(f"stage {stage} {found}: each of the stages 0 to {len(held) - 1} has to be held once")
    for rank, actions in enumerate(schedule.lists):
        chunks = len(schedule.stages[rank])
        for number, action in enumerate(actions, 1):
            wrong = None
            if action.kind not in KINDS:
                wrong = f"no action is called {action.kind!r}, use one of {', '.join(KINDS)}"
            elif action.chunk not in range(chunks):
                wrong = f"rank {rank} has no chunk {action.chunk}, it holds {chunks}, numbered from 0"
            elif action.micro < 0:
                wrong = "micro-batches are numbered from 0"
            if wrong:
                raise ScheduleError(f"{at(action, rank, number)}: {wrong}")
    return [[row[action.chunk] for action in actions] for row, actions in zip(schedule.stages, schedule.lists, strict=True)]


def at(action: object, rank: int, number: int) -> str:
    """Where an action stands, in words; numbers in a list count from 1."""
    return f"{action} (number {number} of rank {rank}'s list)"


def needs(action: Action, stage: int, last: int) -> list[Need]:
    """The results that an action on this stage works on; `last` is the last stage."""
    if action.kind == "F":
        return [("F", stage - 1, action.micro)] if stage else []
    if action.kind == "W":
        return [("B", stage, action.micro)]
    return [("F", stage, action.micro), *([("B", stage + 1, action.micro)] if stage < last else [])]


def makes(action: Action, stage: int) -> Need | None:
    """The result of an action that others wait for; none does for W."""
    return None if action.kind == "W" else ("F" if action.kind == "F" else "B", stage, action.micro)


def _run(schedule: Schedule, stages: list[list[int]], seconds: dict[str, list[float]], link: Link) -> list[list[Span]]:
    """Every rank goes as far as it can, in turns, until none can go further."""
    homes = [rank for rank, _ in schedule.places]
    last = len(homes) - 1
    made: dict[Need, float] = {}  # when a result came to be
    spans: list[list[Span]] = [[] for _ in schedule.lists]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            row, free = spans[rank], spans[rank][-1].finish if spans[rank] else 0
            while len(row) < len(actions):
                action, stage = actions[len(row)], stages[rank][len(row)]
                start = _start(needs(action, stage, last), made, homes, rank, free, link)
                if start is None:
                    break
                free, moved = start + seconds[action.kind][stage], True
                row.append(Span(str(action), start, free))
                if result := makes(action, stage):
                    made[result] = free
    if any(len(row) < len(actions) for row, actions in zip(spans, schedule.lists, strict=True)):
        raise ScheduleError(_stuck(schedule, stages, [len(row) for row in spans], made))
    return spans


def _start(inputs: list[Need], made: dict[Need, float], homes: list[int], rank: int, free: float, link: Link) -> float | None:
    """When an action of `rank` can start that works on `inputs`; None while one of them is not made."""
    for need in inputs:
        if (arrival := made.get(need)) is None:
            return None
        if (home := homes[need[1]]) != rank:
            arrival += link(home, rank) if callable(link) else link
        free = max(free, arrival)
    return free


def _stuck(schedule: Schedule, stages: list[list[int]], done: list[int], made: dict[Need, float]) -> str:
    """What every rank that has not come to its end stands at, and what is missing."""
    words = []
    for rank, (actions, count) in enumerate(zip(schedule.lists, done, strict=True)):
        if count < len(actions):
            action = actions[count]
            kind, stage, micro = next(
                need for need in needs(action, stages[rank][count], len(schedule.places) - 1) if need not in made
            )
            home, chunk = schedule.places[stage]
            what = f"{Action(kind, micro, chunk)}{' or ' + str(Action('I', micro, chunk)) if kind == 'B' else ''}"
            words.append(f"{at(action, rank, count + 1)} waits for {what} of rank {home}")
    return f"no rank can go on: {'; '.join(words)}. Move what is waited for further up, or what waits further down"


def _peak(actions: Sequence[Action], cost: Sequence[int]) -> int:
    """Most that is alive at once on one rank; `cost` of an activation by chunk."""
    freed = {(action.micro, action.chunk) for action in actions if action.kind in "BW"}
    if not freed:
        return max((cost[action.chunk] for action in actions), default=0)
    sign = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(accumulate(sign[action.kind] * cost[action.chunk] for action in actions))
