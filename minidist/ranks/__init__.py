"""Ranks from Python or a notebook cell: `ranks.run(fn, 4)` and `%%ranks 4`. Importing this starts nothing.

    from minidist import ranks

    def program(mesh, x):
        return comm.all_reduce(x + mesh.rank, mesh.world)

    ranks.run(program, 4, torch.zeros(3))   # four real processes over gloo; results by rank

The first call starts a process that imports torch (seconds); after that, four warm ranks answer in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minidist.ranks.errors import RankDied, RankError, RankHang, RanksError, UsageError

if TYPE_CHECKING:
    from minidist.core.layout import Layout
    from minidist.ranks.session import RankStatus

__all__ = ["RankDied", "RankError", "RankHang", "RanksError", "UsageError", "pull", "push", "run", "status", "stop"]


def run(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    layout: Layout | None = None,
    timeout_s: float = 60.0,
    check: bool = True,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(mesh, *args, **kwargs)` on `n` ranks and return what it returned, by rank.

    `layout` (default: `Layout(dp=n)`) shapes the mesh. The ranks stay warm for the next call; `fresh=True` starts new ones
    and ends them afterwards. `check` compares every collective with the other ranks' (teaching mode). Functions may be
    typed in a cell or live in any module of yours: ranks get their present code.

    Raises RankError with a rank's traceback, RankDied, RankHang after `timeout_s` seconds, and UsageError (a ValueError).
    """
    from minidist.ranks.session import current

    try:
        return current().run(fn, n, args, kwargs, layout=layout, timeout_s=timeout_s, check=check, fresh=fresh)
    except (RanksError, UsageError, KeyboardInterrupt) as error:
        raise error.with_traceback(None) from None  # the frames of the pool tell nobody anything


def push(**variables: Any) -> None:
    """Set variables in the namespace of every rank's cells, of ranks that run now and of those that start later."""
    from minidist.ranks.session import current

    current().push(variables)


def pull(name: str) -> list[Any]:
    """The value of a variable of the last `%%ranks` cell's namespace, by rank."""
    from minidist.ranks.session import current

    return current().pull(name)


def status() -> list[RankStatus]:
    """What each rank used last is doing, read from shared memory: cheap, and possible while they run."""
    from minidist.ranks.session import current

    return current().status()


def stop() -> None:
    """End all ranks. The next call starts new ones."""
    from minidist.ranks.session import current

    current().stop()


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext minidist.ranks` brings `%%ranks` and starts importing torch in the background."""
    from minidist.ranks.magic import register

    register(shell)
