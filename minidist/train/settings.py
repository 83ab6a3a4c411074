"""Settings: nested dataclasses to TOML and back, typed overrides from the command line, and their help text.

Knows nothing about training: every function works on any dataclass whose fields are dataclasses ("sections") of plain
values. The documentation of a field is the string under it, so it stands once, beside what it documents.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import textwrap
import tomllib
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

C = TypeVar("C")
Tree = dict[str, dict[str, Any]]  # section -> key -> value


def build(cls: type[C], tree: Tree, where: str = "") -> C:
    """A `cls` from a tree of sections, every value checked against its field's type.

    Raises ValueError naming the key, its value and what is expected; for an unknown section or key, the nearest one.
    """
    hints = get_type_hints(cls)
    sections = {}
    for section in tree:
        if section not in hints:
            raise ValueError(f"{where}there is no section [{section}]: {nearest(section, hints)}")
    for section, section_cls in hints.items():
        given = tree.get(section, {})
        if not isinstance(given, dict):
            raise ValueError(f"{where}{section} = {show(given)}: this is a section, write [{section}] and its keys below")
        sections[section] = _build_section(section_cls, section, given, where)
    return cls(**sections)


def _build_section(cls: type, section: str, given: dict[str, Any], where: str) -> Any:
    hints = get_type_hints(cls)
    values = {}
    for key, value in given.items():
        if key not in hints:
            advice = nearest(key, hints, f"{section}.")
            raise ValueError(f"{where}{section}.{key} = {show(value)}: there is no such key, {advice}")
        values[key] = convert(value, hints[key], f"{where}{section}.{key}")
    missing = [field.name for field in dataclasses.fields(cls) if _required(field) and field.name not in values]
    if missing:
        raise ValueError(f"{where}{section}.{missing[0]} is not set: it has no default, {_docs(cls)[missing[0]]}")
    return cls(**values)


def override(cls: type, tree: Tree, arguments: list[str]) -> Tree:
    """The tree with `--section.key value` or `--section.key=value` arguments laid over it."""
    hints, tree = get_type_hints(cls), {section: dict(keys) for section, keys in tree.items()}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--") or "." not in name:
            raise ValueError(f"{word}: not understood here, overrides look like --train.steps 50")
        section, key = name[2:].split(".", 1)
        if section not in hints:
            raise ValueError(f"--{section}.{key}: there is no section {section!r}, {nearest(section, hints)}")
        keys = get_type_hints(hints[section])
        if key not in keys:
            raise ValueError(f"--{section}.{key}: there is no such key, {nearest(key, keys, f'--{section}.')}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{section}.{key}: a value is missing, expected {expected(keys[key])}")
            text = rest.pop(0)
        tree.setdefault(section, {})[key] = _read(text, keys[key], f"--{section}.{key}")
    return tree


def to_tree(settings: Any) -> Tree:
    """The settings as sections of plain values, fit for JSON and TOML: tuples as lists, unset keys left out."""
    return {
        section.name: {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(getattr(settings, section.name))
            if (value := getattr(getattr(settings, section.name), field.name)) is not None
        }
        for section in dataclasses.fields(settings)
    }


def dumps(settings: Any) -> str:
    """The settings as TOML that `tomllib` and `build` read back to an equal object."""
    parts = []
    for section, keys in to_tree(settings).items():
        parts.append("\n".join([f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]))
    return "\n\n".join(parts) + "\n"


def help_text(cls: type, only: str | None = None, width: int = 110) -> str:
    """One entry a field: its flag, type, default and the documentation that stands under it. `only`: those of one section."""
    lines = []
    for section, section_cls in get_type_hints(cls).items():
        if only not in (None, section):
            continue
        lines.append(f"[{section}]  {inspect.getdoc(section_cls).splitlines()[0]}")
        hints, docs = get_type_hints(section_cls), _docs(section_cls)
        for field in dataclasses.fields(section_cls):
            default = "required" if _required(field) else f"default {_toml(_default(field))}"
            lines.append(f"  --{section}.{field.name}  {expected(hints[field.name])}; {default}")
            lines += textwrap.wrap(docs[field.name], width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def nearest(word: str, choices: Any, prefix: str = "") -> str:
    """The advice for a name that is not among `choices`: the nearest right one, or all of them."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"did you mean {prefix}{found[0]}?" if found else f"use one of {', '.join(prefix + c for c in choices)}"


def convert(value: Any, kind: Any, key: str) -> Any:
    """`value`, as read from TOML, as a value of type `kind`; ValueError with key, value and what is expected."""
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else convert(value, _inner(kind), key)
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        advice = f", {nearest(value, get_args(kind))}" if isinstance(value, str) else ""
        raise ValueError(f"{key} = {show(value)}: expected {expected(kind)}{advice}")
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and len(value) == len(get_args(kind)):
            return tuple(convert(v, k, key) for v, k in zip(value, get_args(kind), strict=True))
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{key} = {show(value)}: expected {expected(kind)}")


def expected(kind: Any) -> str:
    """A type in words for a person: "a whole number", "one of adamw, sgd"."""
    if get_origin(kind) in (Union, types.UnionType):
        return f"{expected(_inner(kind))}, or none"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} numbers such as 0.9,0.95"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _read(text: str, kind: Any, key: str) -> Any:
    """The value that a word of the command line means for a field of type `kind`."""
    if get_origin(kind) in (Union, types.UnionType):
        return None if text == "none" else _read(text, _inner(kind), key)
    if kind is str or get_origin(kind) is Literal:
        return convert(text, kind, key)
    if get_origin(kind) is tuple and not text.startswith("["):
        text = f"[{text}]"
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return convert(value, kind, key)


def show(value: Any) -> str:
    """A value as it stands in TOML, cut to one short line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    # A float keeps its dot or exponent (TOML tells 1 from 1.0); JSON text is also a TOML basic string.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _docs(cls: type) -> dict[str, str]:
    """The documentation of each field: the string that stands under it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    docs = {}
    for field, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            assert documented, f"{cls.__name__}.{field.target.id} has no documentation under it"
            docs[field.target.id] = inspect.cleandoc(below.value.value).replace("\n", " ")
    return docs


def _inner(kind: Any) -> Any:
    return next(k for k in get_args(kind) if k is not type(None))


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
