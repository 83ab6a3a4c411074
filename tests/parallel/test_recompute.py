"""Recompute and offload: the same gradients bit for bit, the bytes that the formulas say, every block run exactly twice."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist import ranks
from minidist.core.random import DropoutKey
from minidist.model.attention import plain
from minidist.model.config import ModelConfig
from minidist.model.loss import loss_sum
from minidist.model.transformer import Transformer, initialise, rotary
from minidist.parallel import recompute
from minidist.parallel.recompute import Parked, Recompute, apply, repeated, rerunning
from minidist.parallel.zero import Zero

B, S, L = 2, 16, 5
CFG = ModelConfig(layers=L, width=48, heads=6, kv_heads=2, ffn=120, vocab=40, dropout=0.5)
HIDDEN = B * S * CFG.width  # elements of a hidden state
ATTENTION, BLOCKS = Recompute("selective"), Recompute("selective", "blocks", 2)
MODES = {"none": Recompute(), "full": Recompute("full"), "attention": ATTENTION, "blocks": BLOCKS}
BY_MODE = pytest.mark.parametrize("mode", MODES)
BY_OFFLOAD = pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])


def model_of(settings: Recompute = MODES["none"], dtype=torch.float64, cfg: ModelConfig = CFG) -> Transformer:
    model = Transformer(cfg).to(dtype)
    initialise(model, 3)
    apply(model, settings)
    return model


def inputs(micro_batch: int = 0) -> dict:
    draw = torch.Generator().manual_seed(micro_batch)
    tokens = torch.randint(0, CFG.vocab, (B, S), generator=draw)
    samples = torch.arange(B) + micro_batch * B
    documents = torch.randint(0, 2, (B, S), generator=draw).cumsum(1)
    return {"tokens": tokens, "documents": documents, "dropout": DropoutKey(7, 0, samples, torch.arange(S))}


def train(model: Transformer, micro_batches: int = 2) -> tuple[list, dict]:
    """Losses, and gradients added up over all micro-batches, whose forwards all come before the first backward."""
    losses = [loss_sum(model(**inputs(m)), inputs(m)["tokens"].roll(-1, 1)) for m in range(micro_batches)]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(a: tuple[list, dict], b: tuple[list, dict]) -> bool:
    equal = all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    return equal and a[1].keys() == b[1].keys() and all(torch.equal(a[1][name], b[1][name]) for name in b[1])


def with_offload(settings: Recompute, offload: bool) -> Recompute:
    return Recompute(settings.mode, settings.select, settings.every, offload)


# Gradients


@BY_OFFLOAD
@BY_MODE
def test_gradients_are_equal_bit_for_bit_with_dropout(mode, offload):
    """C15: over two micro-batches in flight; torch's generator ends where it ends without recompute."""
    torch.manual_seed(0)
    expected, state = train(model_of()), torch.get_rng_state()
    torch.manual_seed(0)
    assert same(train(model_of(with_offload(MODES[mode], offload))), expected)
    assert torch.equal(torch.get_rng_state(), state)


@BY_OFFLOAD
def test_frozen_parts_and_an_input_that_needs_no_gradient(offload):
    def frozen(settings: Recompute) -> Transformer:
        model = model_of(settings)
        for parameter in (
            *model.embedding.parameters(),
            *model.blocks[1].parameters(),
            *model.blocks[0].attention.parameters(),
        ):
            parameter.requires_grad_(False)
        return model

    expected = train(frozen(Recompute()))
    assert len(expected[1]) == 9 * L + 3 - 1 - 9 - 4
    for settings in MODES.values():
        assert same(train(frozen(with_offload(settings, offload))), expected)


@BY_OFFLOAD
def test_a_block_called_twice_and_a_graph_used_twice(offload):
    def twice(settings: Recompute) -> tuple[list, dict]:
        model = model_of(settings)
        model.blocks.append(model.blocks[0])
        loss = loss_sum(model(**inputs()), inputs()["tokens"])
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss.detach()], {name: p.grad for name, p in model.named_parameters()}

    expected = twice(Recompute())
    assert all(same(twice(with_offload(settings, offload)), expected) for settings in MODES.values())


