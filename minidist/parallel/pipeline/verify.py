"""The verifier: a schedule that passes can be run, by any runtime that keeps each rank's order. Nothing is started for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.parallel.pipeline.actions import Action, Program, Schedule, ScheduleError, Transfer
from minidist.parallel.pipeline.program import lower
from minidist.parallel.pipeline.simulate import Need, at, in_flight_peak, makes, needs, placed

WHOLE, SPLIT = frozenset("B"), frozenset("IW")  # the two ways to do a backward


@dataclass(frozen=True)
class Report:
    """What `verify` found out about a schedule that is right."""

    ranks: int
    stages: int
    micro_batches: int
    split: bool
    """some backward is done in two parts, I and W"""
    peaks: tuple[int, ...]
    """by rank: most activations alive at once, each that of one micro-batch in one chunk (Timeline.in_flight_peak)"""
    programs: tuple[Program, ...]
    """the schedule with its transfers (program.lower)"""


def verify(schedule: Schedule, stages: int | None = None, *, forward_only: bool = False) -> Report:
    """Refuse a schedule that cannot be run, or would not do all the work of a step once.

    Every stage is held by one rank. Every stage does one forward of every micro-batch, and one backward, whole or split, in
    that order (with `forward_only`: no backward at all). The ranks never come to wait for each other; and their programs, with
    the transfers put in, come to an end even where a send returns only when it has been received.

    `stages` is how many there have to be, where that is known. Raises ScheduleError, which names the action, its rank, and its
    place in that rank's list.
    """
    placed(schedule)  # every action makes sense by itself
    count = len(schedule.places)
    if stages is not None and stages != count:
        raise ScheduleError(f"the schedule is one of {count} stages, the model is cut into {stages}: cut it into {count}")
    if not schedule.micro_batches:
        raise ScheduleError("no action in any list: a step has at least one micro-batch")
    for rank, actions in enumerate(schedule.lists):
        _expect_all(rank, actions, len(schedule.stages[rank]), schedule.micro_batches, forward_only)
    programs = lower(schedule)
    run_rendezvous(programs, schedule.stages)
    split = any(action.kind == "I" for actions in schedule.lists for action in actions)
    return Report(schedule.ranks, count, schedule.micro_batches, split, in_flight_peak(schedule), programs)


def _expect_all(rank: int, actions: Sequence[Action], chunks: int, micro_batches: int, forward_only: bool) -> None:
    """One F and one B, or I and W, of every micro-batch in every chunk of a rank, and in that order."""
    found: dict[Action, int] = {}
    for number, action in enumerate(actions, 1):
        if action in found:
            raise ScheduleError(
                f"{at(action, rank, number)}: it has been done, as number {found[action]}; leave one of them out"
            )
        found[action] = number
    for chunk in range(chunks):
        for micro in range(micro_batches):
            f, b, i, w = (Action(kind, micro, chunk) for kind in "FBIW")
            if f not in found:
                raise ScheduleError(f"{f} is missing in rank {rank}'s list: a step of {micro_batches} micro-batches has it")
            _expect_backward(rank, found, {a.kind: a for a in (b, i, w) if a in found}, f, forward_only)
            for before, after in ((f, b), (f, i), (i, w)):
                if found.get(before, 0) > found.get(after, len(actions)):
                    where = at(after, rank, found[after])
                    raise ScheduleError(
                        f"{where}: it works on what {before} leaves, which comes later, as number {found[before]}"
                    )


def _expect_backward(rank: int, found: dict[Action, int], kinds: dict[str, Action], f: Action, forward_only: bool) -> None:
    """Refuse a backward that is missing, done twice, or half done."""
    have = frozenset(kinds)
    if have == (frozenset() if forward_only else WHOLE) or (have == SPLIT and not forward_only):
        return
    if not have:
        b, i, w = (Action(kind, f.micro, f.chunk) for kind in "BIW")
        raise ScheduleError(f"{at(f, rank, found[f])}: its backward is missing; add {b}, or {i} and {w}")
    last = max(kinds.values(), key=found.__getitem__)
    if forward_only:
        wrong = "this is a schedule of forwards alone, which has no backward"
    elif have >= WHOLE:
        wrong = f"{kinds['B']} is the whole backward of this micro-batch already; keep it alone, or split it into I and W"
    else:
        other = Action("W" if last.kind == "I" else "I", f.micro, f.chunk)
        wrong = f"half a backward, {other} is missing; add it, or write {Action('B', f.micro, f.chunk)} for the whole"
    raise ScheduleError(f"{at(last, rank, found[last])}: {wrong}")


def run_rendezvous(programs: Sequence[Program], stages: tuple[tuple[int, ...], ...] | None = None) -> None:
    """Run programs where both a send and its recv return only when the other is there too: the strictest way to send.

    Raises ScheduleError where the ranks come to a stop before the end, or a recv meets the send of something else. Given the
    `stages` by rank and chunk, also where an action starts, or a send, without what it needs.
    """
    done = [0] * len(programs)
    have: list[set[Need]] = [set() for _ in programs]
    last = max((stage for row in stages or () for stage in row), default=0)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while done[rank] < len(program):
                op = program[done[rank]]
                if isinstance(op, Transfer):
                    if not _meets(programs, done, rank, stages, have):
                        break
                    done[op.peer] += 1
                elif stages:
                    _act(op, rank, done[rank] + 1, stages[rank][op.chunk], last, have[rank])
                done[rank] += 1
                moved = True
    if any(count < len(program) for count, program in zip(done, programs, strict=True)):
        halted = [
            f"rank {rank} stands at {program[count]} (number {count + 1} of its program)"
            if count < len(program)
            else f"rank {rank} is at its end"
            for rank, (count, program) in enumerate(zip(done, programs, strict=True))
        ]
        raise ScheduleError(f"no rank can go on where a send returns only when received: {'; '.join(halted)}")


def _act(action: Action, rank: int, number: int, stage: int, last: int, have: set[Need]) -> None:
    for need in needs(action, stage, last):
        if need not in have:
            what = f"the {'output' if need[0] == 'F' else 'gradient'} of stage {need[1]}"
            raise ScheduleError(f"{at(action, rank, number)}: it works on {what} for micro-batch {need[2]}, which is not there")
    if result := makes(action, stage):
        have.add(result)


def _meets(programs, done: list[int], rank: int, stages, have: list[set[Need]]) -> bool:
    """Whether the transfer that a rank stands at finds its other end now; what it carries is then with the receiver."""
    op = programs[rank][done[rank]]
    if op.peer not in range(len(programs)) or op.peer == rank:
        raise ScheduleError(f"rank {rank} is to {op}: there is no such other rank among {len(programs)}")
    if done[op.peer] == len(programs[op.peer]):
        return False
    other = programs[op.peer][done[op.peer]]
    if not isinstance(other, Transfer) or other.peer != rank or other.op == op.op:
        return False
    send, recv = ((op, rank), (other, op.peer)) if op.op == "send" else ((other, op.peer), (op, rank))
    same = (send[0].kind, send[0].micro) == (recv[0].kind, recv[0].micro)
    if same and stages:
        origin, target = (stages[place][end.chunk] for end, place in (send, recv))
        same, need = target - origin == (1 if op.kind == "F" else -1), (op.kind, origin, op.micro)
        if need not in have[send[1]]:
            raise ScheduleError(f"rank {send[1]} is to {send[0]} before it has made it")
        have[recv[1]].add(need)
    if not same:
        raise ScheduleError(f"rank {send[1]} is to {send[0]}, but rank {recv[1]} is to {recv[0]}: these are two messages")
    return True
