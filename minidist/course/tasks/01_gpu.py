"""Lesson 1's exercises: the intensity of six operations, and what bounds an operation on a machine."""

from __future__ import annotations

import itertools
import math
import random

from minidist.core import hardware
from minidist.course.grading import Case, Fault, Outcome, Task

SIZES = {  # arguments of each of the six functions, before the itemsize; the draw of each is from [low, high)
    "add": ("n",),
    "dot": ("n",),
    "momentum": ("n",),
    "matmul": ("m", "k", "n"),
    "linear": ("batch", "seq", "k", "n"),
    "scores": ("batch", "heads", "seq", "width"),
}
DRAWS = {"n": (65, 500), "m": (65, 500), "k": (65, 500), "batch": (3, 9), "seq": (33, 200), "heads": (3, 9), "width": (24, 90)}
CLOSE = 0.01  # of the right number


def intensity_cases(seed: int) -> list[Case]:
    """Each operation at six sizes, at 4 and at 2 bytes an element in turns; the first sizes are odd.

    Four first: half of the right number is then a misread FLOP, and float32 taken for granted shows at the second.
    """
    draw = random.Random(seed)
    cases = []
    for op, names in SIZES.items():
        for number in range(6):
            itemsize, sizes = (4, 2)[number % 2], {}
            while not sizes or not _tells_apart(op, sizes, itemsize):
                sizes = {name: draw.randrange(*DRAWS[name]) | (number == 0) for name in names}
            cases.append(Case(1, [[*sizes.values(), itemsize]], part=op))
    return cases


def _tells_apart(op: str, sizes: dict[str, int], itemsize: int) -> bool:
    """Whether no two misreadings come to nearly the same number, so that the message fits the thought."""
    flops, nbytes = counts(op, sizes, itemsize)
    wrong = [m for m in readings(op, sizes, itemsize) if not math.isclose(m[1], flops / nbytes, rel_tol=CLOSE)]
    pairs = itertools.combinations(wrong, 2)
    return not any(a[0] != b[0] and math.isclose(a[1], b[1], rel_tol=3 * CLOSE) for a, b in pairs)


def elements(op: str, s: dict[str, int]) -> tuple[int, int, int]:
    """FLOPs, elements read and elements written, by the convention of the spec."""
    if op == "matmul":
        return 2 * s["m"] * s["k"] * s["n"], s["m"] * s["k"] + s["k"] * s["n"], s["m"] * s["n"]
    if op == "linear":
        tokens, results = s["batch"] * s["seq"], s["batch"] * s["seq"] * s["n"]
        return 2 * results * s["k"] + results, tokens * s["k"] + s["k"] * s["n"] + s["n"], results
    if op == "scores":
        matrices = s["batch"] * s["heads"]
        return 2 * matrices * s["seq"] ** 2 * s["width"], 2 * matrices * s["seq"] * s["width"], matrices * s["seq"] ** 2
    n = s["n"]
    return {"add": (n, 2 * n, n), "dot": (2 * n, 2 * n, 1), "momentum": (4 * n, 3 * n, 2 * n)}[op]


def counts(op: str, s: dict[str, int], itemsize: int) -> tuple[int, int]:
    """(FLOPs, bytes). In momentum only the gradient has the itemsize: weight and momentum are float32."""
    flops, read, written = elements(op, s)
    return flops, s["n"] * (itemsize + 4 * 4) if op == "momentum" else itemsize * (read + written)


