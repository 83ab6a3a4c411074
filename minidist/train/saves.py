"""When the state of a run is saved, and what becomes of the run where that fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from minidist import checkpoint
from minidist.train import config as configs
from minidist.train import state
from minidist.train.build import Job


class Saves:
    """Saves the state of `job` every `checkpoint.every` steps and after the last one. Use it in a `with`: its end waits.

    `totals` gives what the report knows beyond the step: {"tokens", "loss"}; `note` shows a line.
    """

    def __init__(self, job: Job, totals: Callable[[], dict[str, Any]], note: Callable[[str], None]):
        self.job, self._totals, self._note = job, totals, note
        settings = job.config.checkpoint
        folder = job.config.run.folder / "checkpoints"
        self.saver = checkpoint.Saver(folder, job.mesh, keep=settings.keep, background=settings.background)
        self.last: Path | None = None
        """the folder of the last save that was begun"""

    def after(self, number: int, samples: int) -> None:
        """What is due after step `number`, when `samples` of the stream are used up. Every rank calls it."""
        config = self.job.config
        self._do(self.saver.poll)
        every = config.checkpoint.every
        if number == config.train.steps or (every and number % every == 0):
            self._do(self.saver.wait)
            self._do(lambda: self._save(number, samples))

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._do(lambda: self.saver.close(wait=kind is None))

    def _save(self, number: int, samples: int) -> None:
        config = configs.replaced(self.job.config, "checkpoint", resume=False)
        totals = {key: value if math.isfinite(value) else None for key, value in self._totals().items()}
        self.last = self.saver.save(
            number,
            state.pieces(self.job.step),
            config=configs.to_dict(config),
            data=self.job.corpus.train.header,
            samples=samples,
            state=state.counters(self.job.step) | totals,
        )

    def _do(self, action: Callable[[], Any]) -> None:
        """Do it, and where it could not be written, end the run or say so, as `checkpoint.on_error` has it."""
        try:
            action()
        except OSError as error:
            if self.job.config.checkpoint.on_error == "stop":
                raise
            self._note(f"{error}; the run goes on without it")
