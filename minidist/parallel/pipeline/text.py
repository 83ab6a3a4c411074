"""Schedules as text: a form that a person can write, and the CSV of torch.distributed.pipelining.

    # 1F1B on two ranks; the second line of actions is the second rank's
    F0 F1 B0 F2 B1 B2
    F0 B0 F1 B1 F2 B2

A word is an action as it writes itself (`F0`, on the rank's second chunk `F0.1`). A line `stages: 0 3 | 1 2` says which stages
each rank holds, by chunk; without it they are dealt out round and round, for as many chunks as the words speak of.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from minidist.parallel.pipeline.actions import Action, Schedule, loop

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_OTHER = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|(?:UNSHARD|RESHARD|REDUCE_GRAD)\d*)")  # what follows from the actions


def dumps(schedule: Schedule) -> str:
    """The text form; `loads` reads it again. The name stands in a comment."""
    lines = [f"# {schedule.name}"]
    if schedule.stages != loop(schedule.ranks, _chunks(schedule.lists)):
        lines.append("stages: " + " | ".join(" ".join(map(str, row)) for row in schedule.stages))
    return "\n".join(lines + [" ".join(map(str, actions)) for actions in schedule.lists]) + "\n"


def loads(text: str, name: str = "written") -> Schedule:
    """The schedule that a text describes; not yet verified. ValueError, with line and word, for what is not understood."""
    lists, stages = [], None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if words[:1] == ["stages:"]:
            if stages is not None:
                raise ValueError(f"line {number}, word 1: the stages have been given before; keep one such line")
            stages = _stages(words[1:], number)
        elif words:
            lists.append(tuple(_parsed(word, number, place) for place, word in enumerate(words, 1)))
    if not lists:
        raise ValueError("no rank's actions in this text: write one line a rank, such as F0 F1 B0 B1")
    if stages is not None and len(stages) != len(lists):
        raise ValueError(
            f"stages for {len(stages)} ranks, but actions for {len(lists)}: give both for every rank, with | between"
        )
    return Schedule(name, tuple(lists), stages or loop(len(lists), _chunks(lists)))


def to_csv(schedule: Schedule) -> str:
    """Torch's form: a line a rank, and in it cells such as 2F0: the stage among all, the kind, the micro-batch."""
    rows = zip(schedule.lists, schedule.stages, strict=True)
    return "".join(",".join(f"{stages[a.chunk]}{a.kind}{a.micro}" for a in actions) + "\n" for actions, stages in rows)


def from_csv(text: str, name: str = "csv") -> Schedule:
    """A schedule from torch's form, with or without transfers; not yet verified.

    Empty cells, transfers, and the gathering and freeing of weights are left out, as all of that follows from the actions. A
    pair that torch would run at the same time, (2F0;1B3)OVERLAP_F_B, becomes two actions one after the other. Chunks are a
    rank's stages in rising order. ValueError, with line and cell, for what is not understood.
    """
    found: list[list[tuple[int, str, int]]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        if row:
            found.append([one for place, cell in enumerate(row, 1) for one in _cells(cell.strip(), number, place)])
    if not any(found):
        raise ValueError("no action in this CSV: write one line a rank, with cells such as 0F0")
    stages = tuple(tuple(sorted({stage for stage, _, _ in row})) for row in found)
    rows = zip(found, stages, strict=True)
    lists = tuple(tuple(Action(kind, micro, held.index(stage)) for stage, kind, micro in row) for row, held in rows)
    return Schedule(name, lists, stages)


def read(path: str | Path) -> Schedule:
    """The schedule in a file: torch's form in a .csv, the text form in any other. ValueError that starts with the path."""
    path = Path(path)
    try:
        text = path.read_text()
        return (from_csv if path.suffix == ".csv" else loads)(text, path.stem)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: name a file that holds a schedule") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parsed(word: str, line: int, place: int) -> Action:
    try:
        return Action.parse(word)
    except ValueError as error:
        raise ValueError(f"line {line}, word {place}: {error}") from None


def _stages(words: list[str], line: int) -> tuple[tuple[int, ...], ...]:
    """From the words after `stages:`."""
    rows: list[tuple[int, ...]] = [()]
    for place, word in enumerate(words, 2):
        if word == "|":
            rows.append(())
        elif word.isdecimal():
            rows[-1] += (int(word),)
        else:
            raise ValueError(f"line {line}, word {place}: {word!r} is no stage: write numbers, with | between two ranks")
    return tuple(rows)


def _cells(cell: str, line: int, place: int) -> list[tuple[int, str, int]]:
    """The actions of a CSV cell: (stage, kind, micro-batch); none, one, or two of an overlapped pair."""
    if not cell or _OTHER.fullmatch(cell):
        return []
    if pair := _PAIR.fullmatch(cell):
        return [one for part in pair[1].split(";") for one in _cells(part.strip(), line, place)]
    if found := _CELL.fullmatch(cell):
        return [(int(found[1]), found[2], int(found[3]))]
    raise ValueError(
        f"line {line}, cell {place}: {cell!r} is no action: write the stage, F, B, I or W, and the micro-batch: 2F0"
    )


def _chunks(lists) -> int:
    """Chunks that the actions speak of."""
    return 1 + max((action.chunk for actions in lists for action in actions), default=0)