def judge_intensity(case: Case, outcome: Outcome) -> Fault | None:
    """One number within 1 %; a wrong one is compared with what each known misconception would give."""
    op, itemsize = case.part, case.inputs[0][-1]
    sizes = dict(zip(SIZES[op], case.inputs[0], strict=False))
    flops, nbytes = counts(op, sizes, itemsize)
    want, got = flops / nbytes, outcome.values[0]
    call = ", ".join(f"{name}={value}" for name, value in (*sizes.items(), ("itemsize", itemsize)))
    shown = {"expected": f"{op}({call}) = {want:.5g}", "got": _said(got)}
    if got is None:
        return Fault(op, "nothing-returned", "The function returned None: every path has to `return` a number.", **shown)
    if isinstance(got, bool) or not isinstance(got, int | float) or not math.isfinite(got):
        return Fault(op, "not-a-number", "Return one plain, finite Python number: FLOPs divided by bytes.", **shown)
    if math.isclose(got, want, rel_tol=CLOSE):
        return None
    for name, value, message in readings(op, sizes, itemsize):
        if math.isclose(got, value, rel_tol=CLOSE):
            return Fault(op, name, message, **shown)
    message = "Write both counts down for the smallest sizes you can think of: FLOPs by hand, and each tensor's bytes."
    return Fault(op, "intensity", message, **shown)


def readings(op: str, s: dict[str, int], itemsize: int) -> list[tuple[str, float, str]]:
    """Every known misreading of an operation: (message id, the value it leads to, message)."""
    return _own_misreadings(op, s, itemsize) + _misreadings(op, s, itemsize)


def _misreadings(op: str, s: dict[str, int], itemsize: int) -> list[tuple[str, float, str]]:
    """Thoughts that fit any operation."""
    flops, nbytes = counts(op, s, itemsize)
    _, read, written = elements(op, s)
    found = [
        ("no-output", flops / (read * itemsize), "The output is missing: writing the result crosses the memory bus too."),
        ("no-inputs", flops / (written * itemsize), "The inputs are missing: they are read before anything can happen."),
    ] * (op != "momentum")
    macs = "Half of it: a multiply and the add that follows are two FLOPs here, as on every data sheet."
    found += [("macs", flops / nbytes / 2, macs)] * (op != "add" and itemsize == 4)
    return [
        *found,
        ("fixed-float32", flops / counts(op, s, 4)[1], f"Four bytes an element were assumed; here the itemsize is {itemsize}."),
        ("fixed-16-bit", flops / counts(op, s, 2)[1], f"Two bytes an element were assumed; here the itemsize is {itemsize}."),
        ("elements", flops / (read + written), "That is FLOPs for each element. Intensity is per byte: mind the itemsize."),
        ("bits", flops / nbytes / 8, "Eight times too low: that divides by bits. Memory traffic is counted in bytes."),
        ("inverse", nbytes / flops, "Upside down: that is bytes for each FLOP. Intensity is FLOPs divided by bytes."),
        ("flops-only", flops, "That is the number of FLOPs; divide it by the bytes that move."),
        ("bytes-only", nbytes, "That is the number of bytes; they are what the FLOPs are divided by."),
    ]


def _own_misreadings(op: str, s: dict, itemsize: int) -> list[tuple[str, float, str]]:
    """Thoughts that fit one operation only."""
    flops, nbytes = counts(op, s, itemsize)
    if op == "dot":
        text = "The result of a dot product is one number, not n: hardly anything is written."
        return [("output-vector", flops / (nbytes + (s["n"] - 1) * itemsize), text)]
    if op == "momentum":
        once = "In place is not for free: w and v are read *and* written, two crossings each."
        narrow = "The weight and its momentum are float32 whatever the gradient is: 4 bytes each; only g has the itemsize."
        if itemsize == 4:  # with 2, both thoughts lead to the same number
            return [("in-place-once", flops / (s["n"] * (itemsize + 8)), once)]
        return [("state-in-itemsize", flops / (s["n"] * 5 * itemsize), narrow)]
    if op == "linear":
        again = (
            "All tokens share one weight, read once, however many sequences there are; this is why batches pay off.\n"
            "(One sequence alone leads to the same number: what a batch saves is not in it.)"
        )
        weight, tokens = itemsize * s["k"] * s["n"], s["batch"] * s["seq"]
        return [
            ("weight-again", flops / (nbytes + (s["batch"] - 1) * weight), again),
            ("weight-again", flops / (nbytes + (tokens - 1) * weight), again.split("\n")[0]),
        ]
    if op == "scores":
        matrices, few = (
            s["batch"] * s["heads"],
            "Every head writes a score matrix of its own: batch x heads x seq x seq results.",
        )
        vectors, square = matrices * s["seq"] * s["width"], s["seq"] ** 2
        two = "q and k are two tensors, even where their shapes are the same: both are read."
        return [
            ("one-score-matrix", flops / itemsize / (2 * vectors + s["batch"] * square), few),
            ("keys-forgotten", flops / itemsize / (vectors + matrices * square), two),
        ]
    return []


