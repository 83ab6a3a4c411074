"""Judging exercise 7: the same training in one process, the buckets of the spec, and what the tape says between two marks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from minidist.course.grading import Case, Fault, Outcome
from minidist.plan.time import pack

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"float64": 8, "float32": 4}
CLOSE = {"float64": 1e-10, "float32": 1e-4}  # of the largest element of the tensor


@dataclass
class Run:
    """A case and what came back, read for the questions that the tasks ask."""

    case: Case
    outcome: Outcome

    @property
    def spec(self) -> dict:
        """The case's settings, the same on every rank."""
        return self.case.inputs[0][0]

    @cached_property
    def net(self):
        """A fresh model with the weights that everybody has to start from: rank 0's."""
        from minidist.course.tasks.drive_07 import Net

        return Net(self.spec, self.spec["seed"])

    def start(self, rank: int) -> list[Tensor]:
        """Weights after the constructor."""
        return [decode(tensor) for tensor in self.outcome.values[rank][0]]

    def gradients(self, rank: int, step: int) -> list[Tensor | None]:
        """p.grad of every parameter after `finish()`."""
        return [decode(tensor) for tensor in self.outcome.values[rank][1][step][0]]

    def marks(self, rank: int, step: int) -> list[list[int]]:
        """[micro-batch, stage, lines on the tape] in order of time; the first is the step's beginning."""
        return self.outcome.values[rank][1][step][1]

    def returned(self, rank: int, step: int) -> list[int]:
        """Lines on the tape when each backward had returned."""
        return self.outcome.values[rank][1][step][2]

    def lines(self, rank: int, step: int, upto: int | None = None) -> list[dict]:
        """What a rank launched in a step to reduce gradients, up to a length of the tape (default: to the step's end).

        Broadcasts and barriers are not counted: buffers may travel in any step.
        """
        record = self.outcome.values[rank][1][step]
        tape = self.outcome.tapes[rank][record[1][0][2] : record[3] if upto is None else upto]
        return [line for line in tape if line["tag"] != "check" and line["op"] not in ("broadcast", "barrier")]

    @property
    def steps(self) -> range:
        """Numbers of the optimizer steps."""
        return range(len(self.spec["rows"][0]))

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of the trainable parameters, last one first."""
        width = BYTES[self.spec["dtype"]]
        return [p.numel() * width for p in reversed(list(self.net.parameters())) if p.requires_grad]

    @cached_property
    def buckets(self) -> list[int]:
        """Payload of each bucket."""
        return [sum(self.sizes[i] for i in places) for places in pack(self.sizes, self.spec["bucket_bytes"])]

    def ready(self, stage: int) -> int:
        """Bytes of gradient that are complete when backward leaves layer `stage`."""
        seen, width = 0, BYTES[self.spec["dtype"]]
        done = {id(p) for layer in self.net.layers[stage:] for p in layer.parameters() if p.requires_grad}
        for p in self.net.parameters():
            seen += p.numel() * width * (id(p) in done)
        return seen

    @cached_property
    def reference(self) -> list[dict]:
        """Per step: "sum" of the gradients over all ranks, each rank's own ("own"), its last micro-batch's ("last")."""
        import torch

        from minidist.course.tasks import drive_07

        spec, net, found = self.spec, self.net, []
        for step in self.steps:
            own, last = [], []
            for rank, rows in enumerate(spec["rows"]):
                parts = []
                for micro in range(len(rows[step])):
                    net.zero_grad()
                    drive_07.loss(net, spec, rank, step, micro).backward()
                    parts.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()])
                zeros = [torch.zeros_like(p) for p in net.parameters()]
                own.append([sum(tensors) for tensors in zip(*parts, strict=True)] or zeros)
                last.append(parts[-1] if parts else zeros)
            total = [sum(tensors) for tensors in zip(*own, strict=True)]
            found.append({"sum": total, "own": own, "last": last})
            with torch.no_grad():
                for p, grad in zip(net.parameters(), total, strict=True):
                    p.sub_(grad, alpha=drive_07.LR)
        del self.__dict__["net"]  # trained: the next to ask gets a fresh one
        return found


def decode(value: object) -> Tensor | None:
    """A tensor as it crossed from the sandbox; None for what is none."""
    import torch

    if not isinstance(value, dict) or "tensor" not in value:
        return None
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])).view(value["shape"])


def wrong_start(run: Run, part: str) -> Fault | None:
    """Whether every rank starts from rank 0's weights."""
    right = list(run.net.parameters())
    for rank in range(run.case.world_size):
        if not _same(run.start(rank), right, run):
            message = (
                "The ranks drew different weights, and each kept its own: nothing but you makes replicas equal. Rank 0's\n"
                "weights have to be on every rank when the constructor is done (comm.broadcast of p.detach())."
            )
            return Fault(part, "apart", message, "rank 0's weights everywhere", f"rank {rank} starts from others")
    return None


