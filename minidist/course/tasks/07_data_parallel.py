"""Lesson 7's exercise: one class, DDP, graded by five tasks that score alone: hooks, buckets, overlap, no_sync, odd cases."""

from __future__ import annotations

from minidist.course.grading import Case, Fault, Outcome, Task
from minidist.course.tasks import cases_07, judge_07
from minidist.course.tasks.judge_07 import Run

BUILD = "this is the thing to build."
REFUSED = {
    "torch.distributed": "minidist.core.comm has all you need, and leaves lines on the tape.",
    "torch.nn.parallel": BUILD,
    "minidist.parallel": BUILD,
    "minidist.train": "it trains with the engine's data parallelism, and " + BUILD,
    "minidist.plan": "packing buckets is part of " + BUILD.removeprefix("this is "),
}


# 07.1 hooks ----------------------------------------------------------------------------------------------------------------


def judge_hooks(case: Case, outcome: Outcome) -> Fault | None:
    """Right sums from equal weights; then whether all was launched inside backward, once."""
    run = Run(case, outcome)
    return (
        judge_07.wrong_start(run, "sums")
        or judge_07.wrong_sums(run, "sums")
        or judge_07.wrong_bytes(run, "hooks")
        or _not_from_hooks(run)
    )


def _not_from_hooks(run: Run) -> Fault | None:
    for rank in range(run.case.world_size if run.case.world_size > 1 else 0):
        for step in run.steps:
            launched = len(run.lines(rank, step, run.returned(rank, step)[-1]))
            late = len(run.lines(rank, step)) - launched
            if late:
                shown = {"expected": "every reduction launched when backward() returns", "got": f"{late} launched after that"}
                message = (
                    "The sums are right, and left only after backward. A hook on each parameter is called *within* backward,\n"
                    "when its gradient is complete: p.register_post_accumulate_grad_hook. You have hooks? See that each finds\n"
                    "its own bucket: a lambda made in a loop sees the loop variable's last value."
                )
                return Fault("hooks", "after-backward", message, **shown)
    return None


# 07.2 buckets --------------------------------------------------------------------------------------------------------------


def judge_buckets(case: Case, outcome: Outcome) -> Fault | None:
    """Right sums; then whether the payloads of a step are the buckets of the spec."""
    run = Run(case, outcome)
    return judge_07.wrong_sums(run, "sums") or judge_07.wrong_buckets(run, "buckets") or judge_07.wrong_bytes(run, "buckets")


# 07.3 overlap --------------------------------------------------------------------------------------------------------------


def judge_overlap(case: Case, outcome: Outcome) -> Fault | None:
    """Right sums, and launches that keep up with backward. Blocking is a hang of the cases on hold: see `explain_overlap`."""
    run = Run(case, outcome)
    return judge_07.wrong_sums(run, "early") or judge_07.wrong_launches(run, "early")


def explain_overlap(case: Case, problem: dict) -> Fault | None:
    """Whoever waits inside backward waits for rank 0 for ever, where rank 0 is held back."""
    if problem["kind"] == "hang" and case.inputs[0][0].get("hold") is not None:
        message = (
            "A rank waits for its reduction in the middle of backward: rank 0, which came late, would have been waited for at\n"
            "every bucket. Launch with async_op=True, keep the Work, and wait in finish()."
        )
        shown = {"expected": "backward goes on while reductions are under way", "got": "it stops at the first one"}
        return Fault("async", "blocking", message, **shown)
    return None


# 07.4 no_sync --------------------------------------------------------------------------------------------------------------


def judge_quiet(case: Case, outcome: Outcome) -> Fault | None:
    """No reduction under no_sync, all of them after; then the sums over ranks and micro-batches."""
    run = Run(case, outcome)
    return _not_silent(run) or judge_07.wrong_sums(run, "sums") or judge_07.wrong_bytes(run, "sums")


def _not_silent(run: Run) -> Fault | None:
    switched = run.spec.get("switch") == "around backward"
    for rank in range(run.case.world_size if run.case.world_size > 1 else 0):
        for step in run.steps:
            *quiet, _last = run.returned(rank, step)
            early, total = len(run.lines(rank, step, quiet[-1])) if quiet else 0, len(run.lines(rank, step))
            shown = {
                "expected": "0 reductions under no_sync, then every gradient once",
                "got": f"{early}, then {total - early}",
            }
            if switched and (early or not total):
                message = (
                    "Forward and backward lay on different sides of the switch, and yours was read in forward. What counts is\n"
                    "where the *backward* runs: read it in the hook, when the gradient arrives."
                )
                return Fault("silent", "forward-decides", message, **shown)
            if early:
                message = "Reductions were launched under no_sync: a hook has to return at once there, and leave p.grad alone."
                return Fault("silent", "reduced-anyway", message, **shown)
            if not total:
                message = "Nothing was reduced by the last backward of a step, which runs outside no_sync."
                if "raises" in run.spec and step:
                    message += "\nAn exception has passed through no_sync before: switch back in a finally."
                return Fault("silent", "not-switched-back", message, **shown)
    return None


