"""`attend`: every path against the formula, rows that see nothing, gradients, and merging by log-sum-exp."""

import pytest
import torch

from minidist.model import attention
from minidist.model.attention import attend, attend_backward, merge

B, H, G, S, K = 2, 6, 2, 9, 8


def inputs(dtype=torch.float64, keys=S):
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, S, K), (B, G, keys, K), (B, G, keys, K))
    return [(torch.randn(s, generator=generator).to(dtype) * 2).requires_grad_() for s in shapes]


def formula(q, k, v, visible):
    """out and lse with `visible` (B,S,T), one query at a time, in float64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(q.shape[2]):
                seen = visible[b, i].nonzero()[:, 0]
                if len(seen):
                    scores = k[b, h // (H // G), seen] @ q[b, h, i] / K**0.5
                    lse[b, h, i] = scores.logsumexp(0)
                    out[b, h, i] = scores.softmax(0) @ v[b, h // (H // G), seen]
    return out, lse


@pytest.fixture(params=["kernel", "plain"])
def block_path(request, monkeypatch):
    """Forward and backward with log-sum-exp by torch's kernel, or by the formula."""
    if request.param == "plain":
        monkeypatch.setattr(attention, "_flash_cpu", attention.plain)
        monkeypatch.setattr(attention, "_flash_cpu_backward", attention.plain_backward)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
KEY_DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 1], [1] * 9])  # another shard: some queries see none of it


def masks(name):
    """(arguments of attend, visible (B,S,S))."""
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    full = torch.ones(B, S, S, dtype=torch.bool)
    own = DOCUMENTS[:, :, None] == DOCUMENTS[:, None, :]
    others = DOCUMENTS[:, :, None] == KEY_DOCUMENTS[:, None, :]
    return {
        "causal": ({}, causal),
        "full": ({"causal": False}, full),
        "documents": ({"documents": DOCUMENTS}, causal & own),
        "shard": ({"documents": DOCUMENTS, "key_documents": KEY_DOCUMENTS, "causal": False}, others),
    }[name]


@pytest.mark.parametrize("mask", ["causal", "full", "documents", "shard"])
@pytest.mark.parametrize("path", ["fast", "lse", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_path_is_the_formula(mask, path, dtype, monkeypatch):
    """Same numbers whichever backend runs; lse is natural log, at least fp32, and -inf where nothing is seen."""
    if path == "plain":
        monkeypatch.setattr(attention, "_flash_cpu", attention.plain)
    q, k, v = inputs(dtype)
    arguments, visible = masks(mask)
    out, lse = attend(q, k, v, **arguments, need_lse=path != "fast")
    want, want_lse = formula(q, k, v, visible)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert out.dtype == dtype and torch.allclose(out.double(), want, rtol=0, atol=tolerance)
    if path == "fast":
        assert lse is None
        return
    assert lse.dtype == torch.promote_types(dtype, torch.float32) and not lse.requires_grad
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    assert torch.allclose(lse.double(), want_lse, rtol=0, atol=min(tolerance, 1e-4))  # scores are fp32 even for bf16
    blind = ~visible.any(-1)[:, None].expand(B, H, S)
    assert blind.any() == (mask == "shard") and (out[blind] == 0).all()


@pytest.mark.parametrize("mask", ["causal", "full", "documents", "shard"])
def test_gradients_agree_and_are_finite(mask, monkeypatch):
    """out is differentiable on every path, also beside rows that see nothing."""
    arguments, _ = masks(mask)
    weight = torch.randn(B, H, S, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for path in ("fast", "lse", "plain"):
        if path == "plain":
            monkeypatch.setattr(attention, "_flash_cpu", attention.plain)
        q, k, v = inputs()
        (attend(q, k, v, **arguments, need_lse=path != "fast")[0] * weight).sum().backward()
        results.append([q.grad, k.grad, v.grad])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.isfinite().all() and torch.allclose(a, b, rtol=0, atol=1e-11)
    q, k, v = inputs()
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, **arguments, need_lse=True)[0], (q, k, v), fast_mode=True)


def test_merge_of_two_shards_is_the_whole():
    """Keys in two pieces, where a query may see nothing of one, or of both: lse = -inf gives weight 0, not nan."""
    q, k, v = inputs(keys=12)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    keys = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0], [0] * 12])  # no key of document 2

    def part(a, b):
        return attend(q, k[:, :, a:b], v[:, :, a:b], documents, key_documents=keys[:, a:b], causal=False, need_lse=True)

    with pytest.raises(AssertionError, match="no_grad"):  # its autograd would forget that the weights have gradients
        merge(*part(0, 5), *part(5, 12))
    with torch.no_grad():
        want, want_lse = part(0, 12)
        got, got_lse = merge(*part(0, 5), *part(5, 12))
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert torch.equal(got_lse == -torch.inf, want_lse == -torch.inf) and (want_lse == -torch.inf).any()
    seen = want_lse != -torch.inf
    assert torch.allclose(got_lse[seen], want_lse[seen], rtol=0, atol=1e-12)


