"""Listen to the ranks of one run until all have ended, one has failed and the rest are stuck, or time is up."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from minidist.core.board import Board
from minidist.core.hang import deadlocked
from minidist.ranks.launch import Launcher
from minidist.ranks.output import Printer

GRACE_S = 1.0  # after a failure, ranks that wait this long in a collective are taken to wait for the failed one
LOOK_S = 0.5  # between two looks for a deadlock
CERTAIN_S = 1.0  # ranks that have waited this long for an operation some member never called will wait for ever
DEATH_S = 0.3  # after a death the connections are broken anyway: only so long for its victims to say so
PATIENCE_S = 5.0  # after a failure, ranks that still compute may go on this long


@dataclass
class Member:
    """One rank, seen from the parent."""

    rank: int
    connection: Connection
    pid: int


@dataclass
class Outcome:
    """How one rank's run ended: "result", "error" or "died"."""

    kind: str
    time: float
    """of time.monotonic()"""
    value: Any = None
    """what a result brings; exit code of a rank that died"""
    error: dict[str, Any] = field(default_factory=dict)
    """of a rank that raised: kind, message, traceback, bases (class names)"""
    traffic: dict[tuple, int] = field(default_factory=dict)
    """operations it launched, by what has to match on other ranks"""


class Ear:
    """Reads messages. `torn` while one is being read or written: an interrupt then leaves half of it on the line."""

    def __init__(self):
        self.torn = False

    def hear(self, member: Member) -> tuple | None:
        """The next message of a rank; None if its process is gone."""
        self.torn = True
        try:
            message = member.connection.recv()
        except (OSError, EOFError):
            message = None
        self.torn = False
        return message

    def tell(self, member: Member, message: tuple) -> None:
        """Send a rank a message. That it is gone shows when it is listened to."""
        self.torn = True
        with contextlib.suppress(OSError):
            member.connection.send(message)
        self.torn = False


class Listening:
    """One run's listening. `outcomes` grows by rank."""

    def __init__(self, ear: Ear, members: list[Member], launcher: Launcher, board: Board, job: int, printer: Printer):
        self.ear, self.members, self.launcher, self.board, self.job, self.printer = ear, members, launcher, board, job, printer
        self.outcomes: dict[int, Outcome] = {}
        self.began = time.monotonic()
        self.failed_at: float | None = None
        self.deadlocked = False
        self._look_at = self.began + CERTAIN_S

    def until(self, deadline: float) -> None:
        """Listen until every rank has ended, the rest are stuck (after a failure, or for good), or `deadline` has passed."""
        while (pending := self.pending()) and time.monotonic() < deadline and not self._stuck(pending):
            pause = 0.05 if self.failed_at else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            ready = wait([member.connection for member in pending], pause)
            for member in pending:
                if member.connection in ready:
                    self._take(member, self.ear.hear(member))

    def pending(self) -> list[Member]:
        """Ranks whose run has not ended."""
        return [member for member in self.members if member.rank not in self.outcomes]

    def _take(self, member: Member, message: tuple | None) -> None:
        now = time.monotonic()
        if message is None:
            self._end(member, Outcome("died", now, self.launcher.exit_code(member.pid)))
            return
        what, job, *rest = message
        if job != self.job:
            return  # the last words of a run that was cut short
        if what == "out":
            self.printer.say(member.rank, *rest)
        elif what == "result":
            self._end(member, Outcome("result", now, rest[0], traffic=rest[1]))
        else:
            self._end(member, Outcome("error", rest[0].get("time", now), error=rest[0], traffic=rest[1]))

    def _end(self, member: Member, outcome: Outcome) -> None:
        self.outcomes[member.rank] = outcome
        self.printer.done(member.rank)
        if outcome.kind != "result" and self.failed_at is None:
            self.failed_at = time.monotonic()

    def _stuck(self, pending: list[Member]) -> bool:
        """After a failure: whether those that have not ended wait in collectives, or have had time enough."""
        now = time.monotonic()
        if self.failed_at is None:
            if now > self._look_at:
                self._look_at = now + LOOK_S
                self.deadlocked = self._hopeless(pending, now)
            return self.deadlocked
        if any(outcome.kind == "died" for outcome in self.outcomes.values()):
            return now - self.failed_at > DEATH_S
        if now - self.failed_at < GRACE_S:
            return False
        states = [self.board.state(member.rank) for member in pending]
        return now - self.failed_at > PATIENCE_S or all(state.entry and now - state.since > GRACE_S for state in states)

    def _hopeless(self, pending: list[Member], now: float) -> bool:
        if self.board.state(pending[0].rank).entry is None:  # one busy rank is hope; reading all boards takes 2 ms a rank
            return False
        return deadlocked([self.board.state(rank) for rank in range(len(self.members))], now, CERTAIN_S)
