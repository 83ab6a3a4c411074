"""Run the source of one cell in a namespace, as a notebook does: the value of a last expression is shown."""

from __future__ import annotations

import ast
import linecache
import os
import pprint
import traceback
from types import CodeType
from typing import Any

OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
CORE = os.path.join(os.path.dirname(os.path.dirname(OWN)), "core") + os.sep

Parts = tuple[CodeType | None, CodeType | None]  # statements, last expression


def compile_cell(source: str, filename: str) -> Parts:
    """Compile a cell and remember its source, so that tracebacks show its lines. Raises SyntaxError.

    A last expression followed by a semicolon is run and not shown.
    """
    remember(filename, source)
    tree = ast.parse(source, filename)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = compile(ast.Expression(tree.body.pop().value), filename, "eval", dont_inherit=True)
    return (compile(tree, filename, "exec", dont_inherit=True) if tree.body else None), last


def run_cell(parts: Parts, namespace: dict[str, Any]) -> str | None:
    """Run a compiled cell; the text of its last expression's value, which also becomes `_`, or None."""
    statements, last = parts
    if statements:
        exec(statements, namespace)
    value = eval(last, namespace) if last else None
    if value is None:
        return None
    namespace["_"] = value
    plain = type(value).__repr__ in (dict.__repr__, list.__repr__, tuple.__repr__, set.__repr__)
    return pprint.pformat(value, width=100, sort_dicts=False) if plain else repr(value)


def remember(filename: str, source: str) -> None:
    """Let linecache, hence every traceback, find the lines of a source that is in no file."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def typed_sources() -> dict[str, str]:
    """Sources typed into a notebook or console, by the file name their code carries."""
    return {
        name: "".join(entry[2])
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None and entry[2]  # no time of modification: it never was a file
    }


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: `kind`, `message`, and its traceback as Python prints it, without the frames of ranks/."""
    report = traceback.TracebackException.from_exception(error)
    _drop_own_frames(report)
    if type(error).__module__ == "minidist.core.work":  # the place is the user's call, not the inside of comm
        while len(report.stack) > 1 and CORE in report.stack[-1].filename:
            del report.stack[-1]
    text = "".join(report.format()).rstrip()
    return {
        "kind": type(error).__name__,
        "message": _message(error),
        "traceback": text,
        "bases": [t.__name__ for t in type(error).__mro__],
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # a __str__ of the user's own
        return f"(its __str__ raised {type(failure).__name__})"


def _drop_own_frames(report: traceback.TracebackException | None) -> None:
    """Cut the leading frames of this package; they say only that ranks run cells."""
    while report is not None:
        while report.stack and report.stack[0].filename.startswith(OWN):
            del report.stack[0]
        report = report.__cause__ or report.__context__
