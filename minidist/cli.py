"""The command line: one verb, one short function, with its heavy imports inside it so that `--help` is quick.

Exit codes: 0 good; 1 what was checked or run failed; 2 bad usage or bad input, said in one line; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

GOOD, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
SETTINGS = ("train", "eval", "generate", "ckpt")  # verbs that take `--section.key value`


class Parser(argparse.ArgumentParser):
    """argparse whose complaint is a ValueError: one line, like that of any other bad input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see `{self.prog} --help`")


def lab(args: argparse.Namespace) -> int:
    """JupyterLab on your own copy of the course"""
    from minidist.course.lab import lab

    return lab(args.dir, browser=not args.no_browser, port=args.port)


def restore(args: argparse.Namespace) -> int:
    """put the answer cell of an exercise back; an edited one is kept above it"""
    from minidist.course.lab import restore

    print(restore(args.task, args.dir))
    return GOOD


def progress(args: argparse.Namespace) -> int:
    """how far you have come in the course"""
    from minidist.course import report

    found = report.report(args.dir)
    if args.html:
        Path(args.html).write_text(report.page(found), encoding="utf-8")
    print(json.dumps(found) if args.json else args.html or report.words(found))
    return GOOD


def doctor(args: argparse.Namespace) -> int:
    """is this machine fit? each line good, or the fix"""
    from minidist.doctor import report

    return report(args.json)


def data_build(args: argparse.Namespace) -> int:
    """turn a text file, or a folder of them, into token files"""
    from minidist.data import corpus

    return _say(args, _corpus(corpus.build(args.source, args.out, args.tokenizer)))


def data_show(args: argparse.Namespace) -> int:
    """what is in a corpus: "stdlib", or a folder that `data build` made"""
    from minidist.data import corpus

    found = corpus.load(args.source, args.tokenizer)
    for part in (found.train, found.validation):
        part.verify()
    return _say(args, _corpus(found))


def train(args: argparse.Namespace) -> int:
    """train a model, on one rank or many"""
    from minidist.train import config as configs
    from minidist.train import launch

    ranks = launch.count(args.ranks)
    flags = ["--checkpoint.resume", "true"] if args.resume else []
    config = configs.load(args.recipe, args.overrides + flags, ranks=ranks, trace=args.trace)
    configs.check(config, ranks)

    from minidist.train import loop, resume
    from minidist.train.build import open_text

    open_text(config)  # the text is built, or refused, before any rank starts,
    resume.check(config)  # and so is what the run is to go on from
    summary = launch.run(loop.train, config)
    if args.json and summary is not None:
        print(json.dumps(summary))
    return GOOD


def evaluate(args: argparse.Namespace) -> int:
    """loss of a trained model on held-out text, on one rank or many"""
    from minidist.train import launch
    from minidist.train.trained import evaluate_trained

    ranks = launch.count(args.ranks)
    result = evaluate_trained(Path(args.run), args.data, args.samples, overrides=args.overrides, ranks=ranks)
    if result is None:
        return GOOD
    if args.json:
        print(json.dumps(result))
    else:
        print("no valid token, so no loss" if result["loss"] is None else _TEXT_OF_EVAL.format(**result))
    return GOOD


_TEXT_OF_EVAL = "{checkpoint}: loss {loss:.4f} nats a token, perplexity {perplexity:.3f}, {tokens:,} held-out tokens of {data}"


def generate(args: argparse.Namespace) -> int:
    """text from a trained model, on one rank or many"""
    from minidist.train import launch
    from minidist.train.trained import generate_trained

    options = {key: getattr(args, key) for key in ("tokens", "temperature", "top_k", "seed", "overrides")}
    result = generate_trained(Path(args.run), args.prompt, ranks=launch.count(args.ranks), **options)
    if result is not None:
        print(json.dumps(result) if args.json else args.prompt + result["text"])
    return GOOD


def plot(args: argparse.Namespace) -> int:
    """loss curves of one or several runs in one PNG"""
    from minidist.train.plot import plot_losses

    runs = {}
    for word in args.runs:
        label, equals, path = word.rpartition("=")
        file = Path(path) / "metrics.jsonl"
        if not file.is_file():
            raise ValueError(f"{path}: no metrics.jsonl in it, give run folders such as runs/tiny, or LABEL=runs/tiny")
        runs[label if equals else Path(path).name] = file
    words = plot_losses(runs, Path(args.out), args.title)
    print(json.dumps({"out": args.out, "text": words}) if args.json else f"{args.out}\n{words}")
    return GOOD


