"""Evaluation: every held-out token once, over all ranks, divided once; no dependence on the cut into batches."""

import pytest
import torch
from torch import nn

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.data import Batch, TokenFile, validation_batches
from minidist.model.loss import loss_sum
from minidist.train.evaluate import Evaluation, evaluate


class Table(nn.Module):
    """Logits by a look-up: the smallest language model. Remembers in which mode it was called."""

    loss_sum = staticmethod(loss_sum)

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(8, 8)
        with torch.no_grad():
            self.logits.weight.copy_(torch.linspace(-2, 2, 64).reshape(8, 8).roll(3, 1))
        self.modes = set()

    def forward(self, tokens, positions=None, documents=None, dropout=None):
        self.modes.add(self.training)
        return self.logits(tokens)


@pytest.fixture
def tokens(tmp_path):
    ids = torch.randint(1, 8, (57,), generator=torch.Generator().manual_seed(0)).numpy()
    return TokenFile.build(tmp_path / "held", [ids[:20], ids[20:]], 8, 0)


def by_hand(tokens):
    ids = torch.from_numpy(tokens.array.astype("int64"))
    return loss_sum(Table()(ids[None, :-1]), ids[None, 1:]).item(), len(ids) - 1


def job(mesh, path, micro_batch):
    batches = validation_batches(TokenFile(path), 8, micro_batch, mesh.rank, mesh.world_size)
    return evaluate(Table(), batches, mesh)


@pytest.mark.parametrize("micro_batch", [1, 4, 50])
def test_one_rank_counts_every_token_once_however_it_is_batched(tokens, micro_batch):
    expected, count = by_hand(tokens)
    result = job(Mesh(Layout()), tokens.path, micro_batch)
    assert result.tokens == count == 59
    assert result.loss_sum == pytest.approx(expected, rel=1e-6)
    assert result.loss == pytest.approx(expected / count)


def test_three_ranks_and_more_ranks_than_windows_give_the_same(tokens):  # C10: no window twice, none left out
    expected, count = by_hand(tokens)
    results = ranks.run(job, 3, tokens.path, 5)
    assert all(result == results[0] for result in results)
    assert results[0].tokens == count and results[0].loss_sum == pytest.approx(expected, rel=1e-6)


def uneven(mesh):
    """Rank 0 holds 10 valid tokens and rank 1 two, with one all-reduce between them."""
    rows = Batch.empty(1, 10)
    rows.targets[0, : (10, 2)[mesh.rank]] = 3
    result = evaluate(Table(), [rows], mesh)
    return result, mesh.tape.calls(op="all_reduce")


def test_ranks_with_unlike_counts_weigh_by_tokens(tokens):  # C35
    (result, calls), other = ranks.run(uneven, 2)
    one = -Table().logits.weight[0].log_softmax(0)[3].item()
    assert result.tokens == 12 and result.loss == pytest.approx(one)
    assert calls == 1 and other[0] == result


def test_no_valid_token_gives_a_defined_result():  # C35
    for batches in ([], [Batch.empty(2, 5)]):
        result = evaluate(Table(), batches, Mesh(Layout()))
        assert (result.loss, result.perplexity, result.tokens) == (None, None, 0)
        assert str(result) == "no valid token, so no loss"


def test_dropout_is_off_during_and_back_on_after(tokens):
    model = Table().train()
    evaluate(model, validation_batches(tokens, 5, 4), Mesh(Layout()))
    assert model.modes == {False} and model.training


def test_it_reads_like_a_sentence():
    assert str(Evaluation(16.0, 12)) == "loss 1.3333 nats a token, perplexity 3.794, 12 tokens"