# 07.5 odd cases ------------------------------------------------------------------------------------------------------------


def judge_odd(case: Case, outcome: Outcome) -> Fault | None:
    """Each case tests its own corner."""
    run = Run(case, outcome)
    odd = run.spec.get("odd", [])
    if "tied" in odd:
        return _frozen(run) or _tied(run) or judge_07.wrong_sums(run, "shared") or judge_07.wrong_bytes(run, "shared")
    if "buffer" in odd:
        return _buffers(run) or judge_07.wrong_sums(run, "buffers")
    fault = judge_07.wrong_sums(run, "unused")
    if fault and fault.id == "sums":
        message = "A rank that did not use a parameter has no gradient of its own, and still needs the sum of the others'."
        return Fault("unused", "unused-left-out", message, fault.expected, fault.got)
    return fault or judge_07.wrong_bytes(run, "unused")


def _frozen(run: Run) -> Fault | None:
    import torch

    held = [place for place, p in enumerate(run.net.parameters()) if not p.requires_grad]
    for rank in range(run.case.world_size):
        for place in held:
            if any(run.gradients(rank, step)[place] is not None for step in run.steps):
                message = "A frozen parameter (requires_grad=False) got a gradient: it is none of your business."
                return Fault("shared", "frozen-touched", message)
            after = judge_07.decode(run.outcome.values[rank][2][place])
            assert torch.equal(after, list(run.net.parameters())[place]), "only the loop updates weights, by p.grad"
    return None


def _tied(run: Run) -> Fault | None:
    """A tied weight in two buckets, or a frozen one in any, shows in the payload."""
    n = run.case.world_size
    for rank in range(n if n > 1 else 0):
        payload = sum(line["payload"] for line in run.lines(rank, 0))
        extra = payload - sum(run.sizes)
        if extra > 0:
            frozen = sum(p.numel() * 8 for p in run.net.parameters() if not p.requires_grad)
            which = "A frozen weight's" if extra == frozen else "A tied weight's"
            message = f"{which} bytes are in the payload that should not be: reduce each trainable tensor once."
            return Fault("shared", "too-much", message, f"{sum(run.sizes)} bytes a step", f"{payload} bytes")
    return None


def _buffers(run: Run) -> Fault | None:
    import torch

    seen = [[judge_07.decode(value) for value in values[3]] for values in run.outcome.values]
    for rank in range(1, run.case.world_size):
        for step, (theirs, mine) in enumerate(zip(seen[0], seen[rank], strict=True)):
            if not torch.equal(theirs, mine):
                if step == 0:
                    message = "Buffers start apart: the constructor has to send rank 0's, too, not its parameters alone."
                    return Fault("buffers", "buffers-apart", message)
                message = (
                    "Each rank's buffer has seen its own batches only, and goes its own way (a running mean, say). Send rank\n"
                    "0's once a step: model.buffers(), from finish() or from the next forward."
                )
                return Fault(
                    "buffers", "buffers-drift", message, f"rank 0's buffer at step {step + 1}", f"another on rank {rank}"
                )
    return None


def explain_odd(case: Case, problem: dict) -> Fault | None:
    """Hangs of the corners: what each rank ran differs, what it launches must not."""
    odd = case.inputs[0][0].get("odd", [])
    part = "shared" if "tied" in odd else "buffers" if "buffer" in odd else "unused"
    if part == "unused" and problem["kind"] in ("hang", "mismatch"):
        message = (
            "A rank skipped a branch, or had no batch, so a hook never came, its bucket never filled, and the others wait (or\n"
            "met another bucket in its place). finish() launches what is left, zeros where there is no gradient; in between a\n"
            "bucket waits for those before it, so that the order is the same on all ranks."
        )
        return Fault(part, "unused-hangs", message)
    return None


# All tasks -----------------------------------------------------------------------------------------------------------------


def followed(part: str, problem: dict) -> Fault | None:
    """A parameter itself handed to comm: autograd follows it, and will not have it changed."""
    text = problem["text"]
    if problem["kind"] == "error" and ("would silently cut it from the graph" in text or "leaf Variable that requires" in text):
        message = (
            "A parameter went to comm, which writes into it, and autograd follows it. Hand over p.detach(), the same\n"
            "memory without the history; and if you meant the gradient, that is p.grad."
        )
        return Fault(part, "detach", message)
    return None