def verdict_cases(seed: int) -> list[Case]:
    """Six operations on each machine, two for each bound, none a close call.

    Where a machine has two peaks, one of the float32 operations is bound by compute and would not be at the peak for
    bfloat16, and one in bfloat16 the other way round, so that taking the wrong peak shows.
    """
    draw = random.Random(seed)
    cases = []
    for machine in machines(draw):
        dtypes = ("bfloat16", "float32") if len(machine["peak"]) > 1 else ("float32", "float32")
        for number, wanted in enumerate(("compute", "memory", "launch") * 2):
            dtype = dtypes[number % 2]
            op = _operation(draw, dtype)
            while not _clear(op, machine, wanted, tells=number >= 3):
                op = _operation(draw, dtype)
            cases.append([op, machine])
    return [Case(1, [inputs], part=part) for part in ("bound", "seconds", "share") for inputs in cases]


def machines(draw: random.Random) -> list[dict]:
    """Two data sheets and the recorded core as plain dicts. Launch costs are drawn: they belong to a driver, not to a sheet."""
    sheets = [hardware.find("NVIDIA H100 80GB HBM3"), hardware.find("NVIDIA A100-SXM4-80GB"), hardware.RECORDED_CPU]
    return [
        {
            "name": sheet.name,
            "peak": {dtype: peak for dtype, peak in sheet.peak.items() if dtype in ("bfloat16", "float32")},
            "bandwidth": sheet.bandwidth,
            "launch_s": draw.randrange(10, 100) * 1e-7,
        }
        for sheet in sheets
    ]


def _clear(op: dict, machine: dict, wanted: str, tells: bool) -> bool:
    """Whether `wanted` is the bound, by a factor of 1.3 over the next and, for memory, of 10 at most (a sum then shows).

    With `tells` the peak of another dtype would change the verdict; a launch is the bound at every peak.
    """
    spans = times(op, machine)
    second, first = sorted(spans.values())[-2:]
    if max(spans, key=spans.get) != wanted or first < 1.3 * second or (wanted == "memory" and first > 10 * second):
        return False
    others = [times(op | {"dtype": dtype}, machine) for dtype in machine["peak"] if dtype != op["dtype"]]
    differs = any(max(other, key=other.get) != wanted for other in others)
    return not differs if wanted == "launch" or not tells else differs or not others


def _operation(draw: random.Random, dtype: str) -> dict:
    """A product or an element-wise operation of a size somewhere between tiny and huge."""
    itemsize = {"bfloat16": 2, "float32": 4}[dtype]
    if draw.random() < 0.4:
        n = round(2 ** draw.uniform(4, 28))
        return {"name": f"add of {n}", "flops": n, "bytes": 3 * itemsize * n, "dtype": dtype}
    m, k, n = (round(2 ** draw.uniform(0, 13)) for _ in range(3))
    flops, nbytes = counts("matmul", {"m": m, "k": k, "n": n}, itemsize)
    return {"name": f"({m}, {k}) @ ({k}, {n})", "flops": flops, "bytes": nbytes, "dtype": dtype}


