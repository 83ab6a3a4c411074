"""What `minidist data` offers: build and show. One short function a kind, and nothing heavy before it is called."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

GOOD = 0  # the exit code of cli


def build(args: argparse.Namespace) -> int:
    """turn a text file, or a folder of them, into token files"""
    from minidist.data import corpus

    return _say(args, _corpus(corpus.build(args.source, args.out, args.tokenizer)))


def show(args: argparse.Namespace) -> int:
    """what is in a corpus: "stdlib", or a folder that `data build` made"""
    from minidist.data import corpus

    found = corpus.load(args.source, args.tokenizer)
    for part in (found.train, found.validation):
        part.verify()
    return _say(args, _corpus(found))


def add(group: argparse.ArgumentParser, verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Give `minidist data` its kinds; `verb` makes the parser of one, from (kinds, name, function)."""
    kinds: Any = group.add_subparsers(metavar="build|show")
    one = verb(kinds, "build", build)
    one.add_argument("source", metavar="SRC", help="a UTF-8 text file, or a folder of them")
    one.add_argument("--out", required=True, help="the corpus folder to make")
    one.add_argument("--tokenizer", default="byte", help="byte, or bpe:N for N tokens; default %(default)s")
    one = verb(kinds, "show", show)
    one.add_argument("source", metavar="CORPUS", nargs="?", default="stdlib", help="default %(default)s")
    one.add_argument("--tokenizer", default="byte", help="of stdlib; default %(default)s")


def _corpus(found: Any) -> dict[str, Any]:
    """What `data` reports of a corpus."""
    head = found.train.header
    return {
        "path": str(found.path),
        "source": head.get("source"),
        "tokenizer": found.tokenizer.name,
        "vocab": found.tokenizer.vocab,
        "train_tokens": len(found.train),
        "train_documents": head["documents"],
        "validation_tokens": len(found.validation),
        "validation_documents": found.validation.header["documents"],
        "skipped_files": head.get("skipped", 0),
        "sha256": head["sha256"],
    }


def _say(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """A report as JSON or as aligned lines."""
    if args.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key.replace('_', ' '):<22}{value:,}" if isinstance(value, int) else f"{key.replace('_', ' '):<22}{value}")
    return GOOD
