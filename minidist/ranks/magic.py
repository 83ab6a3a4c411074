"""`%%ranks N`: run a notebook cell on N ranks. Loaded by `%load_ext minidist.ranks`."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import sys
import traceback
from typing import Any

import IPython

from minidist.core.layout import Layout
from minidist.ranks.cell import compile_cell
from minidist.ranks.errors import RankError, RankHang, RanksError, UsageError
from minidist.ranks.session import Session, check_count, current, options

EXPECTATIONS = ("error", "hang", "mismatch")
USAGE = "%%ranks N [--expect error|hang|mismatch] [--rank R] [--timeout S] [--layout tp=2,dp=2] [--stream]"
_unnumbered = itertools.count(1)  # cells run outside a notebook


class UnmetExpectation(RanksError):
    """A planted failure did not happen, or happened otherwise."""


class CellSyntaxError(RanksError):
    """The cell is not Python."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"%%ranks: {message}. Write it as {USAGE}, for example %%ranks 4")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("ranks", nargs="?")
    parser.add_argument("--expect", choices=EXPECTATIONS)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--layout")
    parser.add_argument("--stream", action="store_true")
    return parser


def register(shell: Any) -> None:
    """Give a shell the magic, and let torch be imported in the background meanwhile."""
    current().warm_up()
    shell.register_magic_function(ranks_cell, "cell", "ranks")


def ranks_cell(line: str, source: str) -> None:
    """Run a cell on N ranks, in a namespace that each rank keeps between cells.

    Names there: rank, world_size, mesh, world, tape, comm, torch, and what earlier cells and `ranks.push` have set. Output
    comes as "[rank] text", rank by rank; with --stream in order of arrival. --expect shows a failure that is meant to
    happen, and raises if it does not (with --rank R: on that rank).
    """
    asked = parse(line)
    filename = f"<cell {_cell_number()}>"
    source = "\n" + source  # the magic is line 1, as the notebook counts
    try:
        compile_cell(source, filename)
    except SyntaxError as error:  # told here, before any rank hears of it
        raise CellSyntaxError("".join(traceback.format_exception_only(error)).rstrip()) from None
    context = options(asked.layout, asked.ranks, asked.timeout, check=True)
    session = current()
    _tell_threads(session, asked.ranks)
    pool = session.pool(asked.ranks)
    try:
        pool.cell(source, filename, context, as_it_comes=asked.stream)
    except RanksError as error:
        if not asked.expect:
            raise error.with_traceback(None) from None
        _compare(asked, error)
        print(error)
    else:
        if asked.expect:
            raise UnmetExpectation(f"this cell was expected to end in {_what(asked)}, but all ranks finished")


def parse(line: str) -> argparse.Namespace:
    """Read the magic's arguments. Raises UsageError with one line that says what to write."""
    try:
        asked = _parser().parse_args(shlex.split(line))
    except ValueError as error:
        raise error if isinstance(error, UsageError) else UsageError(f"%%ranks: {error}. Write it as {USAGE}") from None
    if asked.ranks is None:
        raise UsageError(f"%%ranks needs the number of ranks, for example %%ranks 4. In full: {USAGE}")
    if not asked.ranks.lstrip("+-").isdigit():
        raise UsageError(f"%%ranks {asked.ranks}: not a number of ranks; write, for example, %%ranks 4")
    asked.ranks = int(asked.ranks)
    check_count(asked.ranks)
    if asked.rank is not None and not (asked.expect and 0 <= asked.rank < asked.ranks):
        raise UsageError(f"%%ranks: --rank {asked.rank} goes with --expect and a rank from 0 to {asked.ranks - 1}")
    if asked.timeout is None:
        asked.timeout = 5.0 if asked.expect == "hang" else 60.0  # a hang that is meant to be needs no long wait
    asked.layout = parse_layout(asked.layout) if asked.layout else None
    return asked


def parse_layout(text: str) -> Layout:
    """ "tp=2,dp=2" as a Layout."""
    try:
        return Layout(**{name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))})
    except TypeError:
        raise UsageError(f"--layout {text}: its axes are pp, dp, cp, tp, ep and shard, as in --layout tp=2,dp=2") from None
    except ValueError as error:
        hint = str(error) if str(error).startswith("layout.") else "write it as --layout tp=2,dp=2"
        raise UsageError(f"--layout {text}: {hint}") from None


def _compare(asked: argparse.Namespace, error: RanksError) -> None:
    """Raise unless this failure is the one expected."""
    if asked.expect == "hang":
        met = isinstance(error, RankHang)
    else:
        mismatch = isinstance(error, RankError) and error.kind == "CommMismatch"
        met = not isinstance(error, RankHang) and mismatch == (asked.expect == "mismatch")
    if met and asked.rank is not None:
        met = asked.rank in error.ranks
    if not met:
        raise UnmetExpectation(f"this cell was expected to end in {_what(asked)}, but it ended so:\n\n{error}") from None


def _what(asked: argparse.Namespace) -> str:
    where = "" if asked.rank is None else f" on rank {asked.rank}"
    return {"error": "an error", "hang": "a hang", "mismatch": "a mismatch"}[asked.expect] + where


def _cell_number() -> str:
    """The notebook's number of the cell that runs: 7 for In[7]. IPython knows it by the file name of the cell's code."""
    compiler, frame = getattr(IPython.get_ipython(), "compile", None), sys._getframe()
    while compiler and frame:
        if label := compiler.format_code_name(frame.f_code.co_filename):
            return re.sub(r"\D", "", label[1])
        frame = frame.f_back
    return f"x{next(_unnumbered)}"


def _tell_threads(session: Session, ranks: int) -> None:
    """Say once, when ranks start for the first time, how many threads each has."""
    from minidist.ranks import host

    if ranks not in session.pools:
        threads = host.threads_per_rank(ranks)
        print(f"{ranks} rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)} each ({host.cores()} cores)")
