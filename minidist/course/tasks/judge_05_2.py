"""Judge of exercise 05.2, five programs to repair: values first, then what they put on the tape."""

from __future__ import annotations

import math
import random

from minidist.course.grading import Case, Fault, Outcome
from minidist.course.tasks.judge_05_1 import fault

SIZE = 8  # bytes of a float64 and of an int64
ROW = 3 * SIZE
PARTS = ("mean_loss", "sum_grads", "gather_rows", "step_or_skip", "normalise")


def cases(seed: int) -> list[Case]:
    """Every program at 1, 2, 3 and 4 ranks. Numbers are multiples of 1/8 below 2^20, so that float64 sums are exact."""
    draw = random.Random(seed)
    return [case for n in (1, 2, 3, 4) for part in PARTS for case in _MAKERS[part](draw, n)]


def _number(draw: random.Random) -> float:
    return draw.randrange(1, 2**20) / 8


def _vector(numbers: list, dtype: str = "float64") -> dict:
    return {"tensor": numbers, "dtype": dtype}


def _losses(draw: random.Random, n: int) -> list[Case]:
    none = [0] if n > 2 else []  # one rank of three or four has nothing; no two ranks are alike
    counts = none + draw.sample(range(1, n + 2), n - len(none))
    draw.shuffle(counts)
    return [Case(n, [[[_number(draw) for _ in range(c)]] for c in counts], part="mean_loss")]


def _grads(draw: random.Random, n: int) -> list[Case]:
    model = [["embedding", 3], ["up", 3], ["side", 3], ["down", 3], ["head", 2]]
    inputs = []
    for rank in range(n):
        names = model[:]
        draw.shuffle(names)
        if rank == n - 1 and n > 1:
            names = [item for item in names if item[0] != "side"]  # its branch was not used here
        grads = {name: _vector([_number(draw) for _ in range(length)]) for name, length in names}
        inputs.append([model, grads])
    if n > 1:  # let the orders really differ, in two of one length
        first, last = inputs[0][1], inputs[-1][1]
        keys = [name for name in first if name != "side"]
        inputs[-1][1] = {name: last[name] for name in reversed(keys)}
    return [Case(n, inputs, part="sum_grads")]


def _rows(draw: random.Random, n: int) -> list[Case]:
    counts = draw.sample(range(n + 1), n)
    counts[counts.index(max(counts))] += 1  # no two alike, maybe a zero, and somewhere two rows or more
    counts = [max(c, 2) if n == 1 else c for c in counts]
    made = [[[draw.randrange(1, 2**40) for _ in range(3)] for _ in range(c)] for c in counts]
    max(made, key=len)[0] = [0, 0, 0]  # a row of zeros is a row
    inputs = [[{"tensor": rows, "dtype": "int64", "shape": [len(rows), 3]}] for rows in made]
    return [Case(n, inputs, part="gather_rows")]


def _steps(draw: random.Random, n: int) -> list[Case]:
    made = []
    for bad in (None, *([n - 1, 0] if n > 1 else [0])):
        weight = [_number(draw) for _ in range(3)]
        grads = [[_number(draw) for _ in range(3)] for _ in range(n)]
        if bad is not None:
            grads[bad][draw.randrange(3)] = draw.choice((math.inf, math.nan)) if bad else math.inf
        made.append(Case(n, [[_vector(weight), _vector(grad)] for grad in grads], part="step_or_skip"))
    return made


def _shares(draw: random.Random, n: int) -> list[Case]:
    return [Case(n, [[_vector([_number(draw) for _ in range(draw.randrange(1, 5))])] for _ in range(n)], part="normalise")]


_MAKERS = {"mean_loss": _losses, "sum_grads": _grads, "gather_rows": _rows, "step_or_skip": _steps, "normalise": _shares}


