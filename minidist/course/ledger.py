"""Whether tapes can be believed: each against what its rank's recorder saw, and sender's against receiver's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def counted(line: dict) -> dict:
    """A line of a tape as it counts. Tag "check", which is in no total, is the engine's and the graders' own."""
    mine = line["tag"] == "check" and line["where"].startswith("<")
    return {**line, "tag": "act"} if mine else line


def altered(tapes: list[list[dict]], ledgers: list[list[dict]]) -> str:
    """What is wrong with the first tape that differs from its ledger; "" if none does. No ledgers: nothing to compare."""
    for rank, (tape, ledger) in enumerate(zip(tapes, ledgers, strict=False)):
        told = Counter(_call(line) for line in tape if len(line["ranks"]) > 1)  # a group of one talks to nobody
        seen = Counter(_call(line) for line in ledger)
        if told != seen:
            hidden, made_up = seen - told, told - seen
            what = [f"sent and not on it: {_words(hidden)}"] * bool(hidden) + [
                f"on it and never sent: {_words(made_up)}"
            ] * bool(made_up)
            return "\n".join(
                [
                    f"Rank {rank}'s tape is not what the rank sent;",
                    *what,
                    "An answer leaves mesh.tape and comm alone: no clear(), no patch.",
                ]
            )
    return ""


def differ(tapes: list[list[dict]]) -> str:
    """Where two ranks' tapes disagree about what they said to each other; "" if nowhere."""
    heard: dict[tuple, Counter] = {}
    for rank, tape in enumerate(tapes):
        for line in tape:
            if len(line["ranks"]) == 1:
                continue
            if line["op"] in ("send", "recv"):
                ends = (rank, line["peer"]) if line["op"] == "send" else (line["peer"], rank)
                if None not in ends:
                    heard.setdefault(("message", *ends), Counter())[line["op"], line["payload"]] += 1
            else:
                same = line["payload"] if line["op"] != "all_to_all" else None  # each rank's own rows, which may be uneven
                heard.setdefault(("group", *line["ranks"]), Counter())[line["op"], same, rank] += 1
    for (kind, *members), calls in heard.items():
        if kind == "message" and {p: n for (op, p), n in calls.items() if op == "send"} != {
            p: n for (op, p), n in calls.items() if op == "recv"
        }:
            return f"What rank {members[0]} sent to rank {members[1]} is not what rank {members[1]} received."
        if kind == "group":
            each = [{(op, p): n for (op, p, who), n in calls.items() if who == rank} for rank in members]
            if any(one != each[0] for one in each):
                return f"Ranks {members} do not tell the same of their collectives."
    return ""


def _call(line: dict) -> tuple:
    return line["op"], line["payload"], line["sent"], line["peer"], tuple(line["ranks"])


def _words(calls: Counter) -> str:
    shown: Sequence[tuple] = list(calls.elements())
    first = ", ".join(f"{op} of {payload} bytes" for op, payload, *_ in shown[:2])
    return first + (f" and {len(shown) - 2} more" if len(shown) > 2 else "")
