"""Micro-batches, and which samples of a step go into which of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minidist.model.loss import IGNORE


@dataclass(frozen=True)
class Batch:
    """One micro-batch: int64 tensors, B windows of S tokens.

    tokens (B,S); targets (B,S), the token after each, or IGNORE; positions (B,S), counted from the start of the document;
    documents (B,S), the number of the document within the row, or None when no row holds a piece of a second one (the
    plain causal mask is right then, and faster); samples (B,), the ids of the windows; index (S,), places in the window.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor | None
    samples: Tensor
    index: Tensor

    @classmethod
    def of(cls, windows: np.ndarray, samples: np.ndarray, separator: int | None) -> Batch:
        """From windows (B,S+1) of token ids. A document begins with its separator, at position 0."""
        tokens = torch.from_numpy(windows.astype(np.int64))
        inputs = tokens[:, :-1].contiguous()
        targets = tokens[:, 1:].clone(memory_format=torch.contiguous_format)  # one row is contiguous as it is: never share
        index = torch.arange(inputs.shape[1])
        begins = torch.zeros_like(inputs, dtype=torch.bool) if separator is None else inputs == separator
        documents, positions = None, index.expand_as(inputs)
        if begins[:, 1:].any():  # a separator in column 0 begins the row's only document
            documents = begins.cumsum(1)
            positions = index - torch.where(begins, index, 0).cummax(1).values
        return cls(inputs, targets, positions.contiguous(), documents, torch.from_numpy(samples.astype(np.int64)), index)

    @classmethod
    def empty(cls, rows: int, seq_len: int) -> Batch:
        """A micro-batch in which no target counts, for a rank that must take part but has no sample left."""
        index = torch.arange(seq_len)
        tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
        samples = torch.full((rows,), -1)
        return cls(tokens, torch.full_like(tokens, IGNORE), index.repeat(rows, 1), None, samples, index)

    def to(self, device: torch.device | str) -> Batch:
        """The same on `device`."""
        return Batch(**{name: None if x is None else x.to(device) for name, x in vars(self).items()})

    def rows(self, a: int, b: int) -> Batch:
        """Rows a..b-1."""
        cut = {name: x[a:b] for name, x in vars(self).items() if x is not None and name != "index"}
        return replace(self, **cut)

    @property
    def valid(self) -> int:
        """Targets that count. Read it before `.to(device)`: on the CPU it costs no synchronisation."""
        return int((self.targets != IGNORE).sum())


def shares(global_batch: int, dp: int) -> list[int]:
    """Samples of a step for each of dp ranks: sizes that differ by at most one, the larger ones first."""
    if global_batch < dp:
        raise ValueError(
            f"train.global_batch={global_batch} is smaller than dp={dp}: some ranks would have no sample; "
            f"use train.global_batch>={dp}, or layout.dp<={max(global_batch, 1)}"
        )
    return [global_batch // dp + (rank < global_batch % dp) for rank in range(dp)]


def micro_batches(step: int, dp_rank: int, dp: int, global_batch: int, micro_batch: int) -> list[range]:
    """Stream indices of each micro-batch of one optimizer step, on one rank.

    A step takes the next `global_batch` indices of the stream, a rank a consecutive share of them, so the set of samples
    in a step does not depend on dp. Every rank gets equally many micro-batches, of at most `micro_batch` samples; the
    last ranges are empty on a rank with fewer samples (C09).
    """
    return split(step * global_batch, dp_rank, dp, global_batch, micro_batch)


def split(position: int, dp_rank: int, dp: int, global_batch: int, micro_batch: int) -> list[range]:
    """`micro_batches` for the step that begins at sample `position` of the stream."""
    if micro_batch < 1:
        raise ValueError(f"train.micro_batch={micro_batch}: must be at least 1")
    sizes = shares(global_batch, dp)
    start = position + sum(sizes[:dp_rank])
    stop = start + sizes[dp_rank]
    count = -(-sizes[0] // micro_batch)  # rank 0 has the largest share
    edges = [min(start + i * micro_batch, stop) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(edges)]