def judge(case: Case, outcome: Outcome) -> Fault | None:
    """The first fault of one call: values on every rank, then its traffic."""
    values, traffic = _JUDGES[case.part]
    found = values(case, [_plain(value) for value in outcome.values])
    if found is None and case.world_size > 1:  # alone, nothing travels: the values say more
        found = _on_tape(outcome.tapes) or traffic(case, outcome.tapes)
    return found and fault(case, *found)


def explain(case: Case, problem: dict) -> Fault | None:
    """What the hang or the mismatch of a program that is not repaired yet comes from."""
    if problem["kind"] not in ("hang", "mismatch"):
        return None
    message = {
        "mean_loss": "A call for each loss is a different number of calls on each rank: those with more losses wait for ever.",
        "sum_grads": "Ranks do not call alike: one has no gradient for a branch that it did not use, and makes a call less.",
        "gather_rows": "An all-gather wants one shape everywhere, and ranks have different numbers of rows.",
        "step_or_skip": "One rank decided alone, from a number that only it has, and the others wait for it.",
        "normalise": "Some rank makes a call that the others do not make. All ranks do the same here: one all-reduce.",
    }[case.part]
    return fault(case, {"mismatch": "calls-differ", "hang": "calls-missing"}[problem["kind"]], message)


def _losses_right(case: Case, values: list) -> tuple | None:
    losses = [row[0] for row in case.inputs]
    flat = [loss for own in losses for loss in own]
    right = sum(flat) / len(flat)
    for rank, value in enumerate(values):
        shown = {"expected": f"rank {rank} returns {right}", "got": f"rank {rank} returned {value}"}
        if not isinstance(value, float):
            return "no-number", f"Rank {rank} has to return a float, whether or not it had losses itself.", shown
        if _near(value, right):
            continue
        means = [sum(own) / len(own) for own in losses if own]
        if _near(value, sum(means) / len(means)) or _near(value, sum(means) / len(losses)):
            return (
                "mean-of-means",
                "A mean of means weighs a rank with one loss like a rank with four: sum everything, divide once.",
                shown,
            )
        if losses[rank] and _near(value, sum(losses[rank]) / len(losses[rank])):
            return "own-only", "That is the mean of this rank's own losses; the others' were not added.", shown
        if _near(value, sum(flat) / len(losses)) or any(_near(value, sum(flat) / max(1, len(own))) for own in losses):
            return (
                "wrong-count",
                "The sum is right and the count is not: counts are different on each rank and have to be summed too.",
                shown,
            )
        shortest = min(map(len, losses))
        if shortest < max(map(len, losses)):
            padded = len(losses) * max(map(len, losses))
            if _near(value, sum(flat) / padded):
                return "padding-counted", "The padding was counted as losses of zero.", shown
            kept = [loss for own in losses for loss in own[:shortest]]
            if math.isnan(value) or (kept and _near(value, sum(kept) / len(kept))):
                return "losses-dropped", "Losses of the ranks that have more were left out: all of them count.", shown
        return "values", "The mean over all losses of all ranks: their sum, divided by their number.", shown
    return None


def _losses_bytes(case: Case, tapes: list) -> tuple | None:
    for rank, tape in enumerate(tapes):
        lines = [line for line in tape if line["op"] != "barrier"]
        payload = sum(line["payload"] for line in lines)
        if len(lines) > 1 or payload > 16 or any(line["op"] != "all_reduce" for line in lines):
            shown = {"expected": "one all-reduce of at most 16 bytes", "got": f"rank {rank}: {_calls(lines)}, {payload} bytes"}
            return "bytes", "Right, with more talk than needed: a sum and a count fit into one tensor, one call.", shown
    return None


