"""The runtime: executes one rank's program of a pipeline schedule, whatever schedule it is.

A program is actions and transfers in order. Transfers are launched where they stand and waited for where their result is used:
a receive stands one action before the one that needs it, and no send is waited for before the end of the step, so hidden states
travel while ranks compute. Downwards and upwards they take two connections. On each, both ends have the same order, since it
comes from the schedule; so no rank waits for what its peer will only send later.

What is kept of a micro-batch between its forward and its backward: the stage's input and what autograd keeps. The output goes
when it has been sent. World size 1 is the same path: one rank, one stage, no transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minidist.core import comm
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.core.random import DropoutKey
from minidist.core.tape import Span
from minidist.core.work import Work
from minidist.data.batch import Batch
from minidist.model.balance import Routing
from minidist.parallel.pipeline import setting
from minidist.parallel.pipeline.actions import Action, Program, Transfer
from minidist.parallel.split import weight_grad
from minidist.parallel.zero import Zero

AtEnd = Callable[[Tensor, int], Tensor | None]
"""logits (B,S,V) and number of a micro-batch on the last stage -> the scalar to run backward from"""


@dataclass(frozen=True)
class Call:
    """What every stage is called with for one micro-batch, beside the hidden state."""

    batch: Batch
    """this rank's part of it, on its device"""
    dropout: DropoutKey | None = None
    routing: Routing | None = None


class Pipeline:
    """The stages of one rank, and its connections to the ranks before and after it."""

    def __init__(self, zero: Zero, mesh: Mesh):
        self.zero, self.mesh, self.layout = zero, mesh, mesh.layout
        self.place = mesh.coordinates["pp"]
        self.down = mesh.group("pp")
        self.up = mesh.twin("pp") if self.layout.pp > 1 else self.down
        self.by_rank = setting.stages_by_rank(self.layout)
        self.last = sum(map(len, self.by_rank)) - 1
        self._programs: dict[tuple[Callable, int], Program] = {}
        self.places = {stage: (rank, chunk) for rank, held in enumerate(self.by_rank) for chunk, stage in enumerate(held)}

    @property
    def ends_here(self) -> bool:
        """Whether this rank holds the last stage, which makes logits."""
        return self.last in self.by_rank[self.place]

    def train(self, calls: Sequence[Call], at_end: AtEnd) -> None:
        """Forward and backward of a step's micro-batches, as the layout's schedule says."""
        _Pass(self, self._program(setting.programs, len(calls)), calls, at_end).run()

    @torch.no_grad()
    def forward(self, calls: Sequence[Call], at_end: AtEnd) -> None:
        """Forward alone, of any number of micro-batches."""
        if calls:
            _Pass(self, self._program(setting.forward_programs, len(calls)), calls, at_end).run()

    def _program(self, programs: Callable[[Layout, int], tuple[Program, ...]], micro_batches: int) -> Program:
        """What this rank has to do, found once for each number of micro-batches."""
        key = (programs, micro_batches)
        if key not in self._programs:
            self._programs[key] = programs(self.layout, micro_batches)[self.place]
        return self._programs[key]


