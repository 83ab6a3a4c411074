"""Tensor and sequence parallelism: what is cut where, what counts once, and what is sent."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from parity.harness import MODEL, SEQ_LEN, config
from torch import nn
from torch.autograd.profiler import record_function

from minidist import ranks
from minidist.core.layout import Layout
from minidist.core.slices import COPY, OWN, PAD, assemble, by_name
from minidist.core.work import Work
from minidist.data.batch import Batch
from minidist.model.loss import IGNORE
from minidist.model.loss import loss_sum as plain_loss
from minidist.model.transformer import Transformer, initialise
from minidist.parallel import tensor, vocabulary
from minidist.parallel.split import Later
from minidist.train.build import runtime
from minidist.train.step import Step

SMALL = replace(MODEL, layers=2, vocab=10)
SEQUENCE = [{}, {"sp": True}, {"sp": True, "sp_regather": False}]


def small(layout, **changes):
    return config(8, 4, layout, replace(SMALL, **changes))


# Parameters


def initial(mesh, cfg):
    return [(record, local.clone()) for record, local in runtime(mesh, cfg).weights()]


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"vocab": 3}, {"tied": True, "vocab": 11}], ids=str)
def test_initial_weights_do_not_depend_on_the_cut(changes):
    """C16, C23: bit for bit, row for row, whatever tp is."""
    expected = Transformer(replace(SMALL, **changes)).double()
    initialise(expected, 3)
    expected = dict(expected.named_parameters())
    for layout in (Layout(tp=2), Layout(tp=4), Layout(tp=4, sp=True), Layout(dp=2, tp=2, zero=3)):
        held = ranks.run(initial, layout.world_size, small(layout, **changes), layout=layout)
        owned = [(record, local) for rank, pieces in enumerate(held) for record, local in pieces if record.owner == rank]
        found = {name: assemble(pieces) for name, pieces in by_name(owned)}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], p) for name, p in expected.items())


def cut(mesh, cfg):
    with torch.device("meta"):
        model = Transformer(cfg.model)
    tensor.apply(model, mesh.group("tp"))
    return {name: (tuple(p.shape), p.slice) for name, p in model.named_parameters()}


def test_who_holds_what():
    """C40, C41: a kv head on two ranks counts once, an uneven vocabulary is filled up, and no head or pair is cut apart."""
    width, head = SMALL.width, SMALL.head_width
    for rank, held in enumerate(ranks.run(cut, 4, small(Layout(tp=4), kv_heads=2), layout=Layout(tp=4))):
        shape, record = held["blocks.1.attention.q.weight"]
        assert shape == (3 * head, width) and record.boxes[0].start == (rank * 3 * head, 0)
        shape, record = held["blocks.1.attention.k.weight"]
        (box,) = record.boxes
        assert shape == (head, width) and box.start == (rank // 2 * head, 0) and box.kind == (COPY if rank % 2 else OWN)
        shape, record = held["blocks.0.ffn.down.weight"]
        assert shape == (width, 24) and record.boxes[0].start == (0, rank * 24)
        shape, record = held["head.weight"]
        rows = {kind: sum(box.shape[0] for box in record.boxes if box.kind == kind) for kind in (OWN, PAD)}
        assert shape == (3, width) and rows == ({OWN: 3, PAD: 0} if rank < 3 else {OWN: 1, PAD: 2})
        assert held["norm.weight"][1].replicated == ("tp",)


@pytest.mark.parametrize(
    ("tp", "changes", "words"),
    [
        (3, {"kv_heads": 2}, "layout.tp = 3 does not divide model.kv_heads = 2: use tp = 1"),
        (2, {"ffn": 3}, "layout.tp = 2 does not divide model.ffn = 3: use tp = 1"),  # gate and up are not one matrix of 6 rows
        (8, {}, "layout.tp = 8 does not divide model.heads = 12"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_both_numbers(tp, changes, words):
    from minidist.train import config as configs

    with pytest.raises(ValueError, match=words):
        configs.check(small(Layout(tp=tp), **changes), tp)


# Layers


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)


def pair(mesh, sp, regather):
    """A column-cut and a row-cut layer with biases; output, and gradients of input and parameters, as this rank has them."""
    torch.manual_seed(0)
    group, layers = mesh.group("tp"), Pair().double()
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    for name in ("up", "gate"):
        tensor.cut_columns(getattr(layers, name), name, group)
    tensor.cut(layers.down, "weight", "down", 1, group)
    tensor.replicate(layers.down, "down", summed=sp)
    x = (x.chunk(group.size, 1)[group.rank] if sp else x).clone().requires_grad_()
    up, gate = tensor.columns(group, sp, regather, Later(), x, layers.up, layers.gate)
    out = tensor.row(layers.down, group, sp, Later(), up * gate)
    seen = out.detach().clone()
    (out**2).sum().backward()
    grads = [(p.slice, p.grad) for p in layers.parameters()]
    return seen, x.grad, grads, hasattr(layers.down.bias, "partial")


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("sp", "regather"), [(False, False), (True, True), (True, False)])
def test_a_pair_of_layers_with_biases(sp, regather, n):
    """C38: the bias of a row-cut layer counts once, forward and backward."""
    torch.manual_seed(0)
    layers, x = Pair().double(), torch.randn(2, 8, 6, dtype=torch.float64, requires_grad=True)
    out = layers.down(layers.up(x) * layers.gate(x))
    (out**2).sum().backward()
    results = ranks.run(pair, n, sp, regather, layout=Layout(tp=n))

    def whole(i):
        return torch.cat([result[i] for result in results], 1) if sp else results[0][i]

    torch.testing.assert_close(whole(0), out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole(1), x.grad, rtol=1e-12, atol=1e-12)
    grads = dict(layers.named_parameters())
    for name, pieces in by_name(piece for result in results for piece in result[2]):
        if name == "down.bias":
            total = sum(local for _, local in pieces) if sp else pieces[0][1]
            assert all(result[3] == sp for result in results), "under sp a bias sees some tokens only: it is marked"
        else:
            total = assemble(pieces)
        torch.testing.assert_close(total, grads[name].grad, rtol=1e-12, atol=1e-12)


# Vocabulary


def loss(mesh, logits, targets, vocab):
    group = mesh.group("tp")
    size = -(-vocab // group.size)
    padded = F.pad(logits, (0, size * group.size - vocab))
    mine = padded[..., group.rank * size : (group.rank + 1) * size].clone().requires_grad_()
    total = vocabulary.loss_sum(group, vocab, mine, targets)
    (3.0 * total).backward()
    return total.detach(), mine.grad


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("vocab", [3, 10, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_without_all_logits(dtype, vocab, n):
    """C41: also where a rank has no real column, targets are ignored, and logits are large."""
    torch.manual_seed(1)
    logits = (torch.randn(2, 5, vocab, dtype=torch.float64) * 30).to(dtype)
    targets = torch.randint(vocab, (2, 5))
    targets[0, 1:3] = IGNORE
    reference = logits.clone().requires_grad_()
    expected = plain_loss(reference, targets)
    (3.0 * expected).backward()
    results = ranks.run(loss, n, logits, targets, vocab, layout=Layout(tp=n))
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for total, _ in results:
        torch.testing.assert_close(total, expected.detach(), rtol=min(close, 1e-5), atol=0)
    grad = torch.cat([grad for _, grad in results], -1)
    torch.testing.assert_close(grad[..., :vocab], reference.grad, rtol=close, atol=close)
    assert not grad[..., vocab:].any(), "padding takes no gradient"


@pytest.mark.parametrize("n", [2, 4])
def test_padding_takes_no_probability(n):
    """C41: ten tokens alike cost ln 10 each, not ln 12."""
    results = ranks.run(loss, n, torch.zeros(1, 1, 10), torch.tensor([[7]]), 10, layout=Layout(tp=n))
    assert all(abs(total.item() - math.log(10)) < 1e-6 for total, _ in results)


# What is sent


def sent(mesh, cfg):
    """Bytes of activations of one step on two rows, and the collectives that carry hidden states, in order."""
    step = Step(runtime(mesh, cfg), mesh, cfg)
    step.run([Batch.empty(2, SEQ_LEN)])
    hidden = [(line.op, line.shape) for line in mesh.tape if line.tag == "act" and len(line.shape) == 3]
    return mesh.tape.sent(tag="act"), hidden


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sequence", SEQUENCE, ids=str)
def test_bytes_of_a_step(sequence, n):
    """In units of (n-1)/n X: a block 8, or 10 when gathered again; embedding 2, head 2 or 3; the loss 3 numbers a token."""
    cfg = small(Layout(tp=n, **sequence), vocab=12)
    again = bool(sequence) and sequence.get("sp_regather", True)
    hidden = 2 * SEQ_LEN * SMALL.width * 8
    units = SMALL.layers * (10 if again else 8) + 2 + (3 if again else 2)
    for found, ops in ranks.run(sent, n, cfg, layout=cfg.layout):
        assert found * n == (n - 1) * (units * hidden + 2 * 3 * 2 * SEQ_LEN * 8)
        if not sequence:
            assert len(ops) == 4 * SMALL.layers + 2, "four all-reduces a block, one for the embedding, one for the head"


def overlap(mesh, sp):
    """What runs between launch and end of the reduction of an input's gradient."""
    group, layer = mesh.group("tp"), nn.Linear(4, 4, bias=False)
    tensor.cut_columns(layer, "layer", group)
    x = torch.randn(2, 4 // (group.size if sp else 1), 4, requires_grad=True)
    (out,) = tensor.columns(group, sp, False, Later(), x, layer)
    seen = record_function("Work.wait")(Work.wait)
    with patch.object(Work, "wait", seen), torch.autograd.profiler.profile() as profile:
        out.sum().backward()
    calls = [event.name for event in sorted(profile.function_events, key=lambda event: event.time_range.start)]
    return calls


@pytest.mark.parametrize("sp", [False, True])
def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(sp):
    for calls in ranks.run(overlap, 2, sp, layout=Layout(tp=2)):
        launch = next(i for i, name in enumerate(calls) if "allreduce" in name or "reduce_scatter" in name)
        products = [i for i, name in enumerate(calls) if name in ("aten::mm", "aten::bmm", "aten::addmm")]
        assert products[0] < launch < products[-1] < calls.index("Work.wait")
