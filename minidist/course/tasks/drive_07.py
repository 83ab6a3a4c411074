"""The training loop around a learner's DDP in exercise 7: models with odd corners, marks along backward, and what was seen.

This runs on the ranks, among the submission, so it decides nothing: it reports gradients, weights, and how long the tape was
at each mark. The judge builds the same model, in its own process, and compares.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn

from minidist.core import comm
from minidist.core.links import Delay, Link

LR = 0.05


class Net(nn.Module):
    """A chain of linear layers with tanh between them. `spec["odd"]` adds a corner: frozen, tied, branch or buffer.

    `mark(stage)` is called in backward when everything that layers `stage` and above have to say about their gradients has
    been said, and for the layer count itself before any of them.
    """

    def __init__(self, spec: dict, seed: int):
        super().__init__()
        widths, odd = spec["widths"], spec.get("odd", ())
        dtype = getattr(torch, spec["dtype"])
        draw = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths))
        if "branch" in odd:
            self.side = nn.Linear(widths[1], widths[1], dtype=dtype)
        if "tied" in odd:
            self.layers[-1].weight = self.layers[1].weight
        if "frozen" in odd:
            self.layers[1].bias.requires_grad_(False)
            self.layers[2].weight.requires_grad_(False)
        if "buffer" in odd:
            self.register_buffer("average", torch.zeros(widths[1], dtype=dtype))
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) * 0.4)
        self.mark = lambda stage: None
        self.seen: list[Tensor] = []
        """the buffer as each forward found it"""

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        """x (rows, widths[0]) -> (rows, widths[-1])."""
        if hasattr(self, "average"):
            self.seen.append(self.average.clone())
        for stage, layer in enumerate(self.layers):
            x = torch.tanh(layer(Mark.apply(x, self, stage)))
            if stage == 0 and hasattr(self, "average"):
                with torch.no_grad():
                    self.average.mul_(0.5).add_(x.mean(0))
            if stage == 0 and branch:
                x = x + self.side(x)
        return Mark.apply(x, self, len(self.layers))


class Mark(torch.autograd.Function):
    """Nothing, and a call of `net.mark(stage)` when backward comes by."""

    @staticmethod
    def forward(ctx, x, net, stage):
        ctx.net, ctx.stage = net, stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.net.mark(ctx.stage)
        return grad, None, None


def data(spec: dict, rank: int, step: int, micro: int) -> tuple[Tensor, Tensor]:
    """Inputs (rows, widths[0]) and targets (rows, widths[-1]) of one micro-batch."""
    rows, widths = spec["rows"][rank][step][micro], spec["widths"]
    draw = torch.Generator().manual_seed(spec["seed"] + 7919 * (rank + 1) + 104729 * (step + 1) + 1299709 * (micro + 1))
    pair = (torch.randn(rows, width, generator=draw, dtype=torch.float64) for width in (widths[0], widths[-1]))
    x, y = (tensor.to(getattr(torch, spec["dtype"])) for tensor in pair)
    return x, y


def loss(net, spec: dict, rank: int, step: int, micro: int) -> Tensor:
    """This micro-batch's part of the step's loss: a sum, divided once, by the rows of all ranks and micro-batches."""
    x, y = data(spec, rank, step, micro)
    branch = bool(spec.get("branch") and spec["branch"][rank][step])
    total = sum(sum(rows[step]) for rows in spec["rows"])
    return ((net(x, branch) - y) ** 2).sum() / total


def drive(mesh, answer, spec: dict) -> list:
    """Train with the learner's `answer`. [start, [[gradients, marks, returned, end] a step], weights, seen].

    `marks` are [micro-batch, stage, lines on the tape]; `returned` is the tape's length after each backward, `end` after
    `finish()`, and the first number of each step's marks its length at the beginning.
    """
    first = len(mesh.tape.lines)
    mesh.delay = Delay(Link(latency_s=1e-3))  # a result that nobody waits for then never arrives, however slow the machine

    def lines() -> int:
        return len(mesh.tape.lines) - first

    # with spec["apart"] every rank draws weights of its own, which only a broadcast can mend
    net = Net(spec, spec["seed"] + (mesh.rank if spec["apart"] else 0))
    ddp = answer(mesh, net, spec["bucket_bytes"])
    start, steps = _values(net), []
    for step, rows in enumerate(spec["rows"][mesh.rank]):
        marks, returned = [[-1, -1, lines()]], []
        for micro in range(len(rows)):
            net.mark = _marker(mesh, spec, marks, micro, lines, hold=step == spec.get("hold"))
            _micro_step(ddp, spec, mesh.rank, step, micro, last=micro == len(rows) - 1)
            returned.append(lines())
        ddp.finish()
        steps.append([[None if p.grad is None else p.grad.clone() for p in net.parameters()], marks, returned, lines()])
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=LR)
        net.zero_grad()
        if step == spec.get("raises"):
            _raise_within(ddp)
    return [start, steps, _values(net), net.seen]


def _micro_step(ddp, spec: dict, rank: int, step: int, micro: int, last: bool) -> None:
    """One forward and backward; the backward lies inside no_sync for all but the last micro-batch."""
    quiet = ddp.no_sync if len(spec["rows"][rank][step]) > 1 else nullcontext
    late = spec.get("switch") == "around backward"  # then the forward lies on the wrong side, which must not matter
    with quiet() if last == late else nullcontext():
        part = loss(ddp, spec, rank, step, micro)
    with nullcontext() if last else quiet():
        part.backward()


def _raise_within(ddp) -> None:
    """An exception passes through no_sync; the steps after it must reduce as usual."""
    try:
        with ddp.no_sync():
            raise LookupError("a batch that could not be read")
    except LookupError:
        pass


def _marker(mesh, spec: dict, marks: list, micro: int, lines, hold: bool):
    """What backward does at a stage: note the tape's length, and, in a step on hold, wait for another rank's backward.

    Rank 0 starts its backward only when the last rank is nearly through with its own. Who waits for rank 0's gradients in
    the middle of backward then waits for ever.
    """
    top, other = len(spec["widths"]) - 1, mesh.world_size - 1
    token = torch.zeros(1)

    def mark(stage: int) -> None:
        marks.append([micro, stage, lines()])
        if hold and mesh.rank == other and stage == 1:
            comm.send(token, mesh.world, dst=0, tag="check")
        if hold and mesh.rank == 0 and stage == top:
            comm.recv(token, mesh.world, src=other, tag="check")

    return mark


def _values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]