def times(op: dict, machine: dict) -> dict[str, float]:
    """Seconds of each of the three things that run side by side."""
    return {
        "memory": op["bytes"] / machine["bandwidth"],
        "compute": op["flops"] / machine["peak"][op["dtype"]],
        "launch": machine["launch_s"],
    }


def judge_verdict(case: Case, outcome: Outcome) -> Fault | None:
    """The bound by name; the seconds and the share of the peak within 1 %."""
    op, machine = case.inputs[0]
    spans, got = times(op, machine), outcome.values[0]
    right = max(spans, key=spans.get)
    share = spans["compute"] / spans[right]
    want = {"bound": right, "seconds": spans[right], "share": share}[case.part]
    if got == want if case.part == "bound" else _near(got, want):
        return None
    where = f"{op['name']}, {op['dtype']}, on {machine['name']}"
    words = want if case.part == "bound" else f"{want:.4g}"
    shown = {"expected": f"{where}: {words}", "got": _said(got)}
    if got is None:
        return Fault(case.part, "nothing-returned", "The function returned None: every path has to `return`.", **shown)
    read = {"bound": _wrong_bound, "seconds": _wrong_seconds, "share": _wrong_share}[case.part]
    return Fault(case.part, *read(op, machine, got), **shown)


def _said(got: object) -> str:
    """What a function returned, in a few words."""
    if isinstance(got, dict):
        return f"a tensor, {got['tensor']}" if "tensor" in got else f"an object of class {got.get('object', 'dict')}"
    return f"{got:.5g}" if isinstance(got, float) else f"{got!r:.60}"


def _near(got: object, want: float) -> bool:
    return isinstance(got, int | float) and not isinstance(got, bool) and math.isclose(got, want, rel_tol=CLOSE)


def _wrong_bound(op: dict, machine: dict, got: object) -> tuple[str, str]:
    spans = times(op, machine)
    if not isinstance(got, str) or got not in spans:
        return "unknown-bound", 'The bound is one of the strings "memory", "compute" and "launch".'
    if max(spans, key=spans.get) == "launch":
        ready = "Its arithmetic and its traffic are both done before the next launch gets through. Every kernel pays launch_s."
        return "launch-ignored", ready
    for other in machine["peak"]:
        others = times(op | {"dtype": other}, machine)
        if other != op["dtype"] and got == max(others, key=others.get):
            return "dtype-ignored", f"That is the bound at the peak for {other}; this operation is in {op['dtype']}."
    if got == "launch":
        return "launch-always", "The launch is the shorter wait here: it hides behind the work. Name the longest of the three."
    if got == "memory":
        message = "Its intensity is above the ridge. Compare FLOPs a byte with peak / bandwidth, not with the peak itself."
        return "intensity-v-peak", message
    return (
        "by-flops",
        "FLOPs alone do not make it bound by compute: set them against the peak, the bytes against the bandwidth.",
    )


def _wrong_seconds(op: dict, machine: dict, got: object) -> tuple[str, str]:
    spans = times(op, machine)
    longest = max(spans.values())
    if _near(got, max(spans["compute"], spans["memory"])):
        return (
            "launch-ignored",
            "Kernels follow each other no faster than they are launched: launch_s is the third of the times.",
        )
    if _near(got, sum(spans.values())) or _near(got, spans["memory"] + spans["compute"]):
        return "summed", "The three run side by side, so they are not added up: the longest hides the others."
    if _near(got, 1e3 * longest) or _near(got, 1e6 * longest):
        return "not-seconds", "Right, but not in seconds: a thousand or a million times too large."
    if _near(got, spans["compute"]):
        return "flops-predict-time", "That is FLOPs over the peak, the oldest mistake there is: FLOPs do not predict time."
    if _near(got, min(spans.values())):
        return "fastest", "That is the shortest of the three times; the longest decides."
    return "seconds", "The least time is the longest of flops / peak, bytes / bandwidth and launch_s."


