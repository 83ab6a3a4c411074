"""What `minidist ckpt` offers: show, verify, reshard. One short function a kind, and nothing heavy before it is called."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOOD, FAILED = 0, 1  # the exit codes of cli


def show(args: argparse.Namespace) -> int:
    """what lies in a checkpoint: sizes by kind and file, and which rank's file holds what"""
    from minidist import checkpoint
    from minidist.checkpoint import show

    if args.names is not None:
        try:
            re.compile(args.names)
        except re.error as error:
            raise ValueError(f"--names {args.names}: not a regular expression, {error}") from None
    manifest = checkpoint.read_manifest(checkpoint.resolve(Path(args.path)))
    print(json.dumps(show.summary(manifest)) if args.json else show.table(manifest, args.names))
    if args.plot:
        show.plot(manifest, Path(args.plot))
    return GOOD


def verify(args: argparse.Namespace) -> int:
    """read a checkpoint whole and compare every byte with its checksum"""
    from minidist import checkpoint

    folder = checkpoint.resolve(Path(args.path))
    with checkpoint.Reader(folder) as reader:
        found = list(reader.verify())
        size = sum(reader.manifest.files.values())
    wrong = [words for _, words in found if words is not None]
    report = {"checkpoint": str(folder), "pieces": len(found), "bytes": size, "damaged": wrong}
    good = f"{folder}: whole, {len(found):,} pieces in {size:,} bytes are what was written"
    print(json.dumps(report) if args.json else "\n".join(wrong) or good)
    return FAILED if wrong else GOOD


def reshard(args: argparse.Namespace) -> int:
    """write a checkpoint anew as another layout would have written it"""
    from minidist.train import launch
    from minidist.train.reshard import reshard

    found = reshard(Path(args.path), Path(args.out), args.overrides, launch.count(args.ranks))
    if found is not None:
        print(json.dumps({"checkpoint": str(found)}) if args.json else found)
    return GOOD


def add(group: argparse.ArgumentParser, verb: Callable[..., argparse.ArgumentParser], ranks: Callable[..., None]) -> None:
    """Give `minidist ckpt` its kinds; `verb` makes the parser of one, `ranks` gives it `--ranks` and the layout's settings."""
    kinds: Any = group.add_subparsers(metavar="show|verify|reshard")
    run = {"metavar": "RUN", "help": "a run folder such as runs/tiny, or one checkpoint in it"}

    one = verb(kinds, "show", show)
    one.add_argument("path", **run)
    one.add_argument("--names", metavar="REGEX", help="list the pieces of the tensors whose names match, too; . lists all")
    one.add_argument("--plot", metavar="FILE", help="draw which rank's file holds what, as a PNG")

    one = verb(kinds, "verify", verify)
    one.add_argument("path", **run)

    one = verb(kinds, "reshard", reshard, add_help=False)
    one.add_argument("path", **run)
    one.add_argument("--out", required=True, help="the run folder to make")
    ranks(one, "layout")
