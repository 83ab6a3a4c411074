"""What the parent raises when ranks fail. The message is the report: the rank's own traceback, never a pile of ours."""

from __future__ import annotations


class RanksError(Exception):
    """Some rank failed. `str(error)` is the whole report, `ranks` are those at fault, `rank` is the one where there is one."""

    def __init__(self, report: str, ranks: list[int] | None = None):
        super().__init__(report)
        self.report, self.ranks = report, ranks or []

    @property
    def rank(self) -> int | None:
        """The rank at fault; None where no single one is."""
        return self.ranks[0] if len(self.ranks) == 1 else None

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of the frames of the pool, which tell a learner nothing."""
        return self.report.splitlines()


class RankError(RanksError):
    """A rank raised. `kind` is the name of its exception's class, `traceback` its text as Python prints it.

    `ranks` has all that raised the same; the traceback is of the lowest.
    """

    def __init__(self, report: str, ranks: list[int], kind: str, traceback: str):
        super().__init__(report, ranks)
        self.kind, self.traceback = kind, traceback

    @property
    def rank(self) -> int:
        """The rank whose traceback is shown."""
        return self.ranks[0]


class RankDied(RanksError):
    """The process of a rank ended. `exit_code` is as subprocess counts: negative for the signal that ended it."""

    def __init__(self, report: str, rank: int, exit_code: int | None):
        super().__init__(report, [rank])
        self.exit_code = exit_code


class RankHang(RanksError):
    """The ranks did not end within the limit. `ranks` are those that the others wait for."""


class UsageError(ValueError):
    """Something the caller can put right: one line that says what to do, in a notebook too."""

    def _render_traceback_(self) -> list[str]:
        return [f"ValueError: {self}"]
