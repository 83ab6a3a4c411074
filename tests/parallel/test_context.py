"""Context parallelism: each way to see the whole sequence against one process, what it sends, and what it must not confuse."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minidist import ranks
from minidist.core import comm
from minidist.core.layout import Layout
from minidist.core.links import Delay, Link
from minidist.core.mesh import Group, Mesh
from minidist.data.batch import Batch
from minidist.model.attention import attend
from minidist.model.config import ModelConfig
from minidist.model.loss import IGNORE, loss_sum
from minidist.model.transformer import Transformer, initialise
from minidist.parallel import context
from minidist.parallel import ring as ring_file
from minidist.parallel.context import ATTENTION, expect_heads, shard
from minidist.parallel.zigzag import piece, score_pairs, seen

B, H, S, K = 2, 12, 24, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11 + [2] * 8, [0] * 1 + [1] * 21 + [2] * 2])  # they cross the cuts of all n
WAYS = pytest.mark.parametrize("how", ATTENTION)


def inputs(kv_heads, dtype=torch.float64):
    """q, k, v and the gradient of the output, whole."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(B, heads, S, K, generator=draw, dtype=torch.float64).to(dtype) for heads in (H, kv_heads, kv_heads, H)]


def cut(x, group, how):
    """This rank's places of x (B,H,S,K)."""
    return piece(x.mT, group.size, group.rank, how != "ulysses").mT.contiguous()


def joined(pieces, how):
    """The whole of what the ranks hold of it, (B,H,S,K)."""
    n = len(pieces)
    places = torch.cat([piece(torch.arange(S), n, rank, how != "ulysses") for rank in range(n)])
    return torch.cat(pieces, 2)[:, :, places.argsort()]


def on_a_part(mesh, how, whole, documents, late=False):
    """The program of a rank: out, dq, dk and dv of its places."""
    group = mesh.group("cp")
    mesh.delay = Delay(Link()) if late else None
    *parts, grad = (cut(x, group, how) for x in whole)
    parts = [x.requires_grad_() for x in parts]
    out, lse = ATTENTION[how](*parts, documents, group=group)
    assert lse is None
    out.backward(grad)
    return [out.detach(), *(x.grad for x in parts)]


def in_one_process(whole, documents):
    """The same of all places, by torch's own."""
    parts, grad = [x.clone().requires_grad_() for x in whole[:3]], whole[3]
    out, _ = attend(*parts, documents)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in parts)]


def worst(got, want):
    """max|a-b| / max|b| over the tensors."""
    assert [x.shape for x in got] == [x.shape for x in want]
    return max(((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in zip(got, want, strict=True))


def on_ranks(n, how, whole, documents, **kwargs):
    """The whole output and gradients from n ranks."""
    results = ranks.run(on_a_part, n, how, whole, documents, layout=Layout(cp=n), **kwargs)
    return [joined(pieces, how) for pieces in zip(*results, strict=True)]


@WAYS
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "packed"])
@pytest.mark.parametrize("kv_heads", [12, 4, 2], ids="kv heads {}".format)
def test_output_and_gradients_are_those_of_one_process(how, n, documents, kv_heads):
    whole = inputs(kv_heads)
    assert worst(on_ranks(n, how, whole, documents), in_one_process(whole, documents)) < 1e-12


@WAYS
@pytest.mark.parametrize("n", [2, 3])
def test_what_is_not_waited_for_is_not_there(how, n):
    """No wait is missing: links that bring nothing home before it is waited for."""
    whole = inputs(4)
    assert worst(on_ranks(n, how, whole, DOCUMENTS, late=True), in_one_process(whole, DOCUMENTS)) < 1e-12


@WAYS
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_in_the_precisions_of_training(how, dtype, bound):
    whole = inputs(4, dtype)
    got = on_ranks(3, how, whole, DOCUMENTS)
    assert all(x.dtype == dtype for x in got)
    assert worst(got, in_one_process([x.double() for x in whole], DOCUMENTS)) < bound


# What is sent


