"""What the parent raises when ranks fail. The message is the report: the rank's own traceback, never a pile of ours."""

from __future__ import annotations


class RanksError(Exception):
    """Some rank failed. `str(error)` is the whole report; `rank` is the one at fault (None where no single one is)."""

    def __init__(self, report: str, rank: int | None = None):
        super().__init__(report)
        self.report, self.rank = report, rank

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of the frames of the pool, which tell a learner nothing."""
        return self.report.splitlines()


class RankError(RanksError):
    """A rank raised. `kind` is the name of its exception's class, `traceback` its text as Python prints it."""

    def __init__(self, report: str, rank: int, kind: str, traceback: str):
        super().__init__(report, rank)
        self.kind, self.traceback = kind, traceback


class RankDied(RanksError):
    """The process of a rank ended. `exit_code` is as subprocess counts: negative for the signal that ended it."""

    def __init__(self, report: str, rank: int | None, exit_code: int | None):
        super().__init__(report, rank)
        self.exit_code = exit_code


class RankHang(RanksError):
    """The ranks did not end within the limit. `suspects` are the ranks that the others wait for."""

    def __init__(self, report: str, suspects: list[int]):
        super().__init__(report, suspects[0] if len(suspects) == 1 else None)
        self.suspects = suspects


class UsageError(ValueError):
    """Something the caller can put right: one line that says what to do, in a notebook too."""

    def _render_traceback_(self) -> list[str]:
        return [f"ValueError: {self}"]