class Foreign(nn.Module):
    """A block of another make, whose dropout draws from torch's generator."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x).tanh(), 0.5)


def test_a_foreign_dropout_draws_the_same_mask_again():
    """C15 for what is not ours: the generator's state is put back for the re-run, and forward again."""
    results = []
    for settings in (Recompute(), Recompute("full"), Recompute("full", offload=True)):
        torch.manual_seed(1)
        model = nn.Module()
        model.blocks = nn.ModuleList([Foreign(), Foreign()])
        apply(model, settings)
        x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
        y = model.blocks[1](model.blocks[0](x)).sum()
        y.backward()
        results.append(([y.detach(), torch.get_rng_state()], {"x": x.grad, "w": model.blocks[0].linear.weight.grad}))
    assert same(results[1], results[0]) and same(results[2], results[0])


def test_a_copy_of_the_model_runs_its_own_weights():
    model = model_of(Recompute("full", offload=True))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(train(other), train(model_of()))
    assert list(other.state_dict()) == list(model_of().state_dict())


# Forwards


def runs_of(model: Transformer) -> dict[str, list[bool]]:
    """Every run of every block and attention core from here on: whether it was a re-run."""
    runs: dict[str, list[bool]] = {}

    def counting(name: str, function):
        def counted(*args, **kwargs):
            runs.setdefault(name, []).append(rerunning())
            return function(*args, **kwargs)

        return counted

    for k, block in enumerate(model.blocks):
        block.attention_norm.register_forward_pre_hook(lambda *_, k=k: runs.setdefault(f"block {k}", []).append(rerunning()))
        block.attention.attend = counting(f"core {k}", block.attention.attend)
    model.head.register_forward_pre_hook(lambda *_: runs.setdefault("head", []).append(rerunning()))
    return runs


@BY_OFFLOAD
@BY_MODE
def test_what_is_recomputed_runs_twice_and_all_else_once(mode, offload):
    model = model_of()
    runs = runs_of(model)
    apply(model, with_offload(MODES[mode], offload))
    train(model, micro_batches=1)
    once, twice = [False], [False, True]
    blocks = {"none": [], "full": range(L), "attention": [], "blocks": (0, 2, 4)}[mode]
    assert runs["head"] == once
    for k in range(L):
        assert runs[f"block {k}"] == (twice if k in blocks else once)
        assert runs[f"core {k}"] == (twice if k in blocks or mode == "attention" else once)
    assert not rerunning()


@BY_MODE
def test_without_gradients_nothing_is_kept_or_repeated(mode, monkeypatch):
    monkeypatch.setattr(recompute, "checkpoint", None)
    monkeypatch.setattr(recompute, "Parked", None)
    with torch.no_grad():
        assert torch.equal(model_of(with_offload(MODES[mode], True))(**inputs()), model_of()(**inputs()))


def test_hooks_on_a_block_are_not_repeated_and_the_weights_they_bring_serve_the_rerun():
    """As at stage 3: weights have memory from before a block to after it, and from its output's gradient on."""
    expected, model = train(model_of(), 1), model_of(Recompute("full"))
    calls = []

    def free(block):
        for weight in block.parameters():
            weight.kept = weight.kept if hasattr(weight, "kept") else weight.detach().clone()
            weight.untyped_storage().resize_(0)

    def gather(block, when):
        calls.append(when)
        for weight in block.parameters():
            weight.untyped_storage().resize_(weight.kept.untyped_storage().nbytes())
            weight.data.copy_(weight.kept)

    def after(block, args, out):
        free(block)
        out.register_hook(lambda grad: gather(block, "backward"))

    for block in model.blocks:
        free(block)
        block.register_forward_pre_hook(lambda block, args: gather(block, "forward"))
        block.register_forward_hook(after)
    assert same(train(model, 1), expected)
    assert calls == ["forward"] * L + ["backward"] * L


def sharded(mesh, many: list[Recompute]) -> list:
    return [sharded_step(mesh, settings) for settings in many]


def sharded_step(mesh, settings: Recompute):
    """A step of two micro-batches at ZeRO stage 3: losses, this rank's gradients, and what its gathers sent."""
    zero = Zero(model_of(settings), mesh.group("dp_cp"), stage=3)
    mesh.tape.clear()
    zero.start_step()
    losses = []
    for m in range(2):
        zero.before_backward(last=m == 1)
        given = inputs(2 * mesh.rank + m)
        losses.append(loss_sum(zero.model(**given), given["tokens"]))
        losses[-1].backward()
    zero.finish()
    grads = {record.name: grad.clone() for record, grad in zero.gradients()}
    return ([loss.detach() for loss in losses], grads), mesh.tape.calls(tag="weight"), mesh.tape.sent(tag="weight")


