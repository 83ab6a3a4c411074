"""What a person sees while a run goes on: one moving line on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm


class Progress:
    """The progress of `steps` steps, of which `begin` are behind. Only rank 0 makes one with `on=True`; the others' calls do
    nothing.

    On a terminal a tqdm line is redrawn every step; elsewhere every `every`-th step and the last one are printed whole.
    """

    def __init__(self, steps: int, *, begin: int = 0, every: int = 10, on: bool = True, stream: TextIO | None = None):
        self.steps, self.every, self.on = steps, every, on
        self.begin, self.stream = begin, stream or sys.stdout
        self._bar = None
        if on and self.stream.isatty():
            self._bar = tqdm(total=steps, initial=begin, file=self.stream, unit="step", dynamic_ncols=True)

    def step(self, row: dict[str, Any]) -> None:
        """Show a row of metrics.jsonl: step, loss, grad_norm, lr, tokens_per_s, mfu."""
        if not self.on:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(row), refresh=False)
            self._bar.update(row["step"] - self._bar.n)
        elif row["step"] % self.every == 0 or row["step"] in (self.begin + 1, self.steps):
            self._print(f"step {row['step']:>{len(str(self.steps))}}/{self.steps}  {_figures(row)}")

    def note(self, text: str) -> None:
        """A line that stays: an evaluation, a warning, the sample."""
        if not self.on:
            return
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            self._print(text)

    def close(self) -> None:
        """End the moving line."""
        if self._bar is not None:
            self._bar.close()

    def _print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


def _figures(row: dict[str, Any]) -> str:
    parts = []
    for key, text in (
        ("loss", "loss {:.4f}"),
        ("grad_norm", "grad norm {:.3f}"),
        ("lr", "lr {:.2e}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("mfu", "MFU {:.1%}"),
    ):
        if row.get(key) is not None:
            parts.append(text.format(row[key]))
    return "  ".join(parts)
