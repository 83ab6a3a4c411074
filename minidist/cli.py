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
FOREVER_S = 30 * 24 * 3600.0  # a training run may take as long as it likes; each collective has its own deadline


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

    world = int(os.environ["WORLD_SIZE"]) if _under_torchrun() else None
    if world and args.ranks not in (None, world):
        raise ValueError(f"--ranks {args.ranks}: torchrun has started {world} ranks, leave --ranks out")
    if args.ranks is not None and args.ranks < 1:
        raise ValueError(f"--ranks {args.ranks}: give at least 1")
    ranks = world or args.ranks or 1
    config = configs.load(args.recipe, args.overrides, ranks=ranks)
    configs.check(config, ranks)

    from minidist.train.build import open_text

    open_text(config)  # the text is built, or refused, before any rank starts
    summary = _run_training(config, ranks)
    if args.json and summary is not None:
        print(json.dumps(summary))
    return GOOD


def evaluate(args: argparse.Namespace) -> int:
    """loss of a trained model on held-out text"""
    from minidist.train.trained import evaluate_trained

    result = evaluate_trained(Path(args.run), args.data, args.samples)
    if args.json:
        print(json.dumps(result))
    else:
        print("no valid token, so no loss" if result["loss"] is None else _TEXT_OF_EVAL.format(**result))
    return GOOD


_TEXT_OF_EVAL = "{checkpoint}: loss {loss:.4f} nats a token, perplexity {perplexity:.3f}, {tokens:,} held-out tokens of {data}"


def generate(args: argparse.Namespace) -> int:
    """text from a trained model"""
    from minidist.train.trained import generate_trained

    options = {key: getattr(args, key) for key in ("tokens", "temperature", "top_k", "seed")}
    text = generate_trained(Path(args.run), args.prompt, **options)
    print(json.dumps({"prompt": args.prompt, "text": text}) if args.json else args.prompt + text)
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


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "lab": lab,
    "restore": restore,
    "progress": progress,
    "doctor": doctor,
    "data": data_build,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "plot": plot,
    "grade": grade,
    "bench": bench,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line; its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    # Idle threads of torch sleep instead of spinning, unless the user says otherwise. On two cores with other work on
    # them `train tiny` does 3,000 tokens a second with this and 600 without. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _expect_verb(words)
        words, overrides = split_overrides(words) if words[:1] == ["train"] else (words, [])
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
    one.add_argument("recipe", metavar="RECIPE", help="a TOML file, or a recipe shipped with the package, such as tiny")
    one.add_argument("--ranks", type=int, help="local ranks to start; layout.dp takes them unless you state it")
    one.add_argument("-h", "--help", action=_TrainHelp, nargs=0, help="this, and every --section.key")

    one = _verb(verbs, "eval", evaluate)
    one.add_argument("run", metavar="RUN", help="a run folder such as runs/tiny, or one checkpoint in it")
    one.add_argument("--data", help="a corpus folder; default: the one it was trained on")
    one.add_argument("--samples", type=int, default=0, help="held-out sequences, spread evenly; 0 (default) takes all")

    one = _verb(verbs, "generate", generate)
    one.add_argument("run", metavar="RUN", help="a run folder such as runs/tiny, or one checkpoint in it")
    one.add_argument("--prompt", default="def ", help="text to go on from; default %(default)r")
    one.add_argument("--tokens", type=int, default=200, help="default %(default)s")
    one.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest; default %(default)s")
    one.add_argument("--top-k", type=int, default=0, help="draw among that many likeliest; 0 (default): all")
    one.add_argument("--seed", type=int, default=0, help="the same seed gives the same text; default %(default)s")

    one = _verb(verbs, "plot", plot)
    one.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or LABEL=FOLDER")
    one.add_argument("--out", default="loss.png", help="default %(default)s")
    one.add_argument("--title", default="")

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


class _TrainHelp(argparse.Action):
    """Prints the options of `train` and then the whole documented configuration."""

    def __call__(self, parser, *_):
        from minidist.train import config as configs

        print(parser.format_help())
        print(f"recipes: {', '.join(configs.recipes())}\n")
        print("every setting, also in a TOML file as key = value under its [section]:\n")
        print(configs.help_text())
        raise SystemExit(GOOD)


def _run_training(config: Any, ranks: int) -> dict[str, Any] | None:
    """Train on ranks that torchrun has started, on local ranks of our own, or here. None on a rank that has no say."""
    from minidist.core import mesh as meshes
    from minidist.core.device import for_rank
    from minidist.train.loop import train

    if _under_torchrun():
        rank = int(os.environ["RANK"])
        meshes.connect(rank, ranks, "env://")
        summary = train(meshes.Mesh(config.layout, rank, device=for_rank(rank, ranks)), config)
        meshes.disconnect()
        return summary if rank == 0 else None
    if ranks == 1:
        return train(meshes.Mesh(config.layout, device=for_rank(0, 1)), config)
    from minidist import ranks as pool

    return pool.run(train, ranks, config, layout=config.layout, timeout_s=FOREVER_S, check=False)[0]


def _under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


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
