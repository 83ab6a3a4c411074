"""Generation: deterministic by seed, temperature and top-k mean what they say, the window slides."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from parity.harness import MODEL, config
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.model.transformer import Transformer, initialise
from minidist.parallel.pipeline.runtime import Pipeline
from minidist.train.build import runtime
from minidist.train.generate import generate, last_logits, pick


class Counting(nn.Module):
    """Most likely: the last id plus one, modulo 10; next likely: plus two. Notes the length of what it is shown."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, tokens):
        self.seen.append(tokens.shape[1])
        logits = torch.zeros(*tokens.shape, 10)
        logits.scatter_(2, (tokens[..., None] + 1) % 10, 5.0)
        logits.scatter_(2, (tokens[..., None] + 2) % 10, 4.0)
        return logits + self.bias


def test_the_seed_decides_and_nothing_else_does():
    draws = [generate(Counting(), [0], 50, context=8, seed=seed) for seed in (1, 1, 2)]
    torch.manual_seed(99)
    assert draws[0] == draws[1] == generate(Counting(), [0], 50, context=8, seed=1)
    assert draws[0] != draws[2]


def test_temperature_zero_takes_the_likeliest_and_top_k_draws_among_k():
    assert generate(Counting(), [7], 5, context=8, temperature=0) == [8, 9, 0, 1, 2]
    assert generate(Counting(), [7], 5, context=8, top_k=1, temperature=3) == [8, 9, 0, 1, 2]
    ids = [0, *generate(Counting(), [0], 300, context=8, top_k=2, temperature=2)]
    assert {(b - a) % 10 for a, b in pairwise(ids)} == {1, 2}


def test_temperature_is_a_divisor_of_the_logits():
    logits, count = torch.tensor([0.0, 1.0], dtype=torch.float64), 4000
    draw = torch.Generator().manual_seed(0)
    share = sum(int(pick(logits, 0.5, 0, draw)) for _ in range(count)) / count
    assert share == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.02)


def test_the_window_slides_and_padding_of_the_vocabulary_is_never_drawn():
    model = Counting()
    assert generate(model, [0, 1, 2], 6, context=4, temperature=0) == [3, 4, 5, 6, 7, 8]
    assert model.seen == [3, 4, 4, 4, 4, 4]
    assert max(generate(Counting(), [0], 200, context=4, temperature=9, vocab=6)) == 5


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt: empty"):
        generate(Counting(), [], 1, context=4)


def following(mesh, cfg):
    """Logits of what follows windows of 1 to 8 tokens."""
    zero = runtime(mesh, cfg)
    zero.model.eval()
    with torch.no_grad():
        return [last_logits(Pipeline(zero, mesh), torch.arange(1, size + 1)[None]) for size in range(1, 9)]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=4, sp=True), Layout(dp=2, tp=2, zero=3)], ids=str)
def test_a_model_that_is_cut_says_what_the_whole_one_says(layout):
    cfg = config(layout=layout, model=replace(MODEL, layers=2, vocab=47))
    model = Transformer(cfg.model).double()
    initialise(model, cfg.run.seed)
    for found in ranks.run(following, layout.world_size, cfg, layout=layout):
        for size, logits in enumerate(found, 1):
            expected = model(torch.arange(1, size + 1)[None])[:, -1:].detach()
            torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
