"""The sample stream: sample i of a run is a function of (seed, i), whatever the layout and wherever a run was resumed."""

from __future__ import annotations

import numpy as np

from minidist.core.random import permute
from minidist.data.tokens import TokenFile


class Windows:
    """Fixed windows of seq_len + 1 tokens; the stream is one keyed permutation of them after another, end to end.

    Neighbouring windows share one token (the last target of one is the first input of the next), so every token of the
    file is predicted at most once an epoch. The up to seq_len - 1 tokens after the last whole window are never used.
    """

    def __init__(self, tokens: TokenFile, seq_len: int, seed: int):
        if seq_len < 1:
            raise ValueError(f"train.seq_len={seq_len}: must be at least 1")
        if len(tokens) < seq_len + 1:
            raise ValueError(
                f"{tokens.path}: {len(tokens)} tokens are fewer than one sequence of train.seq_len={seq_len} + 1; "
                f"use train.seq_len<={max(len(tokens) - 1, 1)}, or more text"
            )
        self.tokens, self.seq_len, self.seed = tokens, seq_len, seed

    def __len__(self) -> int:
        """Windows in an epoch."""
        return (len(self.tokens) - 1) // self.seq_len

    def ids(self, index: np.ndarray) -> np.ndarray:
        """Sample ids (which window of the file) at places `index` (n,) of the stream."""
        epochs, within = np.divmod(np.asarray(index, np.int64), len(self))
        out = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():  # the seed and the epoch both name the order (C11)
            here = epochs == epoch
            out[here] = permute(within[here], len(self), ("epoch", self.seed, epoch))
        return out

    def sample(self, index: int) -> tuple[int, np.ndarray]:
        """(sample id, tokens (seq_len + 1,)) at place `index` of the stream."""
        ids = self.ids(np.array([index]))
        return int(ids[0]), self.read(ids)[0]

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Tokens (n, seq_len + 1) of the windows `ids` (n,), in the file's dtype."""
        return self.tokens.array[np.asarray(ids)[:, None] * self.seq_len + np.arange(self.seq_len + 1)]
