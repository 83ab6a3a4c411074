"""What `minidist bench` offers: one short function a kind, its options, and nothing heavy before it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOOD, FAILED = 0, 1  # the exit codes of cli


def zero(args: argparse.Namespace) -> int:
    """ZeRO's stages against torch's DDP, ZeroRedundancyOptimizer and FSDP2: losses, step time, bytes held"""
    from minidist.bench import report, zero

    zero.check(args.ranks, args.pairs, args.sizes, args.stage)
    try:
        rows = zero.run(args.ranks, args.pairs, args.sizes, args.stage)
    except report.Unequal as error:
        print(f"minidist: {error}", file=sys.stderr)
        return FAILED
    print(report.to_json(rows) if args.json else f"{report.table(rows)}\n\n{report.verdict(rows)}")
    return GOOD


def memory(args: argparse.Namespace) -> int:
    """What a rank holds at ZeRO's four stages, by kind, measured beside the closed forms"""
    from minidist.bench import memory, report

    memory.check(args.ranks)
    rows = memory.run(args.ranks)
    print(report.to_json(rows) if args.json else memory.table(rows))
    if args.plot:
        memory.plot(rows, Path(args.plot))
    return GOOD


def tensor(args: argparse.Namespace) -> int:
    """Tensor and sequence parallelism against torch's DTensor: losses, step time, bytes held"""
    from minidist.bench import report, tensor

    tensor.check(args.ranks, args.pairs, args.sizes)
    try:
        rows = tensor.run(args.ranks, args.pairs, args.sizes)
    except report.Unequal as error:
        print(f"minidist: {error}", file=sys.stderr)
        return FAILED
    print(report.to_json(rows) if args.json else f"{report.table(rows)}\n\n{report.verdict(rows)}")
    return GOOD


def attention(args: argparse.Namespace) -> int:
    """Context-parallel attention against torch's SDPA on the whole sequence: losses, step time, bytes held"""
    from minidist.bench import attention, report

    attention.check(args.ranks, args.pairs, args.sizes, args.way)
    try:
        rows = attention.run(args.ranks, args.pairs, args.sizes, args.way)
    except report.Unequal as error:
        print(f"minidist: {error}", file=sys.stderr)
        return FAILED
    print(report.to_json(rows) if args.json else f"{report.table(rows)}\n\n{report.verdict(rows)}")
    return GOOD


def pipeline(args: argparse.Namespace) -> int:
    """Pipeline schedules against torch.distributed.pipelining's: losses, step time, bytes held"""
    from minidist.bench import pipeline, report

    pipeline.check(args.ranks, args.pairs, args.sizes, args.schedule)
    try:
        rows = pipeline.run(args.ranks, args.pairs, args.sizes, args.schedule)
    except report.Unequal as error:
        print(f"minidist: {error}", file=sys.stderr)
        return FAILED
    print(report.to_json(rows) if args.json else f"{report.table(rows)}\n\n{report.verdict(rows)}")
    return GOOD


def add(group: argparse.ArgumentParser, verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Give `minidist bench` its kinds; `verb` makes the parser of one, from (kinds, name, function)."""
    kinds: Any = group.add_subparsers(metavar="zero|memory|tensor|attention|pipeline")

    one = verb(kinds, "zero", zero, as_json=False)
    one.add_argument("--json", action="store_true", help="one JSON object a row on standard output")
    one.add_argument("--ranks", type=int, default=2, help="local ranks to start; default %(default)s")
    one.add_argument("--pairs", type=int, default=10, help="timed steps of each side, in turns; default %(default)s")
    one.add_argument("--stage", type=int, help="0, 1, 2 or 3 alone; default: all")
    sizes = "small (mostly communication), large (mostly compute), tiny (a trial of the bench); default %(default)s"
    one.add_argument("--sizes", default="small,large", metavar="LIST", help=sizes)

    one = verb(kinds, "memory", memory, as_json=False)
    one.add_argument("--json", action="store_true", help="one JSON object a stage on standard output")
    one.add_argument("--ranks", type=int, default=4, help="local ranks to start; default %(default)s")
    one.add_argument("--plot", metavar="FILE", help="draw it as a PNG")

    one = verb(kinds, "tensor", tensor, as_json=False)
    one.add_argument("--json", action="store_true", help="one JSON object a row on standard output")
    one.add_argument("--ranks", type=int, default=2, help="local ranks to start; default %(default)s")
    one.add_argument("--pairs", type=int, default=10, help="timed steps of each side, in turns; default %(default)s")
    sizes = "small (mostly communication), large (mostly compute), tiny (a trial of the bench); default %(default)s"
    one.add_argument("--sizes", default="small,large", metavar="LIST", help=sizes)

    one = verb(kinds, "attention", attention, as_json=False)
    one.add_argument("--json", action="store_true", help="one JSON object a row on standard output")
    one.add_argument("--ranks", type=int, default=2, help="local ranks to start; default %(default)s")
    one.add_argument("--pairs", type=int, default=10, help="timed steps of each side, in turns; default %(default)s")
    one.add_argument("--way", help="ring, gather or ulysses alone; default: all")
    sizes = "small (384 places), large (3,072 places, mostly compute), tiny (a trial of the bench); default %(default)s"
    one.add_argument("--sizes", default="small,large", metavar="LIST", help=sizes)

    one = verb(kinds, "pipeline", pipeline, as_json=False)
    one.add_argument("--json", action="store_true", help="one JSON object a row on standard output")
    one.add_argument("--ranks", type=int, default=2, help="local ranks to start, at most 4; default %(default)s")
    one.add_argument("--pairs", type=int, default=10, help="timed steps of each side, in turns; default %(default)s")
    schedules = "gpipe, 1f1b, interleaved, bfs, zb-h1, zb-v or dualpipe-v alone; default: all"
    one.add_argument("--schedule", metavar="NAME", help=schedules)
    sizes = "small (launching counts), large (mostly compute), tiny (a trial of the bench); default %(default)s"
    one.add_argument("--sizes", default="small,large", metavar="LIST", help=sizes)
