"""The plain model against a second implementation written from the formulas, against transformers' Llama, and its seams."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minidist.core.random import DropoutKey
from minidist.model import transformer
from minidist.model.config import ModelConfig
from minidist.model.loss import loss_sum
from minidist.model.transformer import Transformer, initial, initialise, rotary

CFG = ModelConfig(layers=3, width=48, heads=12, kv_heads=4, ffn=72, vocab=97)


def build(cfg: ModelConfig = CFG, dtype: torch.dtype = torch.float64, scale: float = 8.0) -> Transformer:
    """A filled model; weights scaled up so that attention and gates are far from their linear, uniform beginnings."""
    model = Transformer(cfg).to(dtype)
    initialise(model, seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel(), dtype=dtype))
            else:
                parameter.mul_(scale)
    return model


def tokens(rows: int = 2, length: int = 11, vocab: int = 97) -> torch.Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(0))


def by_formula(weights: dict, cfg: ModelConfig, ids: list[int], starts: list[int]) -> torch.Tensor:
    """Logits (S,V) of one row, token by token and head by head. starts[i]: where the document of token i begins."""
    K, group = cfg.width // cfg.heads, cfg.heads // cfg.kv_heads

    def norm(x, name):
        return x / math.sqrt(float((x * x).sum()) / len(x) + cfg.norm_eps) * weights[name]

    def turn(x, position):  # feature i and i + K/2 form a plane, turned by position * theta^(-2i/K)
        out = x.clone()
        for i in range(K // 2):
            angle = position * cfg.rope_theta ** (-2 * i / K)
            a, b = x[i], x[i + K // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + K // 2] = a * math.sin(angle) + b * math.cos(angle)
        return out

    states = [weights["embedding.weight"][t] for t in ids]
    for layer in range(cfg.layers):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        normed = [norm(x, f"blocks.{layer}.attention_norm.weight") for x in states]
        q, k, v = ([w[f"attention.{p}.weight"] @ x for x in normed] for p in "qkv")
        for i in range(len(ids)):
            heads = []
            for h in range(cfg.heads):
                mine, theirs = slice(h * K, (h + 1) * K), slice(h // group * K, (h // group + 1) * K)
                seen = range(starts[i], i + 1)
                query = turn(q[i][mine], i - starts[i])
                scores = [float(query @ turn(k[j][theirs], j - starts[j])) / math.sqrt(K) for j in seen]
                total = sum(math.exp(s) for s in scores)
                heads.append(sum(math.exp(s) / total * v[j][theirs] for s, j in zip(scores, seen, strict=True)))
            states[i] = states[i] + w["attention.o.weight"] @ torch.cat(heads)
        for i, x in enumerate(states):
            y = norm(x, f"blocks.{layer}.ffn_norm.weight")
            gate, up = w["ffn.gate.weight"] @ y, w["ffn.up.weight"] @ y
            states[i] = x + w["ffn.down.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    head = weights.get("head.weight", weights["embedding.weight"])
    return torch.stack([head @ norm(x, "norm.weight") for x in states])


@pytest.mark.parametrize("tied", [False, True])
def test_matches_formulas(tied):
    """Two rows, one of them with three documents: positions restart and nothing is seen across a boundary (C44)."""
    cfg = ModelConfig(**{**vars(CFG), "tied": tied})
    model, ids = build(cfg), tokens()
    documents = torch.tensor([[0] * 11, [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]])
    starts = torch.tensor([[0] * 11, [0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7]])
    weights = {name: p.detach() for name, p in model.named_parameters()}
    want = torch.stack([by_formula(weights, cfg, i.tolist(), s.tolist()) for i, s in zip(ids, starts, strict=True)])
    got = model(ids, torch.arange(11) - starts, documents)
    assert want.std() > 0.5  # the model says something
    assert torch.allclose(got, want, rtol=0, atol=1e-10 * float(want.abs().max()))
    alone = model(ids[:1])  # default positions, no document mask
    assert torch.allclose(alone, want[:1], rtol=0, atol=1e-10 * float(want.abs().max()))


def test_gradients_match_finite_differences():
    """Autograd through the whole model, one direction in all parameters at once."""
    model, ids = build(scale=4.0), tokens()
    loss_sum(model(ids[:, :-1]), ids[:, 1:]).backward()
    generator = torch.Generator().manual_seed(3)
    steps = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in model.parameters()]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), steps, strict=True))

    def moved(h):
        with torch.no_grad():
            for p, d in zip(model.parameters(), steps, strict=True):
                p.add_(d, alpha=h)
            loss = float(loss_sum(model(ids[:, :-1]), ids[:, 1:]))
            for p, d in zip(model.parameters(), steps, strict=True):
                p.sub_(d, alpha=h)
        return loss

    h = 1e-6
    assert (moved(h) - moved(-h)) / (2 * h) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_matches_transformers_llama(tied):
    """Weights copied by name into transformers' Llama: same logits, so our rotary layout is theirs (C54)."""
    transformers = pytest.importorskip("transformers")
    cfg = ModelConfig(**{**vars(CFG), "tied": tied, "rope_theta": 5000.0})
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=cfg.vocab,
            hidden_size=cfg.width,
            intermediate_size=cfg.ffn,
            num_hidden_layers=cfg.layers,
            num_attention_heads=cfg.heads,
            num_key_value_heads=cfg.kv_heads,
            rms_norm_eps=cfg.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    ).double()
    ours = build(cfg)
    theirs = {
        "embedding": "model.embed_tokens",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.": "self_attn.",
        "ffn.": "mlp.",
        "blocks": "model.layers",
        "head": "lm_head",
    }
    state = {}
    for name, parameter in ours.named_parameters():
        new = "model.norm.weight" if name == "norm.weight" else name
        for a, b in theirs.items():
            new = new.replace(a, b)
        if "self_attn" in new or "mlp" in new:
            new = new.replace(".weight", "_proj.weight")
        state[new] = parameter.detach()
    missing, unexpected = llama.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    ids = tokens(length=40)
    with torch.no_grad():
        want, got = llama(ids).logits, ours(ids)
    # their angles are fp32 even in a float64 model: at position 39 that alone is 2e-6
    assert torch.allclose(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_only_earlier_tokens_of_the_same_document_matter():
    """C44: change one token of document 1; exactly the rows from it to the end of document 1 change."""
    model, ids = build(), tokens(1, 12)
    documents = torch.tensor([[0] * 6 + [1] * 6])
    positions = torch.arange(12) % 6
    before = model(ids, positions, documents)
    ids[0, 2] = (ids[0, 2] + 1) % 97
    changed = (model(ids, positions, documents) != before).any(-1)[0]
    assert changed.tolist() == [2 <= i < 6 for i in range(12)]


def test_late_tokens_know_their_position():
    """C43: the model is not blind to position, and given positions count, not places in the tensor."""
    model, ids = build(), tokens(1, 8)
    whole = model(ids)
    assert torch.allclose(model(ids, torch.arange(8) + 5), whole, atol=1e-9)  # rotary is relative
    assert not torch.allclose(model(ids, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])), whole, atol=1e-3)