def wrong_sums(run: Run, part: str) -> Fault | None:
    """The first gradient that is not the sum over all ranks, with the likeliest thought behind it."""
    for step, right in enumerate(run.reference):
        for rank in range(run.case.world_size):
            got = run.gradients(rank, step)
            if not _same(got, right["sum"], run):
                return Fault(part, *_misreading(run, step, rank, got, right), **_shown(step, rank, got, right["sum"], run))
    return None


def _misreading(run: Run, step: int, rank: int, got: list, right: dict) -> tuple[str, str]:
    n = run.case.world_size

    def is_(factor: float, tensors: list) -> bool:
        return _same(got, [tensor * factor for tensor in tensors], run)

    if all(grad is None or not grad.any() for grad in got):
        return "no-gradient", "There is no gradient: it is None or zero. Where does your reduction put its result? Into p.grad."
    if n > 1 and all(_same(run.gradients(r, step), right["own"][0], run) for r in range(n)):
        return "rank-0-only", "Everybody holds rank 0's gradient: the batches of the others were wasted. Sum, do not broadcast."
    if n > 1 and is_(1, right["own"][rank]):
        return (
            "own-only",
            "That is this rank's own gradient: it was never summed with the others' (or the sum was not put back).",
        )
    if n > 1 and is_(1 / n, right["sum"]):
        return (
            "divided",
            "Divided by the number of ranks. The loss was divided once, by the rows of all ranks: from then on only sum.",
        )
    if n > 1 and is_(n, right["sum"]):
        return "twice", "Every gradient is n times too large: it was summed over the ranks twice in this step."
    if len(run.spec["rows"][rank][step]) > 1:
        if is_(1, [sum(t) for t in zip(*right["last"], strict=True)]):
            message = "Only the last micro-batch is in the sum: those under no_sync have to stay in p.grad until it is reduced."
            return "last-only", message
        return "micro-batches", "Not the sum over ranks and micro-batches: each must be in it once, and be reduced once."
    wrong = [
        name for (name, _), g, s in zip(run.net.named_parameters(), got, right["sum"], strict=True) if not _same([g], [s], run)
    ]
    if step and not any(_same([g], [s], run) for g, s in zip(got, right["sum"], strict=True)):
        return (
            "later-steps",
            f"Step 1 is right, step {step + 1} is not: something of the step before is left over. finish() ends a step.",
        )
    return "sums", f"After finish() p.grad is not the sum over all ranks, for {', '.join(wrong[:3])}."


def wrong_bytes(run: Run, part: str) -> Fault | None:
    """Whether each rank sends 2(n-1)/n of the trainable parameters' bytes in every step, and not more."""
    n, total = run.case.world_size, sum(run.sizes)
    if n == 1:
        return None
    for rank in range(n):
        for step in run.steps:
            payload = sum(line["payload"] for line in run.lines(rank, step))
            if payload == 0:
                message = "Right sums, and nothing on the tape: they took a way around minidist.core.comm."
                return Fault(part, "off-tape", message)
            sent = sum(line["sent"] for line in run.lines(rank, step))
            if abs(sent - 2 * (n - 1) / n * total) > 1e-6 * total:
                shown = {"expected": f"{2 * (n - 1) / n * total:.0f} bytes sent a step", "got": f"{sent:.0f}"}
                message = "Every gradient goes through one all-reduce a step: 2(n-1)/n of the trainable parameters' bytes."
                return Fault(part, "bytes", message, **shown)
    return None


def wrong_buckets(run: Run, part: str) -> Fault | None:
    """Whether the payloads of a step are the spec's buckets, in order."""
    if run.case.world_size == 1:
        return None
    for step in run.steps:
        got = [line["payload"] for line in run.lines(0, step)]
        if got != run.buckets:
            shown = {"expected": f"buckets of {run.buckets} bytes", "got": f"{got}"}
            return Fault(part, *_packed_otherwise(run, got), **shown)
    return None


