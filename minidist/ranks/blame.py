"""Of several ranks that failed, name the one at fault and write the report: its traceback first, then the fate of the rest."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile

from minidist.core.board import RankState
from minidist.core.hang import collective, names, verb
from minidist.ranks.collect import Outcome
from minidist.ranks.errors import RankDied, RankError, RanksError

# Errors that another rank's failure causes, from cause to consequence. Anything else is a cause.
CONSEQUENCES = ("CommMismatch", "CommLost", "CommTimeout", "KeyboardInterrupt")
GONE = "All ranks were started anew: variables of earlier cells are gone."


def failure(outcomes: dict[int, Outcome], states: dict[int, RankState], log: str, farewell: str) -> RanksError:
    """The exception for a run in which some rank failed.

    `states` has the board of ranks that did not end by themselves, `log` the last words of the one at fault,
    `farewell` what to say of the ranks' variables.
    """
    rank = culprit(outcomes)
    outcome = outcomes[rank]
    if outcome.kind == "died":
        head = f"rank {rank} died: {_how_it_died(outcome.value)}" + (f"\nIts last words:\n{log}" if log else "")
    else:
        error = outcome.error
        head = f"rank {rank} raised {error['kind']}: {error['message']}\n\n{readable(error['traceback'])}"
        if error["message"].count("\n") or not error["message"]:  # the traceback's end says it
            head = f"rank {rank} raised {error['kind']}\n\n{readable(error['traceback'])}"
    parts = [head, *_the_others(rank, outcomes, states), farewell]
    report = "\n\n".join([parts[0], "\n".join(parts[1:])]).rstrip()
    if outcome.kind == "died":
        return RankDied(report, rank, outcome.value)
    same = sorted(other for other in outcomes if outcomes[other].kind == "error" and _same(outcomes[other], outcome))
    return RankError(report, same, error["kind"], error["traceback"])


def culprit(outcomes: dict[int, Outcome]) -> int:
    """The rank at fault: the first to die or raise something that is no consequence; of equal errors the lowest rank."""
    failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.kind != "result"}
    first = min(failed, key=lambda rank: (_severity(failed[rank]), failed[rank].time))
    return min(rank for rank in failed if _same(failed[rank], failed[first]))


def in_step(outcomes: dict[int, Outcome], ranks: int) -> bool:
    """Whether all process groups can be used again: all ranks ended by themselves and launched what fits together."""
    if len(outcomes) < ranks or any(outcome.kind == "died" for outcome in outcomes.values()):
        return False
    if any(_severity(outcome) in (1, 2, 3) for outcome in outcomes.values() if outcome.kind == "error"):
        return False
    for rank, outcome in outcomes.items():
        for (what, *members), count in outcome.traffic.items():
            other = {"sent": "received", "received": "sent"}.get(what, what)
            if any(outcomes[peer].traffic.get((other, *members)) != count for peer in members if peer != rank):
                return False
    return True


def readable(report: str) -> str:
    """A report whose notebook cells are called as the notebook calls them: Cell In[3] for /tmp/ipykernel_12/34.py.

    Tracebacks give the whole path in quotes, tapes and hang reports its last two parts.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    compiler = getattr(shell, "compile", None)

    def name(match: re.Match) -> str:
        path = match[1] or os.path.join(tempfile.gettempdir(), match[0])
        label = compiler.format_code_name(path) if hasattr(compiler, "format_code_name") else None
        return " ".join(label) if label else match[0]

    return re.sub(r'File "([^"]+)"|\bipykernel_\d+/\d+\.py', name, report)


def _severity(outcome: Outcome) -> int:
    if outcome.kind == "died":
        return 0
    return next((i for i, name in enumerate(CONSEQUENCES, 1) if name in outcome.error["bases"]), 0)


def _same(one: Outcome, other: Outcome) -> bool:
    if one.kind != other.kind or one.kind == "died":
        return one is other
    if "CommMismatch" in one.error["bases"] and "CommMismatch" in other.error["bases"]:
        return True
    return (one.error["kind"], one.error["message"]) == (other.error["kind"], other.error["message"])


def _the_others(culprit: int, outcomes: dict[int, Outcome], states: dict[int, RankState]) -> list[str]:
    """One line for each thing that happened to other ranks."""
    fates: dict[str, list[int]] = {}
    for rank in sorted({*outcomes, *states} - {culprit}):
        outcome = outcomes.get(rank)
        if outcome is None:
            entry = states[rank].entry
            fate = f"waiting in {collective(entry)}" if entry else "computing"
        elif outcome.kind == "result":
            continue
        elif outcome.kind == "died":
            fate = f"dead: {_how_it_died(outcome.value)}"
        elif _same(outcome, outcomes[culprit]):
            fate = "the same error"
        elif "CommLost" in outcome.error["bases"]:
            fate = "cut off from it"
        else:
            message = outcome.error["message"].splitlines()
            fate = f"{outcome.error['kind']}: {message[0] if message else ''}"
        fates.setdefault(fate, []).append(rank)
    return [_sentence(ranks, fate) for fate, ranks in fates.items()]


def _sentence(ranks: list[int], fate: str) -> str:
    who, was = names(ranks).capitalize(), verb(ranks, "was", "were")
    if fate == "the same error":
        return f"{who} raised the same."
    if fate.startswith(("waiting", "computing")):
        return f"{who} {was} {fate}, and {was} freed."
    if fate.startswith(("dead", "cut off")):
        return f"{who} {was} {fate}."
    return f"{who} raised {fate}"


def _how_it_died(code: int | None) -> str:
    if code is None:
        return "its connection closed, as when the process that forks ranks is killed"
    if code < 0:
        hint = " (out of memory, or kill -9)" if code == -signal.SIGKILL else ""
        return f"ended by signal {-code}, {signal.Signals(-code).name}{hint}"
    return f"its process ended with exit code {code}"