def test_dropout_needs_a_key_and_obeys_it():
    """The same key gives the same mask, whatever the cut of rows; no key, no dropout; other steps, other masks."""
    cfg = ModelConfig(**{**vars(CFG), "dropout": 0.3})
    model, ids = build(cfg), tokens(4, 10)

    def run(rows, step=0):
        key = DropoutKey(0, step, torch.tensor([5, 9, 2, 7])[rows], torch.arange(10))
        return model(ids[rows], dropout=key)

    whole = run(slice(0, 4))
    assert torch.allclose(torch.cat([run(slice(0, 1)), run(slice(1, 4))]), whole, atol=1e-12)
    assert not torch.allclose(run(slice(0, 4), step=1), whole, atol=1e-3)
    assert torch.equal(model(ids), model(ids)) and not torch.allclose(model(ids), whole, atol=1e-3)
    state = torch.get_rng_state()
    run(slice(0, 4)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)  # C15: nothing to save for a re-run


def test_sites_of_dropout(monkeypatch):
    """After the embedding, and on each of the two branches of every block before it is added: named by layer and site."""
    cfg = ModelConfig(**{**vars(CFG), "dropout": 0.3})
    model, ids, sites = build(cfg), tokens(1, 4), []

    def recorded(x, p, key, layer, site):
        sites.append((layer, site, p))
        return torch.zeros_like(x) if site != "embedding" else x

    monkeypatch.setattr(transformer.random, "dropout", recorded)
    out = model(ids, dropout=DropoutKey(0, 0, torch.tensor([1]), torch.arange(4)))
    branches = [(layer, site, 0.3) for layer in range(3) for site in ("attention", "ffn")]
    assert sites == [(-1, "embedding", 0.3), *branches]
    assert torch.equal(out, model.logits(model.embedding(ids)))  # branches dropped whole: the residual stream goes on


