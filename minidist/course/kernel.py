"""Where a learner's kernel and the cells that get graded differ: the usual reason why it works here and not there."""

from __future__ import annotations

import ast
import builtins
import os
from pathlib import Path
from types import CodeType

from minidist.course.graded import without_magics
from minidist.course.session import Cell
from minidist.course.task import Task


def warnings(task: Task, cells: list[Cell], names: dict[str, object]) -> list[str]:
    """One line for each difference, at most three. `names` is the kernel's namespace."""
    found = [*_only_here(task, cells, names), *_redefined(task, cells, names), *_not_run(cells)]
    return found[:3]


def namespace() -> dict[str, object]:
    """The kernel's variables; {} outside a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return {}
    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def _only_here(task: Task, cells: list[Cell], names: dict[str, object]) -> list[str]:
    """Variables that an answer reads, that no cell to be graded sets, and that the kernel has all the same."""
    trees = [tree for cell in cells if (tree := _parsed(cell)) is not None]
    bound, read = set(dir(builtins)), set()
    for tree in trees:
        answers = _definitions(tree, task)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                bound.add(node.id)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                bound.add(node.name)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
        read |= {node.id for answer in answers for node in ast.walk(answer) if isinstance(node, ast.Name)}
    missing = sorted(name for name in read - bound if name in names)
    return [f"{name} exists only in your kernel: no cell that is graded sets it." for name in missing]


def _redefined(task: Task, cells: list[Cell], names: dict[str, object]) -> list[str]:
    """Answers whose code in the kernel is not that of the cell that is graded."""
    found = []
    for function in task.functions:
        codes = [code for cell in cells for code in _codes(cell, function)]
        here = names.get(function)
        if codes and here is not None and not _code_of(here) <= codes[-1]:
            found.append(f"Your kernel's {function} is not the one in its cell: the cell is graded. Run it again.")
    return found


def _not_run(cells: list[Cell]) -> list[str]:
    """Cells that stand otherwise in the saved notebook: what was run is graded."""
    path = Path(os.environ.get("JPY_SESSION_NAME", ""))
    if path.suffix != ".ipynb" or not path.is_file():
        return []
    from minidist.course import notebook

    try:
        saved = {cell.id: cell.source for cell in notebook.read_cells(path)}
    except ValueError:
        return []
    changed = [cell.id for cell in cells if cell.id.startswith("answer") and saved.get(cell.id, cell.source) != cell.source]
    return [f"{name} has changed since you ran it: what you ran is graded." for name in changed]


def _parsed(cell: Cell) -> ast.Module | None:
    try:
        return ast.parse(without_magics(cell.source))
    except (SyntaxError, ValueError):
        return None


def _definitions(tree: ast.Module, task: Task) -> list[ast.AST]:
    return [node for node in tree.body if getattr(node, "name", None) in task.functions]


def _codes(cell: Cell, function: str) -> list[set[tuple]]:
    tree = _parsed(cell)
    if tree is None or function not in [getattr(node, "name", None) for node in tree.body]:
        return []
    whole = compile(tree, "<cell>", "exec", dont_inherit=True)
    return [_within(code) for code in whole.co_consts if isinstance(code, CodeType) and code.co_name == function]


def _within(code: CodeType) -> set[tuple]:
    """The bytecode of a function or class and of all that is nested in it."""
    found = {(code.co_name, code.co_code, code.co_names)}
    for item in code.co_consts:
        found |= _within(item) if isinstance(item, CodeType) else {(code.co_name, repr(item))}
    return found


def _code_of(thing: object) -> set[tuple]:
    """The same of what the kernel holds: of a class, its own methods."""
    own = vars(thing).values() if isinstance(thing, type) else [thing]
    codes = [getattr(item, "__code__", None) for item in own]
    return set().union(*(_within(code) for code in codes if isinstance(code, CodeType)))
