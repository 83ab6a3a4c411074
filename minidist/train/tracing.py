"""What becomes of the tape while a run goes on: kept and written for the steps that are traced, forgotten after every other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from minidist.core import spans, trace
from minidist.core.mesh import Mesh
from minidist.core.tape import Tape
from minidist.train.config import Config, traced_steps


class Tracing:
    """One rank's tape over the steps of a run. Without it the tape would grow by a line an operation until memory is full.

    Traced are the steps of `metrics.trace`, and of them what happens within the step; an evaluation that follows one is left
    out. The file trace/rank-R.json of the run's folder is written after the last of them, or when one of them fails.
    """

    def __init__(self, mesh: Mesh, config: Config):
        self.mesh, self.folder, self.steps = mesh, config.run.folder, traced_steps(config)
        self.kept = Tape(mesh.rank)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around optimizer step `number`, from 1."""
        self.mesh.tape.clear()
        if number not in self.steps:
            yield
            return
        start, done = time.monotonic(), False
        try:
            yield
            done = True
        finally:
            tape = self.mesh.tape
            self.kept.lines += tape.lines
            self.kept.spans += [*tape.spans, spans.frame(number, start, time.monotonic())]
            if not done or number == self.steps[-1]:
                trace.write_rank(self.folder, self.kept, self.mesh.world_size)
                self.kept.clear()