def _wrong_share(op: dict, machine: dict, got: object) -> tuple[str, str]:
    spans = times(op, machine)
    share = spans["compute"] / max(spans.values())
    peak = machine["peak"]
    if share > 0.5 and _near(got, 100 * share):  # below, another misreading may come to the same
        return "percent", "A share, not a percentage: 1.0 is the whole peak."
    if _near(got, spans["compute"] / max(spans["compute"], spans["memory"])):
        return (
            "share-without-launch",
            "That is the roof alone. Here the launch takes longer than either, and the peak waits for it.",
        )
    if _near(got, 1.0):
        return "resident-is-busy", "Resident is not busy: the arithmetic units wait for whichever of the three takes longest."
    if _near(got, 1 / share):
        return "upside-down", "Upside down: FLOPs over the seconds it takes, divided by the peak, is at most 1."
    if any(_near(got, share * peak[op["dtype"]] / peak[other]) for other in peak if other != op["dtype"]):
        return "dtype-ignored", f"That is a share of another dtype's peak; this operation is in {op['dtype']}."
    return "share", "FLOPs divided by the seconds it takes, divided by the peak for its dtype."


def explain(case: Case, problem: dict) -> Fault | None:
    """Errors with a plain cause: arguments that do not fit the call, and keys that are not in the dicts."""
    last = problem["text"].strip().split("\n")[-1]
    if problem["kind"] != "error":
        return None
    if last.startswith(f"TypeError: {case.part}()"):
        arguments = ", ".join((*SIZES[case.part], "itemsize") if case.part in SIZES else ("op", "machine"))
        return Fault(case.part, "signature", f"{last}.\nIt is called as {case.part}({arguments}), in this order.")
    if last.startswith("KeyError") and case.part not in SIZES:
        op, machine = case.inputs[0]
        message = f"{last}: an operation has the keys {', '.join(op)}; a machine has {', '.join(machine)}."
        return Fault(case.part, "unknown-key", f"{message}\nThe peaks of {machine['name']}: {', '.join(machine['peak'])}.")
    return None


COMMON = {
    "version": 1,
    "function": "",
    "independent": True,
    "explain": explain,
    "drive": "minidist.course.tasks.drive_plain:plain",
    "refused": {"minidist.plan": "it is the thing to build. The arguments you are given are all it takes."},
}

TASKS = [
    Task(
        key="01.1",
        title="The intensity of six operations",
        parts={"add": 1, "dot": 1, "momentum": 2, "matmul": 2, "linear": 2, "scores": 2},
        minutes=25,
        hints=(
            "Two counts for each operation: FLOPs, and bytes that cross the memory bus. Begin with add: what is read, what is "
            "written, and how often does each of them cross?",
            "A product (m, k) @ (k, n) is m n dot products of length k. For bytes, list the tensors, multiply each one's shape "
            "out and then by its itemsize. A tensor changed in place is on the list twice; a weight that all rows share, once.",
            "1. flops from the sizes; 2. the elements moved, inputs and outputs; 3. return flops / (itemsize * elements). For "
            "momentum the bytes of one element are itemsize for g, and 4 for each reading and each writing of w and v.",
        ),
        cases=intensity_cases,
        judge=judge_intensity,
        **COMMON,
    ),
    Task(
        key="01.2",
        title="Name the bound",
        parts={"bound": 4, "seconds": 3, "share": 3},
        minutes=20,
        hints=(
            "Three things happen side by side: arithmetic, memory traffic, and the launch of the next kernel. How long would "
            "each take if it were alone? Who decides when all is done?",
            "flops / peak[dtype], bytes / bandwidth and launch_s are all in seconds, so compare them. max() has a `key`.",
            "1. a dict of the three times by name; 2. bound = the name of the longest; 3. seconds = that time; "
            "4. share = flops / seconds / peak, with the peak of the operation's own dtype.",
        ),
        cases=verdict_cases,
        judge=judge_verdict,
        **COMMON,
    ),
]