class _Pass:
    """One execution of a program."""

    def __init__(self, pipeline: Pipeline, program: Program, calls: Sequence[Call], at_end: AtEnd):
        self.pipeline, self.program, self.calls, self.at_end = pipeline, program, calls, at_end
        self.zero, self.stages = pipeline.zero, pipeline.by_rank[pipeline.place]
        self.final = {op.chunk: op for op in program if isinstance(op, Action) and op.kind in "BW"}
        """by chunk: its last action that makes weight gradients"""
        self.coming: dict[tuple[str, int, int], Tensor | Work] = {}
        self.going: dict[tuple[str, int, int], Tensor] = {}
        self.sends: list[Work] = []
        self.inputs: dict[tuple[int, int], Tensor] = {}  # (micro-batch, chunk) -> hidden state that came
        self.roots: dict[tuple[int, int], Tensor | GradientEdge] = {}  # and where its backward starts
        self.put_off: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor, Tensor]]] = {}

    def run(self) -> None:
        """Do it all, in order, and note on the tape what was worked on when (on a GPU: launched).

        To launch the messages after an action counts as its work; to wait for what the next one needs does not.
        """
        actions = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights}
        spans, working = self.pipeline.mesh.tape.spans, None
        for op in self.program:
            if isinstance(op, Transfer):
                self.transfer(op)
                continue
            if working:
                spans.append(Span(*working, time.monotonic()))
            self.await_input(op)
            working = (str(op), time.monotonic())
            actions[op.kind](op)
            self.settle(all=False)
        if working:
            spans.append(Span(*working, time.monotonic()))
        self.settle(all=True)
        assert not (self.coming or self.going or self.inputs or self.roots or self.put_off), "a schedule that is not complete"

    # Transfers

    def transfer(self, op: Transfer) -> None:
        """Launch one end of a message."""
        pipeline, key = self.pipeline, (op.kind, op.micro, op.chunk)
        downwards = (op.peer > pipeline.place) == (op.op == "send")
        group = pipeline.down if downwards else pipeline.up
        if op.op == "send":
            self.sends.append(comm.send(self.going.pop(key), group, op.peer, async_op=True))
        else:
            self.coming[key] = comm.recv(self.memory(op.micro), group, op.peer, async_op=True)

    def memory(self, micro: int) -> Tensor:
        """Room for a hidden state (B,S,D) of this rank, of its shard of S under sequence parallelism."""
        tokens, layout = self.calls[micro].batch.tokens, self.pipeline.layout
        length = tokens.shape[1] // (layout.tp if layout.sp else 1)
        width, dtype = self.zero.model.cfg.width, self.zero.formats.weights
        return torch.empty(tokens.shape[0], length, width, dtype=dtype, device=tokens.device)

    def await_input(self, action: Action) -> None:
        """Wait for what an action needs from the stage before, or after: that is idle time, and no work of the action's."""
        key = ("F" if action.kind == "F" else "B", action.micro, action.chunk)
        if action.kind != "W" and isinstance(work := self.coming.get(key), Work):
            self.coming[key] = work.wait()

    def hand(self, kind: str, action: Action, value: Tensor) -> None:
        """Give a result to the stage after it (F), or before it (B): to be sent, or to another chunk of this rank."""
        rank, chunk = self.pipeline.places[self.stages[action.chunk] + (1 if kind == "F" else -1)]
        if rank == self.pipeline.place:
            self.coming[kind, action.micro, chunk] = value
        else:
            self.going[kind, action.micro, action.chunk] = value

    def settle(self, all: bool) -> None:
        """Let go of what has been sent; with `all`, wait for it."""
        done = [work for work in self.sends if all or work.is_completed()]
        self.sends = [work for work in self.sends if work not in done]
        for work in done:
            work.wait()

    # Actions

    def forward(self, action: Action) -> None:
        """F: through the chunk."""
        stage, call, key = self.stages[action.chunk], self.calls[action.micro], (action.micro, action.chunk)
        batch, training = call.batch, torch.is_grad_enabled()
        x = batch.tokens if stage == 0 else self.coming.pop(("F", *key))
        if stage and training:
            self.inputs[key] = x.requires_grad_()
        out = self.zero.parts[action.chunk](x, batch.positions, batch.documents, call.dropout, call.routing)
        if stage == self.pipeline.last:
            root = self.at_end(out, action.micro)
        else:
            root = get_gradient_edge(out) if training else None
            self.hand("F", action, out.detach())
        if training:
            self.roots[key] = root

    def backward(self, action: Action) -> None:
        """B, or I: the same, but that the gradients of linear weights are put off."""
        key, stage = (action.micro, action.chunk), self.stages[action.chunk]
        grad = None if stage == self.pipeline.last else self.coming.pop(("B", *key))
        self.zero.before_backward(last=action == self.final[action.chunk], part=action.chunk, kind=action.kind)
        if action.kind == "I":
            with self.zero.later.putting_off() as self.put_off[key]:
                torch.autograd.backward(self.roots.pop(key), grad)
        else:
            torch.autograd.backward(self.roots.pop(key), grad)
        self.zero.after_backward()
        if stage:
            self.hand("B", action, self.inputs.pop(key).grad)

    @torch.no_grad()
    def weights(self, action: Action) -> None:
        """W: the weight gradients that I has put off."""
        tasks: dict[nn.Parameter, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
        for task in self.put_off.pop((action.micro, action.chunk)):
            tasks.setdefault(task[0], []).append(task)
        last = action == self.final[action.chunk]
        self.zero.before_backward(last=last, part=action.chunk, kind="W", awaited=tasks)
        for weight, uses in tasks.items():
            self.zero.deposit(weight, sum(weight_grad(*use) for use in uses))
        self.zero.after_backward()