def test_backward_of_two_shards_adds_up_to_the_whole(block_path):
    """Each set's part, given the merged out and lse: dq adds up, dk and dv are the set's own; also where rows see nothing."""
    q, k, v = inputs(keys=12)
    keys = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0], [0] * 12])
    mask = {"documents": DOCUMENTS, "causal": False}
    grad = torch.randn(B, H, S, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, lse = attend(q, k, v, key_documents=keys, **mask, need_lse=True)
    assert (lse == -torch.inf).any()
    out.backward(grad)
    with torch.no_grad():
        parts = [
            attend_backward(grad, q, k[:, :, a:b], v[:, :, a:b], out, lse, key_documents=keys[:, a:b], **mask)
            for a, b in ((0, 5), (5, 12))
        ]
        (dq, *first), (more, *second) = parts
    dk, dv = (torch.cat(pair, 2) for pair in zip(first, second, strict=True))
    for got, want in zip((dq + more, dk, dv), (q.grad, k.grad, v.grad), strict=True):
        assert got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_backward_of_a_causal_block_after_a_full_one(block_path, dtype, bound):
    """The ring's two shapes: earlier keys that all queries see, and one's own."""
    q, k, v = inputs(dtype, keys=6 + S)
    seen = torch.ones(S, 6 + S, dtype=torch.bool).tril(6)
    out, lse = attend(q, k[:, :, :6], v[:, :, :6], causal=False, need_lse=True)
    own, own_lse = attend(q, k[:, :, 6:], v[:, :, 6:], need_lse=True)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        out, lse = merge(out, lse, own, own_lse)
        dq, *first = attend_backward(grad, q, k[:, :, :6], v[:, :, :6], out, lse, causal=False)
        more, *second = attend_backward(grad, q, k[:, :, 6:], v[:, :, 6:], out, lse)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)
    want.backward(grad.double())
    assert torch.allclose(out.double(), want, rtol=0, atol=bound)
    dk, dv = (torch.cat(pair, 2) for pair in zip(first, second, strict=True))
    for got, whole in zip((dq + more, dk, dv), wide, strict=True):
        assert got.dtype == dtype and torch.allclose(got.double(), whole.grad, rtol=0, atol=bound * whole.grad.abs().max())


def test_a_gpu_in_16_bits_is_served_by_its_flash_kernels(monkeypatch):
    """On the meta device torch checks what the GPU's kernels are called with, forward and backward, and has no values."""
    monkeypatch.setattr(attention, "plain", None)
    monkeypatch.setattr(attention, "plain_backward", None)
    q, k, v = (x.detach().to("meta") for x in inputs(torch.bfloat16))
    out, lse = attend(q, k, v, need_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert [x.shape for x in attend_backward(out, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]