def _packed_otherwise(run: Run, got: list[int]) -> tuple[str, str]:
    limit, sizes, width = run.spec["bucket_bytes"], run.sizes, BYTES[run.spec["dtype"]]

    def packed(sizes: list[int], limit: float) -> list[int]:
        return [sum(sizes[i] for i in places) for places in pack(sizes, limit)]

    if got == sizes:
        return "no-buckets", "One reduction a parameter: each pays the latency again. Let parameters share a flat tensor."
    if got == [sum(sizes)]:
        return "one-bucket", f"All in one bucket: the limit of {limit} bytes is not looked at."
    if got == packed(sizes[::-1], limit):
        return "forward-order", "Packed first layer first. Backward meets the last layer first: so must the buckets."
    if got == packed(sizes, limit * width):
        return "elements", f"bucket_bytes counted in elements: an element of {run.spec['dtype']} has {width} bytes."
    if width != 4 and got == packed(sizes, limit * width / 4):
        return "four-bytes", f"You count 4 bytes an element; those of {run.spec['dtype']} have {width}: ask p.element_size()."
    if sorted(got) == sorted(run.buckets):
        return "bucket-order", "The right buckets in another order: the one that backward fills first goes first."
    if any(size > max(limit, max(sizes)) for size in got) or got == _overfull(sizes, limit):
        return "over-the-limit", "A bucket went past the limit: it closes *before* the parameter that would take it there."
    return "buckets", "Walk the trainable parameters from the last to the first; close a bucket before it would pass the limit."


def _overfull(sizes: list[int], limit: int) -> list[int]:
    """Buckets closed after the parameter that takes them to or past the limit."""
    buckets, current = [], 0
    for size in sizes:
        current += size
        if current >= limit:
            buckets, current = [*buckets, current], 0
    return buckets + [current] * (current > 0)


def wrong_launches(run: Run, part: str) -> Fault | None:
    """Whether reductions start while backward is at work: at every layer, at most one bucket's bytes lie ready and waiting."""
    n, limit = run.case.world_size, run.spec["bucket_bytes"]
    for rank in range(n if n > 1 else 0):
        for step in run.steps:
            _, *marks = run.marks(rank, step)
            if not sum(line["payload"] for line in run.lines(rank, step, run.returned(rank, step)[-1])):
                message = (
                    "Nothing was launched before backward() had returned. The sums are right and the time is lost: every byte\n"
                    "travels while nobody computes. Launch from a hook that runs inside backward."
                )
                return Fault(part, "after-backward", message)
            for micro, stage, upto in marks:
                launched = sum(line["payload"] for line in run.lines(rank, step, upto))
                waiting = run.ready(stage) - launched
                if micro == len(run.spec["rows"][rank][step]) - 1 and stage > 0 and waiting > limit:
                    shown = {"expected": f"at most {limit} bytes ready and not launched", "got": f"{waiting} bytes"}
                    message = (
                        f"Backward is down to layer {stage - 1}, and complete gradients still wait. A bucket leaves the\n"
                        "moment its last gradient is there; the one that backward fills first has to be first in line."
                    )
                    return Fault(part, "late", message, **shown)
    return None


def _same(got: list, right: list, run: Run) -> bool:
    """All tensors agree; no gradient at all counts as zeros."""
    import torch

    close = CLOSE[run.spec["dtype"]]
    for g, r in zip(got, right, strict=True):
        g = torch.zeros_like(r) if g is None else g
        if g.shape != r.shape or not (g.double() - r.double()).abs().max() <= close * max(r.abs().max().item(), 1e-12):
            return False
    return True


def _shown(step: int, rank: int, got: list, right: list, run: Run) -> dict[str, str]:
    """Expected and got, of the first parameter that differs."""
    for (name, _), g, r in zip(run.net.named_parameters(), got, right, strict=True):
        if not _same([g], [r], run):
            place = r.abs().argmax()
            value = "no gradient" if g is None else f"{g.flatten()[place]:.6g}"
            return {"expected": f"step {step + 1}, rank {rank}: {name}.grad[{place}] = {r.flatten()[place]:.6g}", "got": value}
    return {}
