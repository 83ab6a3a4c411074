"""Stage 0 trains like one process: float64 and SGD, loss, every gradient and every weight, to 1e-10."""

from dataclasses import replace

import pytest
from parity.harness import MODEL, config, on_ranks, one_process, token_file, whole, worst

from minidist import ranks
from minidist.core.layout import Layout

BOUND = 1e-10


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_file(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def reference(tokens):
    """One process's run per configuration, made once."""
    made = {}

    def run(cfg):
        key = (cfg.model, cfg.train.global_batch)
        if key not in made:
            made[key] = one_process(cfg, tokens)
        return made[key]

    return run


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
def test_like_one_process(n, global_batch, micro_batch, tokens, reference):
    cfg = config(global_batch, micro_batch, Layout(dp=n))
    _compare(cfg, n, tokens, reference)


@pytest.mark.parametrize("n", [1, 3])
def test_tied_embeddings(n, tokens, reference):
    _compare(config(24, 4, Layout(dp=n), replace(MODEL, tied=True)), n, tokens, reference)


def _compare(cfg, n, tokens, reference):
    expected = reference(cfg)
    results = ranks.run(on_ranks, n, cfg, str(tokens.path))
    for losses, _, _ in results:
        assert losses == pytest.approx(expected.losses, rel=BOUND)
    assert worst(whole(results, 1), expected.grads) < BOUND
    assert worst(whole(results, 2), expected.weights) < BOUND
