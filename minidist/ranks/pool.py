"""A pool: n ranks that stay warm between runs. It starts them, sends them a run, judges how it ended, and heals itself."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

from minidist.core.board import Board, RankState
from minidist.core.hang import hang_report, names, suspects, verb
from minidist.core.layout import Layout
from minidist.ranks import host, wire
from minidist.ranks.blame import GONE, culprit, failure, in_step, readable
from minidist.ranks.cell import typed_sources
from minidist.ranks.collect import Ear, Listening, Member
from minidist.ranks.errors import RankHang, RanksError, UsageError
from minidist.ranks.launch import START_S, Launcher, log_name
from minidist.ranks.output import Printer

STACK_S = 0.3  # for ranks to write their Python stacks once asked
FREE_S = 0.5  # after an interrupt, for ranks to come back by themselves
_numbers = itertools.count(1)  # of pools and of runs, unique in this process


class Pool:
    """`ranks` warm ranks. One run at a time; a failure that leaves process groups out of step ends all of them."""

    def __init__(self, launcher: Launcher, ranks: int):
        self.launcher, self.ranks = launcher, ranks
        self.threads = 0
        self.members: list[Member] = []
        self.board: Board | None = None
        self.ear = Ear()
        self.busy = threading.Lock()
        self.lost: str | None = None  # why the ranks of before are gone, while that explains a missing variable
        self.in_step = True  # whether the last run left all groups with nothing under way
        self.holds_variables = False  # whether somebody would miss them
        self._tickets: list[str] = []
        self._files: list[str] = []  # board, rendezvous, each rank's stacks, each rank's log
        self._known: set[tuple[str, int]] = set()  # sources typed by the user that the ranks have

    # Life -----------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether its ranks are up."""
        return bool(self.members)

    def start(self, pushed: list[bytes]) -> None:
        """Start the ranks if they are not up, and give them the variables pushed so far."""
        if self.members:
            return
        number, door = next(_numbers), self.launcher.door
        self.ear, self._known = Ear(), set()
        self.threads = host.threads_per_rank(self.ranks)
        board, rendezvous = door.path(f"board-{number}"), door.path(f"rendezvous-{number}")
        stacks = [door.path(f"stacks-{number}-{rank}") for rank in range(self.ranks)]
        self.board = Board.create(board, self.ranks)
        self._tickets = tickets = [f"{number}-{rank}" for rank in range(self.ranks)]
        self._files = [board, rendezvous, *stacks, *(door.path(log_name(ticket)) for ticket in tickets)]
        orders = {
            **{"world_size": self.ranks, "threads": self.threads, "interface": host.loopback_interface(), "board": board},
            **{"rendezvous": rendezvous, "folder": self.launcher.leaves},
            **{"cwd": os.getcwd(), "path": list(sys.path), "environ": _environ()},
        }
        deadline = time.monotonic() + START_S
        try:
            self.launcher.start(tickets, [name for name in sys.modules if name.startswith(OURS)])
            for rank, ticket in enumerate(tickets):
                member = Member(rank, *self.launcher.rank(ticket, deadline))
                self.members.append(member)
                member.connection.send({**orders, "rank": rank, "stacks": stacks[rank]})
            listening = self._listen(0, Printer(self.ranks))
            listening.until(deadline)
            if listening.failed_at or listening.pending():
                raise RuntimeError(f"ranks could not join each other: {self._why(listening)}")
        except BaseException:
            self.kill()
            self.launcher.abandon(tickets)
            raise
        for payload in pushed:
            self.push(payload)
        self.in_step, self.holds_variables = True, bool(pushed)

    def kill(self) -> None:
        """End all ranks at once."""
        members, self.members = self.members, []
        self.launcher.signal([member.pid for member in members], signal.SIGKILL)
        for member in members:
            member.connection.close()
        for path in self._files:
            with contextlib.suppress(OSError):
                os.remove(path)

    def _why(self, listening: Listening) -> str:
        outcomes = listening.outcomes
        if not listening.failed_at:
            return f"no answer within {START_S:.0f} s"
        rank = culprit(outcomes)
        return outcomes[rank].error.get("traceback") or self._log(rank)

    def _log(self, rank: int) -> str:
        return self.launcher.last_words(self._tickets[rank])

    # Runs -----------------------------------------------------------------------------------------------------------

    def call(self, payload: bytes, context: dict[str, Any]) -> list[Any]:
        """Call the packed (fn, args, kwargs) as fn(mesh, *args, **kwargs) on every rank; results by rank."""
        return [wire.loads(value) for value in self._run("call", context, Printer(self.ranks), payload)]

    def call_each(self, payloads: list[bytes], context: dict[str, Any]) -> list[bytes]:
        """Call on every rank what was packed for it alone; results by rank, packed as they came."""
        return self._run("call", context, Printer(self.ranks), each=payloads)

    def cell(self, source: str, filename: str, context: dict[str, Any], as_it_comes: bool = False) -> None:
        """Run the source of a cell in every rank's namespace."""
        self.holds_variables = True
        self._run("cell", context, Printer(self.ranks, as_it_comes), source, filename)

    def push(self, payload: bytes) -> None:
        """Set packed variables in every rank's namespace."""
        for member in self.members:
            self.ear.tell(member, ("push", payload))

    def pull(self, name: str) -> list[Any]:
        """A variable's value on every rank."""
        values = self._run("pull", {"timeout_s": 60.0}, Printer(self.ranks), name)
        if without := [rank for rank, value in enumerate(values) if value is None]:
            why = f" They were started anew after this: {self.lost}" if self.lost else ""
            raise UsageError(
                f"{names(without)} {verb(without, 'has', 'have')} no variable {name!r}: set it in a %%ranks cell.{why}"
            )
        return [wire.loads(value) for value in values]

    def _run(
        self, what: str, context: dict[str, Any], printer: Printer, *arguments: Any, each: list[bytes] | None = None
    ) -> list[Any]:
        """Have every rank do `what`, with the same arguments or, from `each`, one of its own."""
        with self.busy:
            job, context = next(_numbers), {**context, **self._surroundings(), "renumber": self.in_step}
            for rank in range(self.ranks):
                self.board.reset(rank)  # numbers start anew: nobody must find a peer's call of the last run
            listening = self._listen(job, printer)
            try:
                for rank, member in enumerate(self.members):
                    self.ear.tell(member, (what, job, context, *(arguments if each is None else [each[rank]])))
                listening.until(listening.began + context["timeout_s"])
                return self._judge(listening, printer)
            except KeyboardInterrupt:
                self._free(listening)
                raise
            except BaseException as error:
                if not isinstance(error, RanksError):
                    self.kill()
                raise
            finally:
                printer.finish()

    def _surroundings(self) -> dict[str, Any]:
        """Where the parent works, and the sources that were typed since the last run (for tracebacks)."""
        sources = {name: text for name, text in typed_sources().items() if (name, hash(text)) not in self._known}
        self._known.update((name, hash(text)) for name, text in sources.items())
        return {"cwd": os.getcwd(), "path": list(sys.path), "sources": sources}

    def _listen(self, job: int, printer: Printer) -> Listening:
        return Listening(self.ear, self.members, self.launcher, self.board, job, printer)

    def _judge(self, listening: Listening, printer: Printer) -> list[Any]:
        """The results, or the exception that says what went wrong."""
        outcomes, pending = listening.outcomes, listening.pending()
        self.in_step = in_step(outcomes, self.ranks)
        if not pending and not listening.failed_at:
            return [outcomes[rank].value for rank in range(self.ranks)]
        states = {member.rank: self.board.state(member.rank) for member in pending}
        if listening.failed_at:
            rank = culprit(outcomes)
            log = self._log(rank) if outcomes[rank].kind == "died" else ""
            error = failure(outcomes, states, log, self._farewell(outcomes[rank].error.get("kind")))
        else:
            error = self._hang(pending, listening)
        printer.finish()
        if not self.in_step:
            self.kill()
            self.lost = str(error).splitlines()[0].rstrip(".") + "."
        raise error

    def _farewell(self, kind: str | None = None) -> str:
        """What a report has to say of the ranks' variables; "" where they are all there."""
        if not self.in_step:
            return GONE if self.holds_variables else ""
        if kind == "NameError" and self.lost:
            return f"The ranks were started anew after this: {self.lost} Run the cells again that set their variables."
        return ""

    def _hang(self, pending: list[Member], listening: Listening) -> RankHang:
        now = time.monotonic()
        took = f"{now - listening.began:.1f} s"
        head = f"hang: no rank can go on (seen after {took})" if listening.deadlocked else f"hang: not done after {took}"
        stacks = self._stacks(pending)
        states = [self.board.state(rank) for rank in range(self.ranks)]
        report = readable(hang_report(states, stacks, now))
        return RankHang(f"{head}: {report}\n\n{self._farewell()}".rstrip(), suspects(states))

    def _stacks(self, members: list[Member]) -> dict[int, str]:
        """The Python stacks of ranks, written by faulthandler even where a rank sits in C++."""
        files = {member.rank: open(self._files[2 + member.rank]) for member in members}  # noqa: SIM115
        try:
            self.launcher.signal([member.pid for member in members], signal.SIGUSR1)
            stacks = dict.fromkeys(files, "")
            end = time.monotonic() + STACK_S
            while not all(stacks.values()) and time.monotonic() < end:
                time.sleep(0.01)
                stacks = {rank: stacks[rank] + file.read() for rank, file in files.items()}
            time.sleep(0.02)  # for the rest of a stack that was being written
            return {rank: stacks[rank] + file.read() for rank, file in files.items()}
        finally:
            for file in files.values():
                file.close()

    def _free(self, listening: Listening) -> None:
        """After an interrupt: let ranks come back by themselves, with their variables, or end them."""
        try:
            if not self.ear.torn:
                self.launcher.signal([member.pid for member in listening.pending()], signal.SIGINT)
                listening.until(time.monotonic() + FREE_S)
                if in_step(listening.outcomes, self.ranks):
                    return
            self.in_step, self.lost = False, "they were interrupted."
            if farewell := self._farewell():
                print(farewell, file=sys.stderr)
        except KeyboardInterrupt:
            pass  # impatient: the first one is on its way
        self.kill()

    def states(self) -> list[tuple[Member, RankState]]:
        """What the board says of each rank; [] while the ranks are down. Another thread may ask during a run."""
        return [(member, self.board.state(member.rank)) for member in list(self.members)]


OURS = ("minidist.core.", "minidist.parallel", "minidist.model", "minidist.data", "minidist.train", "minidist.checkpoint")


def _environ() -> dict[str, str]:
    """Our environment without a launcher's marks: these ranks are nobody else's."""
    marks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in marks}


def check_layout(layout: Layout | None, ranks: int) -> Layout:
    """The layout to use for that many ranks, or a refusal in plain words."""
    layout = layout or Layout(dp=ranks)
    try:
        layout.expect_ranks(ranks)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return layout