def trace(args: argparse.Namespace) -> int:
    """join the traces of a run's ranks for Perfetto, and sum them up"""
    from minidist.core.trace import report

    found, words = report(args.run, out=args.out, step=args.step, plot=args.plot)
    print(json.dumps(found) if args.json else words)
    return GOOD


def grade(args: argparse.Namespace) -> int:
    """grade a notebook's exercises"""
    from minidist.course import grading

    path = Path(args.path)
    if not path.exists():
        raise ValueError(f"{args.path}: no such file, give a notebook such as exercises/00_ranks.ipynb, or a folder of them")
    results = grading.grade_folder(path, seed=args.seed) if path.is_dir() else grading.grade_notebook(path, seed=args.seed)
    if args.json:
        print(json.dumps([result.to_json() for result in results]))
    else:
        print(grading.table(results))
    return GOOD if all(result.points == result.max for result in results) else FAILED


def bench(args: argparse.Namespace) -> int:
    """side by side with torch's own engines"""
    args.group.print_help()
    return USAGE


VERBS = ("lab", "restore", "progress", "doctor", "data", "train", "eval", "generate", "plot", "trace", "ckpt", "grade", "bench")


def main(argv: list[str] | None = None) -> int:
    """Run one command line; its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    # Idle threads of torch sleep instead of spinning, unless the user says otherwise. On two cores with other work on
    # them `train tiny` does 3,000 tokens a second with this and 600 without. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _expect_verb(words)
        words, overrides = split_overrides(words) if words and words[0] in SETTINGS else (words, [])
        args = parser().parse_args(words)
        args.overrides = overrides
        return args.verb(args)
    except KeyboardInterrupt:
        print("\nminidist: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `minidist ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except Exception as error:
        return _complain(error)


def _complain(error: Exception) -> int:
    """Bad input in one line; a rank's failure as its report; anything else is a bug of ours and keeps its traceback."""
    from minidist.ranks.errors import RanksError

    if isinstance(error, RanksError):
        print(error, file=sys.stderr)
        return FAILED
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    raised_by_us = Path(where).is_relative_to(Path(__file__).parent)
    if isinstance(error, ValueError) and raised_by_us:
        print(f"minidist: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    if isinstance(error, OSError):
        print(f"minidist: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError) else FAILED
    traceback.print_exception(error)
    return FAILED


def _expect_verb(words: list[str]) -> None:
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        found = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        advice = f"did you mean `minidist {found[0]}`?" if found else f"use one of {', '.join(VERBS)}"
        raise ValueError(f"there is no verb {words[0]!r}: {advice}")


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """(words for argparse, `--section.key value` overrides): the dot tells them apart, wherever they stand."""
    plain, overrides, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            plain.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return plain, overrides


def parser() -> Parser:
    """All verbs and their options."""
    top = Parser(prog="minidist", description="Distributed training, learned by running it.", allow_abbrev=False)
    top.set_defaults(verb=lambda args: top.print_help() or USAGE)
    verbs = top.add_subparsers(metavar="VERB", title="verbs")

    one = _verb(verbs, "lab", lab, as_json=False)
    one.add_argument("--dir", help="your copy of the course; default: $MINIDIST_COURSE, else ~/minidist-course")
    one.add_argument("--no-browser", action="store_true", help="print the address only")
    one.add_argument("--port", type=int, help="default: the first free one from 8888")

    one = _verb(verbs, "restore", restore, as_json=False)
    one.add_argument("task", metavar="TASK", help="such as 07.2")
    one.add_argument("--dir", help="your copy of the course; default: $MINIDIST_COURSE, else ~/minidist-course")

    one = _verb(verbs, "progress", progress)
    one.add_argument("--dir", help="your copy of the course; default: the one around you, else ~/minidist-course")
    one.add_argument("--html", metavar="OUT", help="write it as one HTML page, too")

    _verb(verbs, "doctor", doctor)
    _data_verbs(verbs)

    one = _verb(verbs, "train", train, add_help=False)
    one.add_argument(
        "recipe", metavar="RECIPE", help="a TOML file, a run folder, or a recipe shipped with the package, such as tiny"
    )
    one.add_argument("--trace", action="store_true", help="write a trace of steps 2 to 4, or those of metrics.trace")
    one.add_argument("--resume", action="store_true", help="go on with the run of this name from its last good checkpoint")
    _ranks(one)

    _run_verbs(verbs)

    from minidist.train import ckpt

    group = verbs.add_parser("ckpt", help="show, verify and reshard checkpoints", allow_abbrev=False)
    group.set_defaults(verb=lambda args: group.print_help() or USAGE)
    ckpt.add(group, _verb, _ranks)

    one = _verb(verbs, "grade", grade)
    one.add_argument("path", metavar="PATH", help="a notebook, or a folder of notebooks")
    one.add_argument("--seed", type=int, help="repeat an attempt; default: fresh inputs")

    from minidist.bench import verbs as benches

    group = _verb(verbs, "bench", bench, as_json=False)
    group.set_defaults(group=group)
    benches.add(group, _verb)
    return top


def _verb(verbs: Any, name: str, function: Callable, *, as_json: bool = True, **kwargs: Any) -> Parser:
    """A sub-parser whose help is the function's docstring."""
    one = verbs.add_parser(name, help=function.__doc__, description=function.__doc__, allow_abbrev=False, **kwargs)
    one.set_defaults(verb=function)
    if as_json:
        one.add_argument("--json", action="store_true", help="one JSON value on standard output")
    return one


def _run_verbs(verbs: Any) -> None:
    one = _verb(verbs, "eval", evaluate, add_help=False)
    one.add_argument("run", metavar="RUN", help="a run folder such as runs/tiny, or one checkpoint in it")
    one.add_argument("--data", help="a corpus folder; default: the one it was trained on")
    one.add_argument("--samples", type=int, default=0, help="held-out sequences, spread evenly; 0 (default) takes all")
    _ranks(one, "layout")

    one = _verb(verbs, "generate", generate, add_help=False)
    one.add_argument("run", metavar="RUN", help="a run folder such as runs/tiny, or one checkpoint in it")
    one.add_argument("--prompt", default="def ", help="text to go on from; default %(default)r")
    one.add_argument("--tokens", type=int, default=200, help="default %(default)s")
    one.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest; default %(default)s")
    one.add_argument("--top-k", type=int, default=0, help="draw among that many likeliest; 0 (default): all")
    one.add_argument("--seed", type=int, default=0, help="the same seed gives the same text; default %(default)s")
    _ranks(one, "layout")

    one = _verb(verbs, "plot", plot)
    one.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or LABEL=FOLDER")
    one.add_argument("--out", default="loss.png", help="default %(default)s")
    one.add_argument("--title", default="")

    one = _verb(verbs, "trace", trace)
    one.add_argument("run", metavar="RUN", help="a run folder such as runs/tiny, trained with --trace, or a file of one")
    one.add_argument("--out", help="the joined trace; default: trace.json in the run folder")
    one.add_argument("--step", type=int, help="sum up and draw this step alone; default: all traced ones")
    one.add_argument("--plot", metavar="FILE", help="draw it as a PNG")


def _data_verbs(verbs: Any) -> None:
    group = verbs.add_parser("data", help="build and show token files", allow_abbrev=False)
    group.set_defaults(verb=lambda args: group.print_help() or USAGE)
    kinds = group.add_subparsers(metavar="build|show")
    one = _verb(kinds, "build", data_build)
    one.add_argument("source", metavar="SRC", help="a UTF-8 text file, or a folder of them")
    one.add_argument("--out", required=True, help="the corpus folder to make")
    one.add_argument("--tokenizer", default="byte", help="byte, or bpe:N for N tokens; default %(default)s")
    one = _verb(kinds, "show", data_show)
    one.add_argument("source", metavar="CORPUS", nargs="?", default="stdlib", help="default %(default)s")
    one.add_argument("--tokenizer", default="byte", help="of stdlib; default %(default)s")


def _ranks(one: Parser, section: str | None = None) -> None:
    """`--ranks` of a verb that runs a model, and a help that shows the settings that it takes: all, or those of one section."""
    one.add_argument("--ranks", type=int, help="local ranks to start, default 1; layout.dp takes them unless you state it")
    one.add_argument("-h", "--help", action=_Help, nargs=0, const=section, help="this, and every --section.key it takes")


class _Help(argparse.Action):
    """Prints the options of a verb and then the settings that it takes, with their documentation."""

    def __call__(self, parser, *_):
        from minidist.train import config as configs

        print(parser.format_help())
        if self.const:
            print("the run is loaded at any layout, by default on one rank, whatever layout it was trained at:\n")
        else:
            print(f"recipes: {', '.join(configs.recipes())}\n")
            print("every setting, also in a TOML file as key = value under its [section]:\n")
        print(configs.help_text(self.const))
        raise SystemExit(GOOD)


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