def task(
    number: int, title: str, parts: dict[str, int], minutes: int, hints: tuple[str, str, str], explain=None, **judging
) -> Task:
    """One of the five: they share the class, its cell and the loop that drives it. `explain` reads the task's own problems."""

    def reading(case: Case, problem: dict) -> Fault | None:
        return (explain and explain(case, problem)) or followed(next(iter(parts)), problem)

    return Task(
        key=f"07.{number}",
        version=1,
        title=title,
        function="DDP",
        parts=parts,
        minutes=minutes,
        hints=hints,
        refused=REFUSED,
        drive="minidist.course.tasks.drive_07:drive",
        cell="answer-07",
        explain=reading,
        **judging,
    )


TASKS = [
    task(
        1,
        "Hooks",
        {"sums": 5, "hooks": 5},
        25,
        (
            "Two jobs. Before the first step: what makes weights equal that were drawn apart? In every step: who knows, in the "
            "middle of backward, that a gradient is complete?",
            "comm.broadcast(p.detach(), mesh.world, src=0, tag='weight') for the first; for the second "
            "p.register_post_accumulate_grad_hook(f), which calls f(p) once p.grad is there. comm.all_reduce works in place.",
            "Constructor: broadcast every parameter, then register a hook on each trainable one. The hook: launch "
            "comm.all_reduce(p.grad, mesh.world, tag='grad', async_op=True) and keep the Work in a list. finish(): wait for "
            "each, then empty the list.",
        ),
        cases=cases_07.hook_cases,
        judge=judge_hooks,
    ),
    task(
        2,
        "Buckets",
        {"sums": 4, "buckets": 6},
        30,
        (
            "A bucket is a list of parameters, decided once, in the constructor. When does it leave? And how do several "
            "tensors travel as one?",
            "Backward meets the last layer first, so walk reversed(list(model.parameters())). Bytes are "
            "p.numel() * p.element_size(). torch.cat of flattened gradients packs; flat.split(sizes) unpacks.",
            "1. group the trainable parameters, last first, closing a bucket before it would pass bucket_bytes; 2. a count of "
            "missing gradients by bucket, lowered by the hook; 3. at zero: flat = torch.cat([p.grad.flatten() ...]), "
            "all_reduce of flat; 4. finish(): wait, copy each piece back into its p.grad, set the counts anew.",
        ),
        cases=cases_07.bucket_cases,
        judge=judge_buckets,
    ),
    task(
        3,
        "Overlap",
        {"early": 5, "async": 5},
        15,
        (
            "Look at where your code waits, and at what it could do instead at that moment.",
            "comm.all_reduce(..., async_op=True) returns a Work at once; Work.wait() belongs into finish(). And a bucket that "
            "is full has no reason to stay.",
            "In the hook, when the bucket's last gradient comes: pack, launch with async_op=True, append (bucket, flat, work) "
            "to a list, return. In finish(): for each of these in order, work.wait(), then unpack.",
        ),
        cases=cases_07.overlap_cases,
        judge=judge_overlap,
        explain=explain_overlap,
    ),
    task(
        4,
        "no_sync",
        {"silent": 5, "sums": 5},
        15,
        (
            "autograd adds to p.grad on its own. What must your hook do under no_sync so that nothing is lost, nothing sent?",
            "contextlib.contextmanager makes a context manager of a generator: set a flag, yield, set it back in a finally. "
            "Who reads the flag, and when?",
            "no_sync(): self.quiet = True; try: yield; finally: self.quiet = False. The hook returns at once if self.quiet. "
            "The backward after it finds the sum of all micro-batches in p.grad, and reduces that.",
        ),
        cases=cases_07.quiet_cases,
        judge=judge_quiet,
    ),
    task(
        5,
        "Odd cases",
        {"shared": 4, "buffers": 2, "unused": 4},
        35,
        (
            "For each corner ask: how often does the hook come, and does it come at the same time, in the same order, on every "
            "rank? Whatever differs between ranks must not decide what they send.",
            "model.parameters() lists a tied weight once, and its hook comes once, when both uses are in. requires_grad tells "
            "frozen ones. model.buffers() need a broadcast. For gradients that never come, finish() is the last chance.",
            "Launch buckets strictly in order: a full one waits for those before it. finish() first launches all that are "
            "left, with torch.zeros_like(p) where p.grad is None; then waits and unpacks (p.grad may have to be made); then "
            "broadcasts every buffer from rank 0.",
        ),
        cases=cases_07.odd_cases,
        judge=judge_odd,
        explain=explain_odd,
    ),
]
