"""Lesson 0's exercise: every rank knows a number of its own; bring them all to rank 0, and to nobody else."""

from __future__ import annotations

import random

from minidist.course.grading import Case, Fault, Outcome, Task

INT64 = 8  # bytes


def cases(seed: int) -> list[Case]:
    """World sizes 1 to 4; secrets above 2^40, so that a float32 on the way shows, and no two alike."""
    draw = random.Random(seed)
    return [Case(n, [[secret] for secret in draw.sample(range(2**40, 2**41), n)]) for n in (1, 2, 3, 4)]


def expected(case: Case) -> list[int]:
    """What rank 0 has to return: rank r adds r squared to its secret."""
    return [secret + rank**2 for rank, (secret,) in enumerate(case.inputs)]


def judge(case: Case, outcome: Outcome) -> Fault | None:
    """Values first: the list on rank 0, None elsewhere. Then traffic: one number from each of the others, no more."""
    return _values(case, outcome.values) or _traffic(case, outcome.tapes)


def explain(case: Case, problem: dict) -> Fault | None:
    """Hangs and errors that have a plain cause."""
    text = problem["text"]
    if problem["kind"] == "hang" and problem["suspects"]:
        absent = problem["suspects"]
        names = ", ".join(map(str, absent))
        message = (
            f"Rank{'s' * (len(absent) > 1)} {names} never came to where the others wait. A collective is a call that every\n"
            "rank of the group makes: `if mesh.rank == 0: gather(...)` leaves rank 0 alone at the table."
        )
        return Fault("values", "not-all-call", message)
    if case.world_size == 1 and "to myself" in text:
        message = "With one rank there is nobody to send to: rank 0 takes its own number without a message."
        return Fault("values", "send-to-self", message)
    if problem["kind"] == "error" and "has places 0 to" in text:
        size = case.world_size
        message = f"A peer that does not exist was named; there are {size} ranks now. Ask mesh.world_size, do not count on 4."
        return Fault("values", "fixed-world-size", message)
    return None


def _values(case: Case, values: list) -> Fault | None:
    want, got = expected(case), values[0]
    shown = {"expected": f"rank 0 returns {want}", "got": f"rank 0 returned {_words(got)}"}
    others = [rank for rank, value in enumerate(values) if rank > 0 and value is not None]
    if got is None and others and values[others[0]] == want:
        message = f"Rank {others[0]} holds the list. The destination is rank 0: dst=0, and rank 0 returns."
        return Fault("values", "wrong-destination", message, **shown)
    if got is None:
        message = "Rank 0 returned None. `return` belongs to every path that rank 0 takes."
        return Fault("values", "nothing-on-0", message, **shown)
    if got != want:
        return Fault("values", *_misreading(case, got, want), **shown)
    if others:
        rank = others[0]
        message = f"Rank {rank} returned {_words(values[rank])}; only rank 0 may hold the list, the others return None."
        return Fault("values", "list-everywhere", message)
    return None


def _misreading(case: Case, got: object, want: list[int]) -> tuple[str, str]:
    """The likeliest thought behind a wrong list: (message id, message)."""
    secrets = [secret for (secret,) in case.inputs]
    plain = _plain(got)
    if plain == want:
        return "not-ints", "The numbers are right but wrapped: return a list of Python ints; a one-element tensor has .item()."
    if not isinstance(plain, list):
        total = plain in (sum(want), [sum(want)])
        if total:
            return "summed", "That is the sum: all_reduce adds the numbers up. Gather keeps one from each rank."
        return "no-list", "Rank 0 has to return a list with one int from each rank, in rank order."
    if len(plain) == len(want) and all(isinstance(item, int | float) for item in plain):
        return _wrong_numbers(plain, want, secrets)
    return "no-list", f"The list needs {len(want)} ints, one from each rank, in rank order."


