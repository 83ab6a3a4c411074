"""From a schedule to programs: where each rank sends and receives.

`lower` gives an order that no rank can get stuck in, however its sends and receives wait; `early` lets them overlap with work.
"""

from __future__ import annotations

from minidist.parallel.pipeline.actions import Action, Program, Schedule, Transfer
from minidist.parallel.pipeline.simulate import makes, placed, simulate


def lower(schedule: Schedule) -> tuple[Program, ...]:
    """Every rank's actions with its transfers between them. No transfer between two chunks of one rank.

    The schedule is run in the simulator with unit times. A transfer happens at the moment its producing action ends: the
    sender has its send right after that action, and the receiver has its recv before its first action that starts at that
    moment or later, so before the one that needs it.

    Why this cannot deadlock, even where a send returns only when it has been received: put all events of all ranks in one
    order, by time, transfers before the actions that start then, and transfers of one moment by the rank that sends, which has
    one at most. A transfer is one event of two ranks. Each program is that order with the events of other ranks left out, so
    whichever event is the first not yet done, every rank that it concerns has come to it. For the same reason two ranks always
    agree on the order of what goes between them.

    Raises ScheduleError where the schedule cannot be run.
    """
    places, stages, timeline = schedule.places, placed(schedule), simulate(schedule)
    events: list[list[tuple]] = [[] for _ in schedule.lists]  # by rank: ((moment, 0 for a transfer or 1), event)
    for rank, (actions, row) in enumerate(zip(schedule.lists, timeline.spans, strict=True)):
        for action, stage, span in zip(actions, stages[rank], row, strict=True):
            events[rank].append(((span.start, 1), action))
            result = makes(action, stage)
            towards = stage + (1 if action.kind == "F" else -1)
            if result is None or towards not in range(len(places)):
                continue
            peer, chunk = places[towards]
            if peer != rank:
                kind, moment = result[0], (span.finish, 0)
                events[rank].append((moment, Transfer("send", kind, action.micro, action.chunk, peer)))
                events[peer].append((moment, Transfer("recv", kind, action.micro, chunk, rank)))
    return tuple(tuple(event for _, event in sorted(row, key=lambda pair: pair[0])) for row in events)  # keeps what is equal


def early(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """The same programs with every recv one action earlier: before the action during which it arrives.

    This is the form to run where a transfer is launched and goes on by itself, and an action waits for what it works on.
    Receives keep their order, and so do sends, so the two ends of each direction of each pair agree; but a recv may now stand
    before a send that the other side needs first, so the two directions must not queue behind each other.
    """
    return tuple(_early(program) for program in programs)


def _early(program: Program) -> Program:
    gaps: list[tuple[list, list]] = [([], [])]  # before each action, and after the last: sends, receives
    actions = [op for op in program if isinstance(op, Action)]
    for op in program:
        if isinstance(op, Action):
            gaps.append(([], []))
        else:
            gaps[-1][op.op == "recv"].append(op)
    moved = [gaps[0][1]]  # nothing is earlier than the first action
    for place, (sends, _) in enumerate(gaps):
        moved.append([*sends, *(gaps[place + 1][1] if place + 1 < len(gaps) else [])])
    first, *rest = moved
    out = [*first]
    for place, transfers in enumerate(rest):
        out += transfers + actions[place : place + 1]
    return tuple(out)


def forward_only(schedule: Schedule | tuple[tuple[int, ...], ...], micro_batches: int) -> Schedule:
    """Forwards alone, for evaluation: over the stages of a schedule, or over `stages` by rank and chunk.

    A rank does them in the order in which they could start if micro-batches entered one a second and a stage took one; of two
    that could at the same moment, the older micro-batch's first.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches = {micro_batches}: give at least 1")
    stages = schedule.stages if isinstance(schedule, Schedule) else schedule
    rows = (
        sorted((micro + stage, micro, chunk) for chunk, stage in enumerate(row) for micro in range(micro_batches))
        for row in stages
    )
    return Schedule("forward", tuple(tuple(Action("F", micro, chunk) for _, micro, chunk in row) for row in rows), stages)
