"""The door through which checkpoints are written, so that a lesson or a test can put a slow disk or a full one behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

Wrapper = Callable[[BinaryIO, Path], BinaryIO]

_behind: list[Wrapper] = []  # of this process, in the order in which they were put there


def open_for_write(path: Path) -> BinaryIO:
    """A new file at `path`, open for writing bytes, behind whatever `behind` has put in its way. OSError as `open`."""
    file = open(path, "wb")  # noqa: SIM115  # whoever asks closes it
    for wrap in _behind:
        file = wrap(file, path)
    return file


@contextmanager
def behind(wrapper: Wrapper) -> Iterator[None]:
    """While this lasts, a file that any thread of this process opens here is what `wrapper(file, path)` makes of it."""
    _behind.append(wrapper)
    try:
        yield
    finally:
        _behind.remove(wrapper)
