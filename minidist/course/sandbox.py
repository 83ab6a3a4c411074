"""The sandbox: the fresh process in which a submission runs. Reads a job on stdin, writes results as JSON, judges nothing.

Today's walls: an empty folder, a process group that is ended afterwards, values reduced to plain JSON before they leave.
It keeps honest mistakes from counting as answers; it is no prison. For exams use a container.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    """Run the job's cells in order, then its cases until one ends badly."""
    from minidist.ranks import session

    job = json.loads(sys.stdin.buffer.read())
    session.current().warm_up()  # the ranks' helper imports torch while the cells do the same here
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    note = run_cells(job["cells"], namespace)
    function = namespace.get(job["function"])
    cases = []
    if function is None:
        note = note or f"{job['function']} is not there after running all cells in order from a fresh start."
    elif not callable(function):
        note, function = f"{job['function']} is not a function but {function!r:.60}", None
    for case in job["cases"] if function is not None else []:
        cases.append(run_case(job, case, function))
        if cases[-1]["problem"]:
            break
    result = Path(job["result"])
    result.with_suffix(".part").write_text(json.dumps({"cases": cases, "note": note}))
    result.with_suffix(".part").rename(result)


def run_cells(cells: list, namespace: dict) -> str:
    """Execute (id, source) pairs in order. An error ends its cell only; the first one is returned in words."""
    from minidist.ranks.cell import remember

    note = ""
    for number, (name, source) in enumerate(cells, 1):
        if source.lstrip().startswith("%%"):
            continue  # cell magics are demonstrations
        name = name or f"number {number}"
        remember(f"<cell {name}>", source)  # so that tracebacks show its lines, on the ranks too
        try:
            exec(compile(without_magics(source), f"<cell {name}>", "exec"), namespace)
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f" at line {where.lineno}" if where.filename.startswith("<cell") else ""
            text = f"Cell {name}{at}, run from a fresh start, raised {type(error).__name__}: {error}"
            note = note or text
    return note


def without_magics(source: str) -> str:
    """The source with line magics, shell lines and help lines turned into comments."""
    return re.sub(r"^(\s*)([%!?].*|.*[^\s#?]\?{1,2})$", r"\1pass", source, flags=re.MULTILINE)


def run_case(job: dict, case: dict, function: object) -> dict:
    """One call on `world_size` ranks: encoded values and tapes by rank, or the problem."""
    from minidist import ranks

    problem = {"kind": "error", "rank": None, "suspects": [], "text": ""}
    try:
        got = ranks.run(call, case["world_size"], function, case["inputs"], job["task"], timeout_s=job["limit_s"])
    except ranks.RankHang as error:
        problem |= {"kind": "hang", "text": str(error), "suspects": error.ranks}
    except ranks.RankDied as error:
        problem |= {"kind": "died", "rank": error.rank, "text": str(error)}
    except ranks.RankError as error:
        kind = "mismatch" if error.kind == "CommMismatch" else "error"
        problem |= {"kind": kind, "rank": error.rank, "text": error.traceback}
    except Exception as error:  # not a function, or one that cannot travel to the ranks
        problem |= {"text": f"{type(error).__name__}: {error}"}
    else:
        if any(item.get("stub") for item in got):
            return {"values": [], "tapes": [], "problem": problem | {"kind": "stub"}}
        return {"values": [i["value"] for i in got], "tapes": [i["tape"] for i in got], "problem": None}
    return {"values": [], "tapes": [], "problem": problem}


def call(mesh, function, inputs: list[list], task: str) -> dict:
    """On a rank: call the submission, return what it said and what it sent."""
    start = len(mesh.tape.lines)
    try:
        value = function(mesh, *inputs[mesh.rank])
    except NotImplementedError as error:
        if error.args == (task,):
            return {"stub": True}
        raise
    return {"value": encode(value), "tape": [asdict(line) for line in mesh.tape.lines[start:]]}


def encode(value: object) -> object:
    """A value as JSON. Plain scalars and lists stand for themselves; all else becomes a dict that names its kind.

    Exact types only: an object of a subclass (one that equals everything, say) crosses as its name.
    """
    import torch

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if type(value) is torch.Tensor:
        flat = value.detach().cpu()
        return {"tensor": flat.tolist(), "dtype": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape)}
    return {"object": type(value).__name__}


if __name__ == "__main__":
    main()
