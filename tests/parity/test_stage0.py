"""Stage 0 trains like one process: float64 and SGD, loss, every gradient and every weight, to 1e-10."""

from dataclasses import replace

import pytest
from parity.harness import MODEL, compare, config

from minidist.core.layout import Layout


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("global_batch", "micro_batch"),
    [
        (24, 24),  # one micro-batch a rank
        (24, 3),  # accumulation that divides
        (26, 5),  # neither the batch nor the micro-batch divides: at n = 4 shares are 7, 7, 6, 6 in pieces of 5
        (5, 2),  # at n = 4 shares are 2, 1, 1, 1
        (9, 2),  # at n = 4 rank 0 runs two micro-batches and the others an empty one
    ],
)
def test_like_one_process(n, global_batch, micro_batch, reference):
    compare(config(global_batch, micro_batch, Layout(dp=n)), reference)


@pytest.mark.parametrize("n", [1, 3])
def test_tied_embeddings(n, reference):
    compare(config(24, 4, Layout(dp=n), replace(MODEL, tied=True)), reference)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("bucket", [0, 1])
def test_buckets(bucket, n, reference):
    """Every block alone, and some together (1 MiB); all together is the default."""
    compare(config(26, 5, Layout(dp=n, bucket=bucket)), reference)