def _grads_right(case: Case, values: list) -> tuple | None:
    model = case.inputs[0][0]
    given = [{name: grad["tensor"] for name, grad in row[1].items()} for row in case.inputs]
    right = [_added([grads.get(name, [0.0] * length) for grads in given]) for name, length in model]
    for rank, value in enumerate(values):
        if value == right:
            continue
        shown = {"expected": f"rank {rank} returns {right}", "got": f"rank {rank} returned {value}"}
        if not isinstance(value, list) or len(value) != len(model):
            return "not-all", f"Rank {rank} has to return a list of {len(model)} sums, one for each name of the model.", shown
        if sorted(map(str, value)) == sorted(map(str, right)):
            return "order", "The sums are right, in another order than the model's.", shown
        used = [[row for row in given if name in row] for name, _ in model]
        if any(len(rows) < len(given) and value[i] == [0.0] * model[i][1] for i, rows in enumerate(used)):
            return (
                "absent-lost",
                "Where one rank had no gradient, those of the others were lost: absent counts as zeros, for one rank.",
                shown,
            )
        if value == [given[rank].get(name) for name, _ in model] or value == [
            given[rank].get(name, [0.0] * length) for name, length in model
        ]:
            return "own-only", "These are this rank's own gradients; nothing was added to them.", shown
        message = (
            "Gradients of different names were added to each other. Each rank went through them in its own order of arrival, "
            "and equal shapes let it pass without an error: take the order from the model, which all ranks share."
        )
        return "mixed", message, shown
    return None


def _grads_bytes(case: Case, tapes: list) -> tuple | None:
    limit = SIZE * sum(length for _, length in case.inputs[0][0])
    return _at_most(tapes, limit, "One gradient of the whole model is enough: sums need no copies of everybody's.")


def _rows_right(case: Case, values: list) -> tuple | None:
    given = [row[0]["tensor"] for row in case.inputs]
    right = [row for rows in given for row in rows]
    for rank, value in enumerate(values):
        if value == right:
            continue
        shown = {"expected": f"rank {rank} returns {right}", "got": f"rank {rank} returned {value}"}
        if not isinstance(value, list):
            return "no-tensor", f"Rank {rank} has to return one tensor of {len(right)} rows.", shown
        real = [row for row in right if any(row)]
        if value == real or (len(value) < len(right) and sorted(value) == sorted(real)):
            return "zeros-lost", "Rows of zeros are gone that were rows: padding is told by its place, not by its value.", shown
        if [row for row in value if row in right and any(row)] == real and len(value) > len(right):
            return "padding-kept", "The padding is still there: cut each rank's share back to the number of rows it had.", shown
        if sorted(map(str, value)) == sorted(map(str, right)):
            return "order", "All rows are there, in another order: rank 0's first, then rank 1's, and so on.", shown
        if len(value) < len(right):
            return "rows-lost", "Rows are missing: those of the ranks that have more than others count too.", shown
        return "values", "Everybody's rows, in rank order, each once.", shown
    return None


def _rows_bytes(case: Case, tapes: list) -> tuple | None:
    longest = max(len(row[0]["tensor"]) for row in case.inputs)
    limit = case.world_size * (longest * ROW + 16)
    return _at_most(tapes, limit, "Pad to the longest rank there is, no further: tell each other the numbers of rows first.")


def _steps_right(case: Case, values: list) -> tuple | None:
    weight, grads = case.inputs[0][0]["tensor"], [row[1]["tensor"] for row in case.inputs]
    finite = [all(map(math.isfinite, grad)) for grad in grads]
    summed = _added(grads)
    right = [w - g for w, g in zip(weight, summed, strict=True)] if all(finite) else weight
    for rank, value in enumerate(values):
        if value == right:
            continue
        shown = {"expected": f"rank {rank} returns {right}", "got": f"rank {rank} returned {value}"}
        if not isinstance(value, list) or len(value) != len(right):
            return "no-tensor", f"Rank {rank} has to return a weight of {len(right)} elements, changed or not.", shown
        if all(finite):
            if value == weight:
                return "skipped-all", "All gradients are finite and the step was skipped.", shown
            return "values", "The weight minus the sum of all ranks' gradients.", shown
        if not all(map(math.isfinite, value)):
            message = (
                "A weight is not finite any more. That a rank's gradient is not finite has to keep every rank from stepping; "
                "here some asked only about their own."
            )
            return "stepped-alone", message, shown
        return (
            "inf-hidden",
            "A step was made, without the elements that were not finite. Skip means: no rank changes anything.",
            shown,
        )
    return None


