"""Judge of exercise 05.1, four collectives from messages: values exactly, inputs untouched, then messages and bytes."""

from __future__ import annotations

import random
import re
import textwrap

from minidist.course.grading import Case, Fault, Outcome

SIZE = 8  # bytes of an int64 and of a float64
ALLOWED = ("send", "recv", "barrier")
Rows = list  # nested lists, first level the rows


def cases(seed: int) -> list[Case]:
    """Each part at 1, 2, 3 and 4 ranks, one to three dimensions, both dtypes.

    Numbers begin with their rank plus one, for whoever reads a report, and go beyond what a float32 keeps.
    """
    draw = random.Random(seed)
    made = []
    for part in ("broadcast", "reduce_scatter", "all_gather", "all_to_all"):
        for n, dims in zip((1, 2, 3, 4, 3), (1, 2, 3, 1, 2), strict=True):
            dtype = "int64" if n % 2 else "float64"
            k = draw.choice((1, 2, 3))
            shape = [k if part in ("broadcast", "all_gather") else k * n, *[draw.choice((2, 3, 5)) for _ in range(dims - 1)]]
            kind = int if dtype == "int64" else float
            rows = [{"tensor": _numbers(draw, shape, rank + 1, kind), "dtype": dtype} for rank in range(n)]
            if part == "broadcast":
                src = draw.randrange(1, n) if n > 1 else 0
                made.append(Case(n, [[row, src] for row in rows], part=part))
            else:
                made.append(Case(n, [[row] for row in rows], part=part))
    return made


def _numbers(draw: random.Random, shape: list[int], first: int, kind: type) -> Rows:
    if not shape:
        return kind(first * 10**8 + draw.randrange(10**7))
    return [_numbers(draw, shape[1:], first, kind) for _ in range(shape[0])]


def expected(case: Case) -> list[Rows]:
    """What each rank has to return."""
    n, given = case.world_size, [row[0]["tensor"] for row in case.inputs]
    if case.part == "broadcast":
        return [given[case.inputs[0][1]]] * n
    if case.part == "all_gather":
        return [[row for rows in given for row in rows]] * n
    pieces = [_pieces(rows, n) for rows in given]  # pieces[source][target]
    if case.part == "all_to_all":
        return [[row for source in range(n) for row in pieces[source][rank]] for rank in range(n)]
    return [_sum(pieces[source][rank] for source in range(n)) for rank in range(n)]


def judge(case: Case, outcome: Outcome) -> Fault | None:
    """The first fault of one call: values, then inputs, then traffic."""
    found = _values(case, outcome) or _inputs(case, outcome) or _traffic(case, outcome.tapes)
    return found and fault(case, *found)


def fault(case: Case, id: str, message: str, shown: dict | None = None) -> Fault:
    """A fault of the case's part, its message in lines that a learner sees whole."""
    lines = [line for text in message.split("\n") for line in textwrap.wrap(text, 118)]
    return Fault(case.part, id, "\n".join(lines), **(shown or {}))


def explain(case: Case, problem: dict) -> Fault | None:
    """Hangs and errors that have a plain cause."""
    text = problem["text"]
    if problem["kind"] == "hang" and " in send #" in text and " in recv #" not in text:
        message = (
            "Every rank that waits stands in a blocking send, and each ends only when its receiver has come. Launch before "
            "you wait (comm.exchange, or async_op=True and wait() later), or let one side of each pair receive first."
        )
        return fault(case, "rendezvous", message)
    if problem["kind"] == "hang":
        return fault(case, "unmatched", _unmatched(text))
    if problem["kind"] == "mismatch" and (calls := re.findall(r"rank (\d+): (recv|send) (\[[\d, ]*\]) (\w+)", text)):
        told = ", ".join(
            f"rank {rank} {'sends' if op == 'send' else 'receives'} {shape} {dtype}" for rank, op, shape, dtype in calls
        )
        message = (
            f"What is received into does not fit what is sent: {told}. Make it like the part that comes: torch.empty_like."
        )
        return fault(case, "buffer", message)
    if "to myself" in text:
        message = "A rank sends to itself. Its own part needs no message, so copy it; with one rank that is all there is to do."
        return fault(case, "send-to-self", message)
    if "has places 0 to" in text:
        message = f"A peer that does not exist was named: there are {case.world_size} ranks now. Ask mesh.world_size."
        return fault(case, "fixed-world-size", message)
    return None


