"""Show the engine's own source in a lesson, and say plainly where a GPU would be needed."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path


class Source:
    """Source text that a notebook shows highlighted and everything else prints."""

    def __init__(self, text: str, where: str):
        self.text, self.where = text, where

    def _repr_markdown_(self) -> str:
        return f"`{self.where}`\n```python\n{self.text}\n```"

    def __repr__(self):
        return f"# {self.where}\n{self.text}"


def source(thing: object) -> Source:
    """The live source of a function, class or module: what runs, not a copy of it."""
    import minidist

    lines, first = inspect.getsourcelines(thing)  # of a method: indented
    path = Path(inspect.getsourcefile(thing)).resolve()
    root = Path(minidist.__file__).resolve().parent.parent
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return Source(textwrap.dedent("".join(lines)).rstrip(), f"{name}, line {max(first, 1)}")


def gpu() -> int:
    """How many GPUs there are; says "skipped: no GPU" where there is none, which is neither a pass nor a failure."""
    from minidist.core import device

    count = device.gpu_count()
    if not count:
        print("skipped: no GPU")
    return count


def rank_names(ranks: list[int]) -> str:
    """ "rank 1", or "ranks 0, 2 and 3"; "nobody" for none."""
    from minidist.core.hang import names

    return names(ranks) if ranks else "nobody"