def _steps_bytes(case: Case, tapes: list) -> tuple | None:
    limit = SIZE * (len(case.inputs[0][0]["tensor"]) + 1)
    return _at_most(tapes, limit, "The gradient once, and at most one number more to agree on: that is enough.")


def _shares_right(case: Case, values: list) -> tuple | None:
    given = [row[0]["tensor"] for row in case.inputs]
    total = sum(map(sum, given))
    for rank, (value, own) in enumerate(zip(values, given, strict=True)):
        right = [x / total for x in own]
        shown = {"expected": f"rank {rank} returns {right}", "got": f"rank {rank} returned {value}"}
        if not isinstance(value, list) or len(value) != len(own):
            return "no-tensor", f"Rank {rank} has to return a tensor like x.", shown
        if all(_near(v, r) for v, r in zip(value, right, strict=True)):
            continue
        if all(_near(v, x / sum(own)) for v, x in zip(value, own, strict=True)):
            message = (
                "x was divided by this rank's own sum: the total was read before it was there. Only wait() of the handle "
                "gives it back. A barrier, a nap or a look at is_completed() does not."
            )
            return "read-early", message, shown
        return "values", "x divided by one number: the sum of all elements on all ranks.", shown
    return None


def _shares_calls(case: Case, tapes: list) -> tuple | None:
    for rank, tape in enumerate(tapes):
        calls = [line["op"] for line in tape]
        if calls != ["all_reduce"]:
            shown = {"expected": "one all_reduce", "got": f"rank {rank}: {_calls(tape)}"}
            return (
                "bytes",
                "Right, with more calls than one all-reduce. A barrier adds nothing once somebody waits for the handle.",
                shown,
            )
        if tape[0]["delay"] < 0.04:
            return (
                "wire-changed",
                "The wire was made faster. It stays slow here: on a real one you cannot edit the line either.",
            )
    return None


_JUDGES = {
    "mean_loss": (_losses_right, _losses_bytes),
    "sum_grads": (_grads_right, _grads_bytes),
    "gather_rows": (_rows_right, _rows_bytes),
    "step_or_skip": (_steps_right, _steps_bytes),
    "normalise": (_shares_right, _shares_calls),
}


def _on_tape(tapes: list) -> tuple | None:
    if not all(any(line["payload"] for line in tape) for tape in tapes):
        return "off-tape", "Right, and yet not on every rank's tape: the numbers took a way around minidist.core.comm."
    return None


def _at_most(tapes: list, limit: int, why: str) -> tuple | None:
    for rank, tape in enumerate(tapes):
        payload = sum(line["payload"] for line in tape)
        if payload > limit:
            return (
                "bytes",
                f"Right, with too many bytes. {why}",
                {"expected": f"at most {limit} bytes", "got": f"rank {rank}: {payload}"},
            )
    return None


def _calls(lines: list) -> str:
    return ", ".join(line["op"] for line in lines) or "nothing"


def _added(vectors: list[list[float]]) -> list[float]:
    return [math.fsum(items) if all(map(math.isfinite, items)) else math.nan for items in zip(*vectors, strict=True)]


def _near(value: float, right: float) -> bool:
    return math.isclose(value, right, rel_tol=1e-12, abs_tol=0.0)


def _plain(value: object) -> object:
    """Encoded tensors, and tuples, as nested lists."""
    if isinstance(value, dict):
        return _plain(value.get("tensor", value.get("tuple")))
    return [_plain(item) for item in value] if isinstance(value, list) else value
