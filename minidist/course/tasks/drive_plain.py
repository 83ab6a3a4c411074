"""The drive of tasks that need no ranks: the answer is a plain function of the case's inputs, and never sees a mesh."""

from __future__ import annotations

from collections.abc import Callable


def plain(mesh, answer: Callable, *inputs):
    """Call the answer with the inputs alone."""
    return answer(*inputs)
