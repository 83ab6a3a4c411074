"""Build the notebooks: `python -m minidist.course.build [--check]`.

Sources are jupytext `py:percent` files: `lessons/src/NN_topic.py` and `solutions/src/NN_topic.py`. Out come
`lessons/*.ipynb`, `solutions/*.ipynb` and, with the answers taken out, `exercises/*.ipynb`: bytes that depend on the source
alone. `--check` writes nothing and compares. Needs jupytext (the `test` extra); nobody who only learns does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # what nbformat allows as a cell id
FORBIDDEN = re.compile(r"NBVAL_\w+|nbval-[\w-]+|raises-exception|(?<![\w.])input\(")  # each would let an error pass, or wait
MOST_CODE_CELLS = 30
REASONING = "why-"  # cells of this name explain an answer: `solution` shows them, exercises go without
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(argv: list[str] | None = None) -> int:
    """Build or check; 0 when all is well, 1 when something has to be mended."""
    parser = argparse.ArgumentParser(prog="python -m minidist.course.build", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a notebook is not its source's")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout (default: this one)")
    options = parser.parse_args(argv)
    problems, built = [], {}
    for source in sorted(options.root.glob("lessons/src/*.py")) + sorted(options.root.glob("solutions/src/*.py")):
        try:
            built |= build(source, options.root)
        except ValueError as error:
            problems.append(str(error))
    if not built and not problems:
        problems.append(f"{options.root}: no sources under lessons/src or solutions/src: pass --root a checkout")
    for path, (content, listed) in built.items():
        problems += listed
        if options.check and (not path.is_file() or path.read_bytes() != content):
            problems.append(f"{path.relative_to(options.root)}: not what its source says; run python -m minidist.course.build")
        elif not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    expected = {path.resolve() for path in built}
    for kind in ("lessons", "solutions", "exercises"):
        for path in sorted(options.root.glob(f"{kind}/*.ipynb")):
            if path.resolve() not in expected:
                problems.append(f"{path.relative_to(options.root)}: has no source; notebooks are never edited by hand")
    print("\n".join(problems) or f"{len(built)} notebooks {'match' if options.check else 'built from'} their sources")
    return 1 if problems else 0


def build(source: Path, root: Path) -> dict[Path, tuple[bytes, list[str]]]:
    """Notebooks of one source: path -> (bytes, prose numbers that nobody vouches for). ValueError with all that is wrong."""
    cells = read_cells(source)
    kind = source.parent.parent.name
    name = f"{source.stem}.ipynb"
    wrong = [f"{source.relative_to(root)}: {problem}" for problem in faults(cells, kind)]
    if wrong:
        raise ValueError("\n".join(wrong))
    loose = [f"{source.relative_to(root)}: {text}" for text in loose_numbers(cells)] if kind == "lessons" else []
    if kind == "lessons":
        return {root / "lessons" / name: (render(cells), loose)}
    with_answers = [{**cell, "source": solved(cell["source"])} for cell in cells]
    without = [{**cell, "source": stripped(cell["source"])} for cell in cells if not cell["name"].startswith(REASONING)]
    return {
        root / "solutions" / name: (render(with_answers), []),
        root / "exercises" / name: (render(without), []),
    }


def read_cells(source: Path) -> list[dict]:
    """Cells of a py:percent file: {"type", "name", "tags", "source"}."""
    import jupytext

    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    return [
        {
            "type": cell.cell_type,
            "name": cell.metadata.get("name", ""),
            "tags": list(cell.metadata.get("tags", [])),
            "source": cell.source,
        }
        for cell in notebook.cells
    ]


def render(cells: list[dict]) -> bytes:
    """The notebook as bytes: ids are names, no outputs, sorted keys."""
    made = []
    for cell in cells:
        metadata = {"tags": sorted(cell["tags"])} if cell["tags"] else {}
        entry = {"cell_type": cell["type"], "id": cell["name"], "metadata": metadata}
        entry["source"] = cell["source"].splitlines(keepends=True)
        if cell["type"] == "code":
            entry |= {"execution_count": None, "outputs": []}
        made.append(entry)
    content = {"cells": made, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return (json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def solved(text: str) -> str:
    """A cell with its answer, without the marks around it and without the stub."""
    return "\n".join(line for line in text.split("\n") if not re.match(r"\s*# (BEGIN|END) ANSWER\s*$|\s*# STUB: ", line))


def stripped(text: str) -> str:
    """A cell with the stub in place of its answer."""
    kept, inside = [], False
    for line in text.split("\n"):
        if re.match(r"\s*# (BEGIN|END) ANSWER\s*$", line):
            inside = "BEGIN" in line
        elif not inside:
            kept.append(re.sub(r"^(\s*)# STUB: ", r"\1", line))
    return "\n".join(kept)


def faults(cells: list[dict], kind: str) -> list[str]:
    """What the form of COURSE.md does not allow, in words."""
    found, seen = [], set()
    for number, cell in enumerate(cells, 1):
        name = cell["name"]
        if not NAME.fullmatch(name):
            found.append(f'cell {number} needs a name of letters, digits, - and _: # %% name="..." (it has {name!r})')
        elif name in seen:
            found.append(f"two cells are named {name!r}")
        seen.add(name)
        for text in [cell["source"], *cell["tags"]]:
            found += [f"cell {name!r} says {match[0]!r}, which hides failures" for match in FORBIDDEN.finditer(text)]
        begins, ends, stubs = (len(re.findall(p, cell["source"])) for p in ("# BEGIN ANSWER", "# END ANSWER", "# STUB: "))
        if begins != ends:
            found.append(f"cell {name!r} has {begins} BEGIN ANSWER and {ends} END ANSWER")
        if begins and not stubs:
            found.append(f"cell {name!r} has an answer and no '# STUB: ' line to stand in for it")
        if begins and kind == "lessons":
            found.append(f"cell {name!r} has an answer: lessons have none, put it into solutions/src")
    code = sum(cell["type"] == "code" for cell in cells)
    if code > MOST_CODE_CELLS:
        found.append(f"{code} code cells: cut to {MOST_CODE_CELLS}, or split the lesson into a and b")
    return found


NUMBER = re.compile(r"(?<![\w.#])\d[\d,]*(?:\.\d+)?")
LABEL = re.compile(
    r"\b(?:lessons?|ranks?|exercises?|places?|tasks?|python|version|issue)\s+\d+(?:(?:,|,? and|,? or| to|–|-)\s*\d+)*"
    r"|\d+ minutes",
    re.IGNORECASE,
)


def loose_numbers(cells: list[dict]) -> list[str]:
    """Numbers in prose that no claim asserts and no link in their paragraph backs. Code, headings and labels do not count."""
    claimed = {
        _value(number)
        for cell in cells
        if cell["type"] == "code" and "claim(" in cell["source"]
        for number in re.findall(r"(?<![\w.])\d[\d_]*(?:\.\d+)?", cell["source"])
    }
    found = []
    for cell in cells:
        if cell["type"] != "markdown":
            continue
        prose = re.sub(r"```.*?```", "", cell["source"], flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n", prose):
            if re.search(r"\]\(https?://", paragraph):
                continue
            text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|^\s*#.*$|^\s*\d+\. ", " ", paragraph, flags=re.MULTILINE)
            for match in NUMBER.finditer(LABEL.sub(" ", text)):
                if _value(match[0]) not in claimed:
                    found.append(f"cell {cell['name']!r}: {match[0]} has neither a claim nor a source")
    return found


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("_", "").rstrip("."))


if __name__ == "__main__":
    sys.exit(main())