def sent(mesh, how, whole):
    """Bytes that this rank sent in forward, in forward and backward, and operations in each."""
    group, counts = mesh.group("cp"), []
    *parts, grad = (cut(x, group, how) for x in whole)
    mesh.tape.clear()
    out, _ = ATTENTION[how](*(x.requires_grad_() for x in parts), DOCUMENTS, group=group)
    counts += [mesh.tape.sent("act"), mesh.tape.calls("act")]
    out.backward(grad)
    return [*counts, mesh.tape.sent(), mesh.tape.calls()]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_are_those_of_the_closed_forms(n, dtype):
    """Also that documents cost nothing, and that key heads travel once, not once for each query head."""
    e, w, G = dtype.itemsize, max(dtype.itemsize, 4), 2
    whole = inputs(G, dtype)
    kv = 2 * B * G * (S // n) * K
    ring = (n - 1) * kv * e, 2 * (n - 1), (n - 1) * kv * (2 * e + w), 6 * (n - 1)
    gather = (n - 1) * kv * e, 1, (n - 1) * kv * (e + w), 2
    once = B * S // n * K * e * (2 * H + 2 * math.lcm(G, n)) * (n - 1) // n
    for how, expected in {"ring": ring, "gather": gather, "ulysses": (once, 2, 2 * once, 4)}.items():
        for seen_by_rank in ranks.run(sent, n, how, whole, layout=Layout(cp=n)):
            assert seen_by_rank == list(expected), how


def kept(mesh, how, whole):
    """Bytes that backward keeps, each storage once."""
    group, storages = mesh.group("cp"), {}

    def pack(x):
        storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    *parts, _ = (cut(x, group, how) for x in whole)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ATTENTION[how](*(x.requires_grad_() for x in parts), group=group)
    return sum(storages.values())


def test_the_ring_keeps_its_own_keys_and_gather_those_of_all():
    whole, n, G = inputs(2), 4, 2
    queries, kv = 8 * B * (S // n) * H * (2 * K + 1), 8 * 2 * B * G * (S // n) * K  # q, out and lse; k and v
    for how, expected in (("ring", queries + kv), ("gather", queries + n * kv)):
        assert ranks.run(kept, n, how, whole, layout=Layout(cp=n)) == [expected] * n


def launched(mesh, whole):
    """Lines of the tape that were there when work on each block began, in forward and in backward, and in the end."""
    group, begun = mesh.group("cp"), []

    def watched(work):
        def run(*args, **kwargs):
            begun.append(len(mesh.tape))
            return work(*args, **kwargs)

        return run

    names = {name: watched(getattr(ring_file, name)) for name in ("attend", "attend_backward")}
    *parts, grad = (cut(x, group, "ring") for x in whole)
    mesh.tape.clear()
    with patch.multiple(ring_file, **names):
        out, _ = ATTENTION["ring"](*(x.requires_grad_() for x in parts), group=group)
        out.backward(grad)
    return begun, len(mesh.tape)


def test_the_next_block_is_on_its_way_before_work_on_this_one_begins():
    """A send and a receipt for each hop: those of the next keys, and in backward of the gradients for this block too."""
    for begun, total in ranks.run(launched, 4, inputs(4), layout=Layout(cp=4)):
        assert begun == [2, 4, 6, 6, *(6 + 2, 6 + 4, 6 + 8, 6 + 10)]
        assert total == 6 + 12  # the last hop of gradients has nothing left to hide behind


# Who sees what


def batch(valid=None):
    """Two rows of 24 tokens with documents; the first `valid` of each row's targets count, default all."""
    windows = np.random.default_rng(0).integers(1, 32, (2, S + 1))
    windows[0, [6, 15]] = windows[1, [2, 3]] = 0  # separators
    whole = Batch.of(windows, np.arange(2), separator=0)
    for row, count in enumerate(valid or ()):
        whole.targets[row, count:] = IGNORE
    return whole


def test_targets_are_shifted_before_the_cut():
    """C42."""
    whole = Batch.of(np.arange(9)[None], np.arange(1), separator=None)
    whole.targets[0, 7] = IGNORE  # the window ends here
    parts = [shard(whole, group, "ring") for group in alone(2)]
    assert [part.tokens[0].tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.targets[0].tolist() for part in parts] == [[1, 2, 7, IGNORE], [3, 4, 5, 6]]
    parts = [shard(whole, group, "ulysses") for group in alone(2)]
    assert [part.targets[0].tolist() for part in parts] == [[1, 2, 3, 4], [5, 6, 7, IGNORE]]


def alone(n):
    """The cp group as each of n ranks sees it, in one process: for what sends nothing."""
    return [Group("cp", tuple(range(n)), rank, Mesh(Layout()).wire) for rank in range(n)]


def test_a_shard_is_cut_alike_and_knows_where_it_is():
    whole = batch()
    for n in (2, 3, 4):
        for how in ATTENTION:
            parts = [shard(whole, group, how) for group in alone(n)]
            assert torch.cat([part.index for part in parts]).sort().values.equal(whole.index)
            for part in parts:
                for name in ("tokens", "targets", "positions"):
                    assert getattr(part, name).equal(getattr(whole, name)[:, part.index]), name
                assert part.documents.equal(whole.documents) and part.samples.equal(whole.samples)
    assert shard(whole, alone(1)[0]) is whole
    with pytest.raises(ValueError, match="24 places do not divide into 10 chunks for 5 ranks: use a multiple of 10"):
        shard(whole, alone(5)[0])


MODEL = ModelConfig(layers=2, width=24, heads=12, kv_heads=4, ffn=24, vocab=32)


def model(group=None, how="ring"):
    """The plain model in float64, its attention replaced where there is a group."""
    made = Transformer(MODEL).double()
    initialise(made, 0)
    if group:
        context.apply(made, group, how)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter *= 10 if "attention" in name and "norm" not in name else 1  # scores that tell tokens apart
    return made


def logits_of(mesh, how, batches):
    """Logits (2,S/n,V) of this rank's places, by batch."""
    group = mesh.group("cp")
    made, parts = model(group, how), [shard(one, group, how) for one in batches]
    with torch.no_grad():
        return [made(part.tokens, part.positions, part.documents) for part in parts]


def changed(whole, row, place):
    """The same batch with another token there."""
    other = Batch(**{name: x.clone() for name, x in vars(whole).items()})
    other.tokens[row, place] = other.tokens[row, place] % 31 + 1
    return other


@WAYS
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_token_changes_later_rows_of_its_own_document_only(how, n):
    """C43 and C44: logits are those of one process, also after a change of one token, early or late; and who sees it."""
    whole = batch()
    batches = [whole, changed(whole, 0, 7), changed(whole, 0, 22), changed(whole, 1, 12)]
    results = ranks.run(logits_of, n, how, batches, layout=Layout(cp=n))
    first, *others = (joined([x[:, None] for x in pieces], how)[:, 0] for pieces in zip(*results, strict=True))
    plain = model()
    with torch.no_grad():
        for one, got in zip(batches, (first, *others), strict=True):
            want = plain(one.tokens, one.positions, one.documents)
            assert worst([got], [want]) < 1e-12
    for other, row, rows in zip(others, (0, 0, 1), (range(7, 15), range(22, 24), range(12, 24)), strict=True):
        differs = (first - other).abs().amax(-1) > 1e-9
        assert differs[row].nonzero()[:, 0].tolist() == list(rows) and not differs[1 - row].any()


# Equal work


def test_zigzag_is_equal_work():
    """C45."""
    assert score_pairs(16, 4, zigzag=False) == [10, 26, 42, 58]
    assert score_pairs(16, 4) == [34] * 4
    assert sum(score_pairs(24, 3)) == 24 * 25 // 2


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_blocks_hold_every_pair_once_and_no_other(n):
    """What `seen` says of every pair of ranks is the causal mask of the whole, and is as much work as `score_pairs` says."""
    found, work = torch.zeros(S, S, dtype=torch.int64), [0] * n
    for mine in range(n):
        for other in range(n):
            queries, keys, causal = seen(mine, other, S // n)
            rows, columns = piece(torch.arange(S), n, mine)[queries], piece(torch.arange(S), n, other)[keys]
            mask = torch.ones(len(rows), len(columns), dtype=torch.int64)
            mask = mask.tril() if causal else mask
            found[rows[:, None], columns] += mask
            work[mine] += int(mask.sum())
    assert found.equal(torch.ones(S, S, dtype=torch.int64).tril()) and work == score_pairs(S, n)


# Sums


def gradients(mesh, how, whole):
    """This rank's valid targets, the loss and gradients of its part, summed over the group."""
    group = mesh.group("cp")
    made, part = model(group, how), shard(whole, group, how)
    loss = loss_sum(made(part.tokens, part.positions, part.documents), part.targets) / whole.valid
    loss.backward()
    sums = [comm.all_reduce(x, group) for x in (loss.detach(), *(p.grad for p in made.parameters()))]
    return part.valid, sums


@WAYS
@pytest.mark.parametrize("n", [2, 3])
def test_loss_and_gradients_are_sums_whatever_the_share_of_targets(how, n):
    """C46: the ratio is 1, not n or 1/n, though the parts have unequally many valid targets."""
    whole, plain = batch(valid=(5, 20)), model()
    results = ranks.run(gradients, n, how, whole, layout=Layout(cp=n))
    assert len({valid for valid, _ in results}) > 1 and sum(valid for valid, _ in results) == 25
    loss = loss_sum(plain(whole.tokens, whole.positions, whole.documents), whole.targets) / 25
    loss.backward()
    for _, sums in results:
        for got, want in zip(sums, (loss.detach(), *(p.grad for p in plain.parameters())), strict=True):
            assert (got - want).norm() <= 1e-12 * want.norm()
            assert (got.norm() / want.norm()).item() == pytest.approx(1, abs=1e-12)


# Refusals


def test_heads_that_cannot_be_shared_are_refused_with_the_numbers():
    """C40: fewer key heads than ranks are sent several times, fewer query heads are refused."""
    for how in ATTENTION:
        expect_heads(how, cp=4, heads=12)
    expect_heads("ring", cp=4, heads=6)
    with pytest.raises(ValueError, match=r"model.heads = 12 over cp x tp = 4 x 2 = 8 ranks.* multiple of 8 heads"):
        expect_heads("ulysses", cp=4, heads=12, tp=2)


def test_one_rank_keeps_plain_attention():
    made = model(alone(1)[0])
    assert all(block.attention.attend is attend for block in made.blocks)
