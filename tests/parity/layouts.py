"""Layouts by the hundred: which settings a run can have, and a choice of cases in which every two of them meet.

A case is one value of each setting below, as its number. The first value is the plain one: all zeros is one rank without
anything. Whether a case is legal the product says: it makes a configuration, which `minidist.train.config.check` refuses
or not. What it does not refuse has to train like one process.

The rule of the sample. All shapes (pp, dp, cp, tp) of at most 8 ranks, 63 before refusals, are the values of one setting, so
that every shape meets every value of every other setting. All cases are millions; `cover` chooses some hundred of them, always
the same, in which any two values of two settings that are legal together occur together at least once. Legal together means:
a case that holds both is legal with some shape and some model, everything else plain.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product

from parity import harness

from minidist.core.layout import AXES, CP_ATTENTION, Layout
from minidist.parallel.config import Recompute
from minidist.parallel.pipeline import schedules, setting
from minidist.train.config import Config, check

RANKS, BATCH, SEQ_LEN = 8, 24, 48  # 48: zig-zag pieces for cp 2, 3, 4, 6 and 8

DENSE = replace(harness.MODEL, width=24, ffn=48)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True, kv_heads=1, vocab=49),  # an uneven vocabulary, and one key head for all ranks of tp
    "experts": replace(
        DENSE,
        kv_heads=2,
        ffn=24,
        experts=24,
        top_k=2,
        shared_ffn=24,
        balance_loss=0.1,
        z_loss=0.01,
        bias_rate=0.02,
    ),
}

SHAPES = sorted((n for n in product(range(1, RANKS + 1), repeat=4) if math.prod(n) <= RANKS), key=lambda n: (math.prod(n), n))
SETTINGS: dict[str, tuple[dict, ...]] = {
    "ranks": tuple({axis: size for axis, size in zip(AXES, shape, strict=True) if size > 1} for shape in SHAPES),
    "model": ({}, {"model": "tied"}, *({"model": "experts"} | ({"ep": n} if n > 1 else {}) for n in range(1, RANKS + 1))),
    "zero": (
        {},
        {"bucket": 0},
        *({"zero": zero} for zero in (1, 2, 3)),
        {"zero": 3, "reshard": False},
        *({"zero": zero, "shard": 2} for zero in (1, 2, 3)),
        {"zero": 3, "shard": 2, "reshard": False},
    ),
    "sequence": ({}, {"sp": True}, {"sp": True, "sp_regather": False}),
    "attention": ({}, *({"cp_attention": how} for how in CP_ATTENTION if how != Layout.cp_attention)),
    "schedule": (
        {},
        *({"schedule": name} for name in schedules.NAMES if name != Layout.schedule),
        *({"schedule": name, "chunks": 3} for name in schedules.NAMES),
    ),
    "split": ({}, {"split": "cost"}, {"split": "first"}),
    "recompute": (
        {},
        {"mode": "full"},
        {"mode": "selective"},
        {"mode": "selective", "select": "blocks", "every": 3},
        {"offload": True},
        {"mode": "full", "offload": True},
    ),
    "batch": ({}, {"micro_batch": 5}, {"micro_batch": 3}),
}
"""setting -> its values, each as what it changes: keys of the layout and of recompute, "model", "micro_batch" """

Case = tuple[int, ...]
Pair = tuple[tuple[int, int], tuple[int, int]]
"""(setting, value) of two settings"""
PLAIN: Case = (0,) * len(SETTINGS)


def changes(case: Case) -> dict:
    """What a case sets."""
    return {key: value for values, number in zip(SETTINGS.values(), case, strict=True) for key, value in values[number].items()}


def configuration(case: Case) -> Config:
    """The run of a case. ValueError where the product refuses it."""
    found = changes(case)
    model, micro_batch = MODELS[found.pop("model", "dense")], found.pop("micro_batch", BATCH)
    recompute = Recompute(**{key: found.pop(key) for key in Recompute.__dataclass_fields__ if key in found})
    layout = Layout(**found)
    if layout.split == "first":  # the first stage has all layers that the others can spare
        stages = sum(map(len, setting.stages_by_rank(layout)))
        layout = replace(layout, split=",".join(map(str, [model.layers - stages + 1] + [1] * (stages - 1))))
    config = replace(harness.config(BATCH, micro_batch, layout, model, SEQ_LEN), recompute=recompute)
    check(config, layout.world_size)
    return config


@cache
def legal(case: Case) -> bool:
    """Whether the product takes it."""
    try:
        configuration(case)
    except ValueError:
        return False
    return True


def shape(sizes: tuple[int, ...]) -> int:
    """The number of a shape (pp, dp, cp, tp): the sizes from left to right, those that would be too many left at 1."""
    kept: list[int] = []
    for size in sizes:
        kept.append(size if size * math.prod(kept) <= RANKS else 1)
    return SHAPES.index(tuple(kept))


def nearest(case: Case) -> Case:
    """A legal case: its settings one after the other, those that are refused beside the earlier ones left plain."""
    found = PLAIN
    for place, number in enumerate(case):
        found = tried if legal(tried := changed(found, place, number)) else found
    return found


def changed(case: Case, place: int, number: int) -> Case:
    """With another value of one setting."""
    return (*case[:place], number, *case[place + 1 :])


def pairs(case: Case) -> list[Pair]:
    """Every two values that meet in a case."""
    return list(combinations(enumerate(case), 2))


@cache
def legal_pairs() -> dict[Pair, Case]:
    """Every two values that are legal together, and the first legal case that holds both, ranks and model running fastest."""
    sizes = [len(values) for values in SETTINGS.values()]
    homes = [home for home in product(range(sizes[0]), range(sizes[1])) if legal((*home, *PLAIN[2:]))]
    found = {}
    for i, j in combinations(range(len(sizes)), 2):
        for pair in product(((i, n) for n in range(sizes[i])), ((j, n) for n in range(sizes[j]))):
            at = [home for home in homes if all(home[place] == n for place, n in pair if place < 2)]
            cases = (changed(changed((*home, *PLAIN[2:]), *pair[0]), *pair[1]) for home in at)
            case = next(filter(legal, cases), None)
            if case:
                found[pair] = case
    return found


@cache
def cover(seed: int = 6) -> tuple[Case, ...]:
    """Legal cases that hold every legal pair.

    One after the other: each starts as the first case of a pair that is missing; then its other settings, in random order, take
    the value that brings most missing pairs with the settings that stand already, of those that are legal.
    """
    draw, missing, cases = random.Random(seed), dict(legal_pairs()), []
    numbers = [range(len(values)) for values in SETTINGS.values()]
    while missing:
        (a, b), case = next(iter(missing.items()))
        fixed = [a, b]
        for place in draw.sample(range(len(case)), len(case)):
            if place in (a[0], b[0]):
                continue
            gain = {n: sum(tuple(sorted((other, (place, n)))) in missing for other in fixed) for n in numbers[place]}
            best = sorted(numbers[place], key=lambda n: (-gain[n], draw.random()))
            case = next(filter(legal, (changed(case, place, number) for number in best)))
            fixed.append((place, case[place]))
        cases.append(case)
        for pair in pairs(case):
            missing.pop(pair, None)
    return tuple(cases)


def name(case: Case) -> str:
    """A case in words, such as pp2-dp2-zero3-zb-v-full."""
    return words(changes(case)) or "one_rank"


def words(values: dict) -> str:
    """Settings in words."""
    return "-".join(word(key, value) for key, value in values.items())


def word(key: str, value: bool | int | str) -> str:
    """One setting in a word."""
    if isinstance(value, bool):
        return key if value else f"no_{key}"
    return value if isinstance(value, str) else f"{key}{value}"


AXIS = {
    "dp": lambda config: config.layout.dp > 1,
    "tp": lambda config: config.layout.tp > 1,
    "cp": lambda config: config.layout.cp > 1,
    "pp": lambda config: config.layout.pp > 1,
    "ep": lambda config: config.layout.ep > 1,
    "sp": lambda config: config.layout.sp,
    "zero": lambda config: config.layout.zero > 0,
    "hybrid": lambda config: config.layout.shard > 0,
    "recompute": lambda config: config.recompute != Recompute(),
    "accumulation": lambda config: math.ceil(BATCH / config.layout.dp) > config.train.micro_batch,
    "tied": lambda config: config.model.tied,
}
"""column of the table -> whether a run makes use of it"""


def axes(config: Config) -> list[str]:
    """The columns of the table that a run belongs to."""
    return [axis for axis, used in AXIS.items() if used(config)]


def table(rows: list[tuple[list[str], float]]) -> str:
    """Markdown from (axes, error) of each layout. A cell is about the layouts that use the axes of its row and its column.

    On the diagonal and above it: the largest error; below: how many layouts.
    """
    lines = ["| | " + " | ".join(AXIS) + " |", "|---" * (len(AXIS) + 1) + "|"]
    for i, row in enumerate(AXIS):
        found = [[error for used, error in rows if {row, column} <= set(used)] for column in AXIS]
        cells = [
            str(len(errors)) if j < i else f"{harness.largest(errors):.0e}" if errors else "-" for j, errors in enumerate(found)
        ]
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)
