"""The cases that lesson 7's five tasks are judged on: settings for drive_07, drawn from a seed, the same on every rank."""

from __future__ import annotations

import random

from minidist.course.grading import Case
from minidist.course.tasks import judge_07


def spec(draw: random.Random, n: int, *, steps: int = 2, micros: int = 1, dtype: str = "float64", **more) -> dict:
    """Settings of one case, for drive_07: four layers of odd widths, other numbers of rows on every rank, no two alike."""
    widths = [draw.randint(3, 9) for _ in range(5)]
    rows = [[[draw.randint(1, 4) for _ in range(micros)] for _ in range(steps)] for _ in range(n)]
    settings = {
        "seed": draw.randrange(10**6),
        "widths": widths,
        "rows": rows,
        "dtype": dtype,
        "bucket_bytes": 0,
        "apart": False,
    }
    return settings | more


def case(n: int, settings: dict) -> Case:
    """The same settings on every rank."""
    return Case(n, [[settings] for _ in range(n)])


def hook_cases(seed: int) -> list[Case]:
    """1 to 4 ranks whose weights start apart; float64, and float32 once."""
    draw = random.Random(seed)
    kinds = [(1, "float64"), (2, "float64"), (3, "float64"), (4, "float64"), (2, "float32")]
    return [case(n, spec(draw, n, steps=3, dtype=dtype, apart=True)) for n, dtype in kinds]


def bucket_cases(seed: int) -> list[Case]:
    """Limits that give a few buckets, with a parameter too large for one; both dtypes."""
    draw = random.Random(seed)
    found = []
    for n, dtype in ((1, "float64"), (2, "float64"), (3, "float32"), (4, "float64"), (2, "float32")):
        settings = spec(draw, n, dtype=dtype)
        settings["widths"] = [draw.choice([5, 6, 7]) for _ in range(6)] + [9, 6] + [draw.choice([5, 6, 7]) for _ in range(5)]
        width = judge_07.BYTES[dtype]
        settings["bucket_bytes"] = width * (draw.randrange(47, 50) if n < 3 else draw.randrange(40, 44))
        found.append(case(n, settings))
    return found


def overlap_cases(seed: int) -> list[Case]:
    """Small buckets at 1 to 4 ranks; then a step in which rank 0 is held back until the last rank is nearly done."""
    draw = random.Random(seed)
    found = []
    for n, hold in ((1, None), (2, None), (3, None), (4, None), (2, 1), (3, 1)):
        settings = spec(draw, n, hold=hold)
        found.append(case(n, settings | {"bucket_bytes": draw.choice([0, 8 * 30])}))
    return found


def quiet_cases(seed: int) -> list[Case]:
    """Three micro-batches, one, two; the switch around both passes, then around backward alone; an exception in between."""
    draw = random.Random(seed)
    kinds = [(1, {}), (2, {}), (3, {}), (4, {}), (2, {"switch": "around backward"}), (2, {"raises": 0})]
    found = []
    for n, more in kinds:
        settings = spec(draw, n, steps=3, micros=3, **more)
        for rows in settings["rows"]:
            rows[1], rows[2] = rows[1][:1], rows[2][:2]  # three, one, two
        found.append(case(n, settings))
    return found


def odd_cases(seed: int) -> list[Case]:
    """Tied and frozen weights; a buffer that each rank updates; a branch some ranks take; a rank without a batch."""
    draw = random.Random(seed)
    found = []
    for n in (1, 2, 3, 4):
        settings = spec(draw, n, odd=["tied", "frozen"], bucket_bytes=8 * 40)
        a, b = draw.sample(range(4, 9), 2)
        found.append(case(n, settings | {"widths": [draw.randint(3, 9), a, b, a, b]}))  # layers 1 and 3 have one shape
    for n in (2, 3):
        found.append(case(n, spec(draw, n, steps=3, odd=["buffer"], apart=True, bucket_bytes=8 * 40)))
    for n in (2, 3):
        branch = [[rank == 0, rank == n - 1, False] for rank in range(n)]  # one rank, another, nobody
        found.append(case(n, spec(draw, n, steps=3, odd=["branch"], branch=branch, bucket_bytes=8 * 40)))
    idle = spec(draw, 2, bucket_bytes=8 * 40)
    idle["rows"][1][0] = []  # rank 1 has no batch in the first step
    return [*found, case(2, idle)]