def test_rotary_angles_are_not_rounded():
    """bf16 has 8 bits: position 257 would be 256. Each angle is computed in fp32, only its cosine and sine are rounded."""
    positions = torch.tensor([0, 1, 257, 4095])
    exact = rotary(positions, 8, 10000.0, torch.float64)
    near = rotary(positions, 8, 10000.0, torch.bfloat16)
    assert near[0].dtype == torch.bfloat16 and near[0].shape == (1, 1, 4, 8)
    for a, b in zip(exact, near, strict=True):
        assert (a - b.double()).abs().max() < 2**-8


def test_builds_on_meta_and_runs_on_fake_tensors():
    """A dry run builds and steps the model without memory: no host read, no buffer that needs a value."""
    with torch.device("meta"):
        model = Transformer(ModelConfig(**{**vars(CFG), "tied": True}))
    assert all(p.is_meta for p in model.parameters()) and not list(model.buffers())
    model.to_empty(device="cpu")
    initialise(model, 1)
    plain = Transformer(model.cfg)
    initialise(plain, 1)
    assert model.head.weight is model.embedding.weight
    ids = tokens()
    assert torch.equal(model(ids), plain(ids))
    with FakeTensorMode():
        fake = Transformer(ModelConfig(**{**vars(CFG), "dropout": 0.1}))
        ids = torch.zeros(2, 8, dtype=torch.int64)
        key = DropoutKey(0, 0, torch.zeros(2, dtype=torch.int64), torch.arange(8))
        loss = loss_sum(fake(ids, torch.zeros_like(ids), torch.zeros_like(ids), key), ids)
        loss.backward()
        assert fake.embedding.weight.grad.shape == (97, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_in_other_dtypes(dtype):
    """Logits keep the dtype and stay near the float64 ones; the loss is fp32 for bf16."""
    ids = tokens()
    exact, near = build()(ids), build(dtype=dtype)(ids)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert near.dtype == dtype
    assert (near.double() - exact).abs().max() < tolerance * exact.abs().max()
    assert loss_sum(near, ids).dtype == torch.float32


def test_initial_values_are_those_of_the_name():
    """The table of standard deviations, seen in the weights; the residual writers are smaller; the seed counts."""
    cfg = ModelConfig(layers=2, width=240, heads=12, kv_heads=4, ffn=480, vocab=256)
    model, other = Transformer(cfg), Transformer(cfg)
    initialise(model, 0)
    initialise(other, 1)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        std = initial(name, cfg)
        if std is None:
            assert (p == 1).all()
            continue
        assert std == pytest.approx(0.01 if name.endswith(("o.weight", "down.weight")) else 0.02)
        assert p.std().item() == pytest.approx(std, rel=0.02) and abs(p.mean().item()) < 0.04 * std
        assert not torch.equal(p, q)
    assert not torch.equal(model.blocks[0].attention.q.weight, model.blocks[1].attention.q.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 50}, "model.width=50.*use 48"),
        ({"width": 36}, "model.width=36.*even"),
        ({"kv_heads": 5}, r"model.kv_heads=5.*one of \[1, 2, 3, 4, 6, 12\]"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
        ({"layers": 0}, "model.layers=0"),
    ],
)
def test_refuses_impossible_shapes(change, words):
    """One line: key, value, remedy."""
    with pytest.raises(ValueError, match=words) as caught:
        ModelConfig(**{**vars(CFG), **change})
    assert "\n" not in str(caught.value)