def test_at_stage_3_one_gather_serves_rerun_and_backward():
    """Gathers are those of a run without recompute, in number and bytes, and so are the gradients."""
    every = [*MODES.values(), Recompute("full", offload=True), Recompute(offload=True)]
    for without, *others in ranks.run(sharded, 2, every):
        for one in others:
            assert same(one[0], without[0]) and one[1:] == without[1:]


def test_an_error_in_a_rerun_leaves_no_trace():
    def fails(x):
        if rerunning():
            raise ArithmeticError
        return x.sin()

    y = repeated(fails, torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(ArithmeticError):
        y.backward()
    assert not rerunning()


# Bytes


class Live(TorchDispatchMode):
    """Bytes of all memory that operations have made and that is still held; `at_next` notes them as the next one starts."""

    def __init__(self):
        super().__init__()
        self.known: dict[int, weakref.ref] = {}
        self.held, self.noted, self.at_next = {}, [], False

    def bytes(self) -> int:
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        return sum(size for _, size in self.held.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        from torch.multiprocessing.reductions import StorageWeakRef

        if self.at_next:
            self.at_next = False
            self.noted.append(self.bytes())
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self.held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out


def inner(e: int, documents: bool) -> int:
    """`i` of recompute.py: what one block keeps."""
    d, hk, gk, w = CFG.width, CFG.heads * CFG.head_width, CFG.kv_heads * CFG.head_width, max(e, 4)
    own = B * S * (w * (4 * d + 2 + CFG.heads) + e * (2 * d + 2 * hk + 2 * gk + 4 * CFG.ffn))
    return own + 2 * HIDDEN + e * B * S * S * documents


def core(e: int, documents: bool) -> int:
    """What the fused core of one block keeps beyond its input and output."""
    return B * S * max(e, 4) * CFG.heads + e * B * S * S * documents


def kept(mode: str, e: int, documents: bool) -> int:
    """What all blocks keep after forward, by recompute.py's table."""
    own, x, r = inner(e, documents), HIDDEN * e, -(-L // 2)
    attention = L * (own - core(e, documents))
    return {"none": L * own, "full": L * x, "blocks": r * x + (L - r) * own, "attention": attention}[mode]


def body(model: Transformer, e: torch.dtype, documents: bool):
    """A hidden state that needs a gradient, and the other arguments of the blocks."""
    given = inputs()
    x = model.embedding(given["tokens"]).detach().requires_grad_()
    rope = rotary(torch.arange(S), CFG.head_width, CFG.rope_theta, e)
    return x, (rope, given["documents"] if documents else None, given["dropout"])


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@BY_MODE
def test_bytes_kept_after_forward_and_in_backward(mode, dtype, documents, monkeypatch):
    """By the memory that is really held: after forward, and as much more as a re-run leaves for the backward of its block."""
    model, e = model_of(MODES[mode], dtype), dtype.itemsize
    x, others = body(model, dtype, documents)
    live, before = Live(), []
    monkeypatch.setattr(recompute._Rerun, "__enter__", lambda self: before.append(live.bytes()))
    monkeypatch.setattr(recompute._Rerun, "__exit__", lambda self, *error: setattr(live, "at_next", True))
    with live:
        y = x
        for block in model.blocks:
            y = block(y, *others)
        # The last output is held here and the first input, made before, is not counted: as many bytes, where that is kept.
        wide_copy = e < 4 and mode in ("none", "attention")
        assert live.bytes() == kept(mode, e, documents) + y.nbytes * wide_copy
        y.backward(torch.ones_like(y))
    again = inner(e, documents) - HIDDEN * e * (e >= 4)
    core_again = core(e, documents) + HIDDEN * e  # its output too: what follows the core keeps that of the first run
    more = {"none": [], "full": L * [again], "blocks": -(-L // 2) * [again], "attention": L * [core_again]}[mode]
    assert [b - a for a, b in zip(before, live.noted, strict=True)] == more


def test_attention_in_plain_formulas_loses_its_scores():
    """What the paper counts: S x T scores, weights and masks a head, all between q, k, v and the output."""
    held = []
    for settings in (Recompute(), ATTENTION):
        model = model_of()
        for block in model.blocks:
            block.attention.attend = lambda q, k, v, documents: plain(
                q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), None, causal=True
            )
        apply(model, settings)
        x, others = body(model, torch.float64, False)
        with Live() as live:
            y = x
            for block in model.blocks:
                y = block(y, *others)
            held.append(live.bytes())
    scores = B * CFG.heads * S * S * 8
    assert held[0] - held[1] >= L * 2 * scores


def test_early_stop_leaves_out_the_last_product():
    """Without dropout nothing after the input of ffn.down is kept, so a re-run makes 6 of a block's 7 products."""
    model = model_of(Recompute("full"))
    counted = {False: 0, True: 0}

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counted[rerunning()] += function is torch.ops.aten.mm.default
            return function(*args, **(kwargs or {}))

    x, others = body(model, torch.float64, False)
    with Products():
        model.blocks[0](x, *others[:2]).sum().backward()
    assert counted == {False: 7 + 14, True: 6}


# Offload


@BY_MODE
def test_offload_moves_activations_once_and_nothing_that_is_shared(mode, monkeypatch):
    """All that a block keeps of its own lies in Parked host memory, each memory once; weights, angles and documents stay."""
    parked = []

    class Noted(Parked):
        def __init__(self, x):
            super().__init__(x)
            parked.append(weakref.ref(self))

    monkeypatch.setattr(recompute, "Parked", Noted)
    model = model_of(with_offload(MODES[mode], True))
    x, others = body(model, torch.float64, True)
    with Live() as live:
        y = x
        for block in model.blocks:
            y = block(y, *others)
        moved = sum(p().host.nbytes for p in parked)
        # On the device there is the last block's output alone. (The host copies are memory of this process too.)
        assert live.bytes() - moved == y.nbytes
        assert moved == kept(mode, 8, True)
        y.backward(torch.ones_like(y))
        assert all(p() is None for p in parked), "backward is over and host memory is still held"


class Odd(nn.Module):
    """Keeps a row, writes to the other row of the same memory, keeps that too; and multiplies by a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([3.0, 3.0], dtype=torch.float64))

    def forward(self, x):
        a = x * self.scale
        first = (a[:1] * a[:1]).sum()
        a[1:].mul_(2.0)
        return first + (a[1:] * a[1:]).sum()


def test_offload_copies_again_what_was_written_to_and_leaves_buffers(monkeypatch):
    moved = []
    monkeypatch.setattr(recompute, "Parked", lambda kept: moved.append(kept.clone()) or Parked(kept))
    model = nn.Module()
    model.blocks = nn.ModuleList([Odd()])
    apply(model, Recompute(offload=True))
    x = torch.arange(1.0, 5.0, dtype=torch.float64).view(2, 2).requires_grad_()
    model.blocks[0](x).backward()
    assert torch.equal(x.grad, torch.tensor([[18.0], [72.0]]) * x.detach())  # of (3 x)^2 and (6 x)^2
    assert [kept.shape for kept in moved] == [(1, 2), (1, 2)] and torch.equal(moved[1], 6 * x[1:])


def test_what_comes_back_comes_once():
    parked = Parked(torch.ones(4)[1:])
    assert parked.host.shape == (4,)
    parked.device = torch.device("meta")  # stands for a device that is not the host
    assert parked.fetch() is parked.fetch() and parked.fetch().is_meta


# Settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "all"}, "recompute.mode = 'all': use one of none, full, selective"),
        ({"mode": "selective", "select": "mlp"}, "recompute.select = 'mlp': use one of attention, blocks"),
        ({"mode": "selective", "select": "blocks", "every": 0}, "recompute.every = 0: give at least 1"),
        ({"mode": "full", "select": "blocks"}, "recompute.select acts with recompute.mode = selective only"),
        ({"mode": "full", "every": 3}, "recompute.every = 3 acts with recompute.mode = selective"),
        ({"mode": "selective", "every": 3}, "recompute.select = blocks only"),
    ],
)
def test_refusals(given, words):
    with pytest.raises(ValueError) as refusal:
        Recompute(**given)
    assert words in str(refusal.value)


def test_every_key_is_documented():
    from dataclasses import make_dataclass

    from minidist.train import settings

    text = settings.help_text(make_dataclass("Config", [("recompute", Recompute)]))
    assert all(f"--recompute.{key}  " in text for key in ("mode", "select", "every", "offload"))