def _unmatched(text: str) -> str:
    lines = [line.strip() for line in text.split("\n") if " in recv #" in line or " in send #" in line]
    return "\n".join(["Some rank waits for a message that nobody sends (or sends one that nobody receives):", *lines[:3]])


def _values(case: Case, outcome: Outcome) -> tuple | None:
    for rank, (value, right) in enumerate(zip(outcome.values, expected(case), strict=True)):
        shown = {"expected": f"rank {rank} returns {right}", "got": f"rank {rank} returned {_words(value)}"}
        if value is None:
            return "no-return", f"Rank {rank} returned None: the result is what the function returns.", shown
        if not isinstance(value, dict) or "tensor" not in value:
            return "no-tensor", "The result is one tensor: torch.cat joins parts along their rows.", shown
        if value["shape"] != _shape(right):
            return *_wrong_shape(case, value["shape"], _shape(right)), shown
        dtype = case.inputs[rank][0]["dtype"]
        if value["dtype"] != dtype:
            return (
                "dtype",
                f"The result has dtype {value['dtype']}, x has {dtype}: make new tensors like x (torch.empty_like).",
                shown,
            )
        if value["tensor"] != right:
            row = next(i for i, (a, b) in enumerate(zip(value["tensor"], right, strict=True)) if a != b)
            shown = {
                "expected": f"rank {rank}, row {row}: {right[row]}",
                "got": f"rank {rank}, row {row}: {value['tensor'][row]}",
            }
            return *_misread(case, rank, value["tensor"], right, outcome), shown
    return None


def _wrong_shape(case: Case, got: list[int], right: list[int]) -> tuple[str, str]:
    if case.part == "reduce_scatter" and got == _shape(case.inputs[0][0]["tensor"]):
        return "whole-kept", "That is as long as the whole sum: after a reduce-scatter each rank keeps only its own k rows."
    return "shape", f"The result has shape {got}, it should have {right}."


def _misread(case: Case, rank: int, got: Rows, right: Rows, outcome: Outcome) -> tuple[str, str]:
    """The likeliest thought behind wrong numbers: (message id, message)."""
    n, mine = case.world_size, case.inputs[rank][0]["tensor"]
    given = [row[0]["tensor"] for row in case.inputs]
    if case.part == "broadcast":
        if case.inputs[0][1] and all(isinstance(v, dict) and v.get("tensor") == given[0] for v in outcome.values):
            return "src-ignored", "Everybody has rank 0's x. The one who knows is rank `src`, and it is not always 0."
        if got == mine:
            return "not-received", f"Rank {rank} still has its own x: it has to receive, and return what it received."
        return "values", "Every rank returns the x of rank src."
    if case.part == "reduce_scatter":
        return _misread_sum(case, rank, got)
    if sorted(map(str, got)) == sorted(map(str, right)):
        return "order", f"All rows are there, in another order: place r is for what rank r brought, on rank {rank} too."
    k = len(right) // n
    came = _pieces(got, n)
    if case.part == "all_to_all" and all(came[s] == _pieces(given[s], n)[s] for s in range(n) if s != rank):
        return (
            "own-piece",
            "Rank r sent its piece number r to everybody. Piece j of x is for rank j: each peer gets another one.",
        )
    if came[rank] != _pieces(right, n)[rank] and all(came[s] == _pieces(right, n)[s] for s in range(n) if s != rank):
        return (
            "own-part",
            f"The part that rank {rank} has itself (its {k} rows at place {rank}) is missing: copy it, without a message.",
        )
    return "values", "Place r of the result is what rank r had for this rank, k rows each."


