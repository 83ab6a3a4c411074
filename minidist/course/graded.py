"""On a graded rank: run the submission's cells behind the guard, call the answer, say what it returned and what it sent.

Each rank runs the cells itself and is told its own inputs only, so nothing that one rank rewrites reaches another, or the
process that collects the results.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import gc
import importlib
import json
import re
import sys
import traceback
from dataclasses import asdict
from typing import Any

_namespace: dict[str, Any] = {}  # of this rank's cells


class Elsewhere(RuntimeError):
    """A cell started ranks: in a notebook it may, under the grader this is a rank."""


def prepare(mesh, order: dict) -> str:
    """Run the cells. JSON: "" if the answer is there, else why not."""
    import torch

    from minidist import ranks
    from minidist.course import guard, recorder

    if order["threads"]:
        torch.set_num_threads(order["threads"])
    if order["drive"]:
        importlib.import_module(order["drive"].partition(":")[0])  # before the guard closes its folder
    recorder.install(mesh, order["ledger"])
    for verb in ("run", "push", "pull", "stop", "status"):
        setattr(ranks, verb, _elsewhere)
    guard.install(order["refused"], tuple(order["allowed"]))
    _namespace.update({"__name__": "__main__", "__builtins__": __builtins__})
    note = run_cells(order["cells"], _namespace)
    function = _namespace.get(order["function"])
    if callable(function):
        return json.dumps("")
    if function is not None:
        return json.dumps(f"{order['function']} is not a function but {function!r:.60}")
    return json.dumps(note or f"{order['function']} is not there after running all cells in order from a fresh start.")


def call(mesh, order: dict) -> str:
    """Call the answer (or have the task's `drive` use it). JSON: its value, its inputs as it left them, tape, bytes held."""
    from minidist.course.crossing import decode, encode

    function, inputs = _namespace[order["function"]], [decode(value) for value in order["inputs"]]
    start, before = len(mesh.tape.lines), bytes_held()
    try:
        if order["drive"]:
            module, _, name = order["drive"].partition(":")
            value = getattr(sys.modules[module], name)(mesh, function, *inputs)
        else:
            value = function(mesh, *inputs)
    except NotImplementedError as error:
        if error.args == (order["task"],):
            return json.dumps({"stub": True})
        raise
    held = bytes_held() - before
    tape = [asdict(line) for line in mesh.tape.lines[start:]]
    return json.dumps({"value": encode(value), "tape": tape, "input": [encode(value) for value in inputs], "held": held})


def bytes_held() -> int:
    """Bytes of tensor memory this process holds on to: every storage counts once, however many tensors look into it."""
    import torch

    storages = {}
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout is torch.strided and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def run_cells(cells: list, namespace: dict) -> str:
    """Execute (id, source) pairs in order. An error ends its cell only; the first one is returned in words."""
    from minidist.ranks.cell import remember

    note = ""
    for number, (name, source) in enumerate(cells, 1):
        if source.lstrip().startswith("%%"):
            continue  # cell magics are demonstrations
        name = name or f"number {number}"
        remember(f"<cell {name}>", source)  # so that tracebacks show its lines
        try:
            _run_cell(without_magics(source), f"<cell {name}>", namespace)
        except (Exception, SystemExit) as error:
            note = note or _in_words(name, error)
    return note


def _run_cell(source: str, filename: str, namespace: dict) -> None:
    """Statement by statement: one that starts ranks is skipped, and what follows it in its cell is not."""
    flags = 0
    for statement in ast.parse(source, filename).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            flags |= sum(getattr(__future__, alias.name).compiler_flag for alias in statement.names)
        try:
            exec(compile(ast.Module([statement], []), filename, "exec", flags, dont_inherit=True), namespace)
        except Elsewhere:
            continue


def _in_words(name: str, error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell")]
    at = f" at line {frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError) and (error.filename or "").startswith("<cell"):
        at = f" at line {error.lineno}"
    return f"Cell {name}{at}, run from a fresh start, raised {type(error).__name__}: {error}"


def without_magics(source: str) -> str:
    """The source with line magics, shell lines and help lines turned into comments; plain Python stays as it is."""
    with contextlib.suppress(SyntaxError):  # a docstring may ask: its line ends in "?" and wants no help
        ast.parse(source)
        return source
    return re.sub(r"^(\s*)([%!?].*|.*[^\s#?]\?{1,2})$", r"\1pass", source, flags=re.MULTILINE)


def _elsewhere(*args: Any, **kwargs: Any) -> None:
    raise Elsewhere("this already is a rank: the grader calls the answer on every rank itself")