def _wrong_numbers(plain: list, want: list[int], secrets: list[int]) -> tuple[str, str]:
    n = len(want)
    if sorted(plain) == sorted(want):
        return "order", "All numbers are there, in another order: place r of the list belongs to rank r."
    if plain == [rank**2 for rank in range(n)]:
        return "secret-ignored", "These are bare squares: each rank adds its own secret, which no other rank knows."
    if plain == secrets:
        return "square-ignored", "These are the bare secrets: rank r has to add r**2 to its own."
    if plain == [secret + (rank + 1) ** 2 for rank, secret in enumerate(secrets)]:
        return "rank-from-1", "Every square is one rank too far: ranks count from 0."
    if plain == [secrets[0] + rank**2 for rank in range(n)] or plain == [want[0]] * n:
        return "own-only", "Rank 0's own secret is in every place. It cannot see the others' memory: they have to send."
    if all(abs(item - right) < right / 2**22 for item, right in zip(plain, want, strict=True)):
        return "float32", "Close, but rounded: a float32 keeps 24 bits. Send torch.int64 (and receive into int64)."
    if all(item == sum(want) for item in plain):
        return "summed", "Every place holds the sum: all_reduce adds the numbers up. Gather keeps one from each rank."
    return "values", "Rank r contributes its own secret + r**2, at place r of the list."


def _traffic(case: Case, tapes: list[list[dict]]) -> Fault | None:
    n = case.world_size
    lines = [[line for line in tape if line["tag"] != "check"] for tape in tapes]
    sent = [sum(line["sent"] for line in tape) for tape in lines]
    want = [0] + [INT64] * (n - 1)
    shown = {"expected": f"bytes sent by rank: {want}", "got": f"bytes sent by rank: {[round(b) for b in sent]}"}
    if n > 1 and not any(sent):
        message = "Right, and yet nothing on the tape: the numbers took a way around minidist.core.comm."
        return Fault("traffic", "off-tape", message, **shown)
    if any(line["op"] in ("all_gather", "all_reduce") for tape in lines for line in tape) and n > 1:
        message = "Right numbers, too many bytes: everybody told everybody. Only rank 0 needs to hear."
        return Fault("traffic", "told-everybody", message, **shown)
    if sent != want:
        message = "Each rank but 0 sends one int64, once; rank 0 sends nothing."
        return Fault("traffic", "bytes", message, **shown)
    if n > 1 and not _heard(lines, n):
        message = "What the others booked as sent is not what rank 0 booked as received."
        return Fault("traffic", "tapes-differ", message)
    return None


def _heard(lines: list[list[dict]], n: int) -> bool:
    """Sender's and receiver's tapes agree: one gather seen by all, or a recv on rank 0 for each send."""
    gathers = [[(line["seq"], line["payload"]) for line in tape if line["op"] == "gather"] for tape in lines]
    if any(gathers):
        return all(tape == gathers[0] for tape in gathers) and gathers[0][0][1] == n * INT64
    sends = [(rank, line["sent"]) for rank, tape in enumerate(lines) for line in tape if line["op"] == "send"]
    received = [(line["peer"], line["payload"]) for line in lines[0] if line["op"] == "recv"]
    return sorted(sends) == sorted(received)


def _plain(value: object) -> object:
    """Strip tensors and tuples down to numbers and lists, one-element lists inside a list to their element."""
    if isinstance(value, dict):
        inner = value.get("tensor", value.get("tuple"))
        return _plain(inner)
    if isinstance(value, list):
        items = [_plain(item) for item in value]
        return [item[0] if isinstance(item, list) and len(item) == 1 else item for item in items]
    return value


def _words(value: object) -> str:
    """An encoded value as its owner would write it."""
    if isinstance(value, dict):
        if "tensor" in value:
            return f"tensor({value['tensor']}, {value['dtype']})"
        if "tuple" in value:
            return f"({', '.join(map(_words, value['tuple']))},)"
        return f"an object of class {value.get('object', 'dict')}"
    if isinstance(value, list):
        return f"[{', '.join(map(_words, value))}]"
    return repr(value)


TASKS = [
    Task(
        key="00.1",
        version=1,
        title="Everybody's number, on rank 0",
        function="gather_squares",
        parts={"values": 6, "traffic": 4},
        minutes=15,
        hints=(
            "Every rank runs your function, at the same time, each with its own mesh.rank and secret. What does rank 2 have "
            "to do so that rank 0 can know its number? And what does rank 0 do meanwhile?",
            "minidist.core.comm has gather (every rank calls it; look at what it returns where) and send/recv. Both carry "
            "tensors: wrap the number in a torch.int64 tensor of one element, unwrap with .item().",
            "1. make this rank's tensor from secret + rank**2; 2. every rank calls comm.gather(tensor, mesh.world, dst=0); "
            "3. where the result is a list, return its ints; elsewhere return None.",
        ),
        cases=cases,
        judge=judge,
        explain=explain,
        refused={"torch.distributed": "it leaves no line on the tape. minidist.core.comm has all you need."},
    )
]