def _misread_sum(case: Case, rank: int, got: Rows) -> tuple[str, str]:
    n = case.world_size
    pieces = [_pieces(row[0]["tensor"], n) for row in case.inputs]
    sums = [_sum(pieces[s][r] for s in range(n)) for r in range(n)]
    if got in sums:
        message = f"That is the part of rank {sums.index(got)}. Rank r keeps part r: the rows from r k to (r + 1) k."
        return "wrong-part", message
    if got == pieces[rank][rank]:
        return "not-summed", "These are this rank's own rows: what came from the others has to be added."
    others = [pieces[s][rank] for s in range(n) if s != rank]
    if got in others or got == _sum(others):
        message = (
            "This rank's own rows are not in it: start from a copy of them, and add what comes. recv writes over its tensor."
        )
        return "own-part", message
    return "values", "Rank r returns the sum over all ranks of their rows from r k to (r + 1) k."


def _inputs(case: Case, outcome: Outcome) -> tuple | None:
    for rank, (before, after) in enumerate(zip(case.inputs, outcome.inputs, strict=True)):
        may = case.part == "broadcast" and rank != before[1]
        if not may and after[0].get("tensor") != before[0]["tensor"]:
            return (
                "input-changed",
                f"Right, but rank {rank}'s x was changed on the way: add and receive into a tensor of your own.",
            )
    return None


def _traffic(case: Case, tapes: list[list[dict]]) -> tuple | None:
    n = case.world_size
    for line in (line for tape in tapes for line in tape):
        if line["op"] not in ALLOWED:
            return "refused", f"comm.{line['op']} is not allowed here: it is the thing to build. Use send, recv and exchange."
    sends = [[line for line in tape if line["op"] == "send"] for tape in tapes]
    sent = [sum(line["payload"] for line in lines) for lines in sends]
    counts = [len(lines) for lines in sends]
    whole = SIZE * _count(case.inputs[0][0]["tensor"])  # bytes of x
    part = whole if case.part in ("broadcast", "all_gather") else whole // n
    if case.part == "broadcast":
        sent, counts, who = [sum(sent)], [sum(counts)], "all ranks together"
    else:
        who = "by rank"
    least, most = (n - 1) * part, n - 1
    shown = {"expected": f"at most {most} messages, {least} bytes", "got": f"{who}: {counts} messages, {sent} bytes"}
    if any(amount < least for amount in sent):
        return "off-tape", "Right, and yet not enough on the tape: the numbers took a way around minidist.core.comm.", shown
    if case.part in ("reduce_scatter", "all_to_all") and any(amount >= (n - 1) * whole > least for amount in sent):
        return (
            "whole-sent",
            "Everybody sent all of x to everybody. Rank r needs only part r: send that, and nothing else.",
            shown,
        )
    if any(amount > least for amount in sent):
        return "bytes", "Right, with more bytes than it takes: no number needs to travel twice.", shown
    if any(count > most for count in counts):
        return "messages", "Right, in too many messages: each costs a latency. Send each part in one piece.", shown
    received = sorted(
        (line["peer"], r, line["payload"]) for r, tape in enumerate(tapes) for line in tape if line["op"] == "recv"
    )
    if received != sorted((r, line["peer"], line["payload"]) for r, lines in enumerate(sends) for line in lines):
        return "tapes-differ", "What was booked as sent is not what was booked as received."
    return None


def _pieces(rows: Rows, n: int) -> list[Rows]:
    k = len(rows) // n
    return [rows[i * k : (i + 1) * k] for i in range(n)]


def _sum(items) -> Rows:
    items = list(items)
    if not items:
        return []
    return [_sum(parts) for parts in zip(*items, strict=True)] if isinstance(items[0], list) else sum(items)


def _shape(rows: Rows) -> list[int]:
    return [len(rows), *_shape(rows[0])] if isinstance(rows, list) and rows else [0] if isinstance(rows, list) else []


def _count(rows: Rows) -> int:
    return sum(map(_count, rows)) if isinstance(rows, list) else 1


def _words(value: object) -> str:
    if isinstance(value, dict) and "tensor" in value:
        return f"{value['tensor']}"
    return "None" if value is None else f"a {'tuple' if isinstance(value, dict) and 'tuple' in value else type(value).__name__}"
