"""Random numbers named by what they are for: any cut of weights, masks and orders sees the same ones."""

import random as python_random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.core import random
from minidist.core.random import DropoutKey, digest, dropout, generator, normal, permute
from minidist.core.slices import Box, Slice, extract

SHAPE = (1500, 1100)  # 1.57 blocks


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return normal(0, "w", Slice.whole("w", SHAPE), 1.0).view(SHAPE)


PIECES = {
    "rows": Slice("w", SHAPE, (Box((400, 0), (1200, 1100)),)),
    "columns": Slice("w", SHAPE, (Box((0, 100), (1500, 375)),)),
    "corner": Slice("w", SHAPE, (Box((1490, 1090), (1500, 1100)),)),
    "fused, copied and padded": Slice(
        "w",
        SHAPE,
        (Box((900, 0), (1000, 1100)), Box((0, 7), (1400, 9)), Box((0, 0), (3, 50), "pad"), Box((0, 8), (30, 9), "copy")),
    ),
    "flat range": Slice("w", SHAPE, (Box((0, 100), (1500, 375)), Box((0, 0), (2, 9), "pad")), (137, 412_515)),
    "nothing": Slice("w", SHAPE, (Box((0, 0), (1500, 1100)),), (5, 5)),
    "padding only": Slice("w", SHAPE, (Box((0, 0), (2, 4), "pad"),)),
}


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_a_slice_of_the_weights_is_a_slice_of_the_whole(piece, whole):
    """Bit for bit, across a block boundary; padding is zero (C16: no shard is drawn on its own)."""
    mine = normal(0, "w", piece, 1.0)
    assert mine.dtype == torch.float32 and mine.shape == (piece.numel,)
    assert torch.equal(mine, extract(piece, whole))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slice_of_small_blocks(data):
    """Random boxes in three dims and flat ranges of them, with blocks of 64 elements so that there are many."""
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    cuts = []
    for _ in range(data.draw(st.integers(1, 3))):
        pairs = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        kind = data.draw(st.sampled_from(["own", "copy", "pad"]))
        cuts.append(Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), kind))
    total = sum(box.numel for box in cuts)
    a, b = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    piece = Slice("x", shape, tuple(cuts), (a, b))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "BLOCK", 64)
        everything = normal(3, "x", Slice.whole("x", shape), 0.5).view(shape)
        assert torch.equal(normal(3, "x", piece, 0.5), extract(piece, everything))


def test_a_slice_draws_only_its_blocks(monkeypatch):
    """Of a tensor of 100 blocks, a row slice inside block 70 draws a part of one."""
    drawn = []
    real = random._draw
    monkeypatch.setattr(random, "_draw", lambda *a: drawn.append(a[2:]) or real(*a))
    rows = random.BLOCK // 1024
    shape = (100 * rows, 1024)
    normal(0, "w", Slice("w", shape, (Box((70 * rows, 0), (70 * rows + 3, 1024)),)), 1.0)
    assert drawn == [(70, 3 * 1024)]


def test_weights_are_normal_and_depend_on_seed_and_name(whole):
    """Mean, spread, tails; another seed, name or block is another draw. The first value is pinned: the stream is a format."""
    n = whole.numel()
    assert abs(float(whole.mean())) < 4 / n**0.5 and abs(float(whole.std()) - 1) < 4 / n**0.5
    assert abs(float((whole.abs() > 1.959964).float().mean()) - 0.05) < 0.001
    flat = whole.flatten()
    others = [normal(seed, name, Slice.whole(name, SHAPE), 1.0) for seed, name in ((1, "w"), (0, "v"))]
    for other in [*(x[: 1 << 19] for x in others), flat[1 << 20 :]]:
        assert abs(float(torch.corrcoef(torch.stack([flat[: len(other)], other]))[0, 1])) < 0.01
    assert torch.equal(normal(0, "w", Slice.whole("w", SHAPE), 0.02), flat * np.float32(0.02))
    assert float(flat[0]) == pytest.approx(FIRST, rel=1e-6)


FIRST = 0.7948412895202637  # the first value of normal(0, "w", ..., 1.0)


# --- dropout ----------------------------------------------------------------------------------------------------------

SAMPLES, INDEX = torch.tensor([40, 7, 12, 3]), torch.arange(16)


def mask(key: DropoutKey, width: int, p: float = 0.5, layer: int = 2, site: str = "ffn", feature: int = 0) -> torch.Tensor:
    rows, length = len(key.samples), key.index.shape[-1]
    return dropout(torch.ones(rows, length, width), p, key, layer, site, feature) != 0


def test_any_cut_sees_the_same_mask():
    """Rows, sequence (contiguous and zig-zag, also per row) and features: each piece equals the whole's."""
    whole = mask(DropoutKey(0, 5, SAMPLES, INDEX), 24)
    assert torch.equal(mask(DropoutKey(0, 5, SAMPLES[1:3], INDEX), 24), whole[1:3])
    zigzag = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    assert torch.equal(mask(DropoutKey(0, 5, SAMPLES, zigzag), 24), whole[:, zigzag])
    assert torch.equal(mask(DropoutKey(0, 5, SAMPLES, zigzag.repeat(4, 1)), 24), whole[:, zigzag])
    assert torch.equal(mask(DropoutKey(0, 5, SAMPLES, INDEX), 8, feature=16), whole[..., 16:])


def test_every_part_of_the_key_counts():
    """Seed, step, layer, site, sample, position, feature: change one and about half of a p = 0.5 mask changes."""
    key = DropoutKey(0, 5, SAMPLES, INDEX)
    base = mask(key, 512)
    others = {
        "seed": mask(DropoutKey(1, 5, SAMPLES, INDEX), 512),
        "step": mask(DropoutKey(0, 6, SAMPLES, INDEX), 512),
        "layer": mask(key, 512, layer=3),
        "site": mask(key, 512, site="attention"),
        "sample": mask(DropoutKey(0, 5, SAMPLES + 1, INDEX), 512),
        "position": mask(DropoutKey(0, 5, SAMPLES, INDEX + 1), 512),
        "feature": mask(key, 512, feature=1),
        "neighbour row": base.roll(1, 0),
        "neighbour position": base.roll(1, 1),
    }
    for name, other in others.items():
        assert abs(float((base != other).double().mean()) - 0.5) < 0.015, name  # 5.4 sigma of 32768 draws


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_masks_are_random(p):
    """Rate, and independence of neighbours, of rows and of columns, by their spread: no stripes."""
    keep = mask(DropoutKey(0, 1, torch.arange(16) * 31, torch.arange(128)), 512, p).double()
    n = keep.numel()
    z = (keep - (1 - p)) / (p * (1 - p)) ** 0.5
    assert abs(float(z.mean())) * n**0.5 < 4.5
    for dim in range(3):
        other = z.roll(1, dim)
        assert abs(float((z * other).mean())) * n**0.5 < 4.5
    rows, columns = z.mean(-1) * 512**0.5, z.mean((0, 1)) * 2048**0.5
    assert abs(float((rows**2).mean()) - 1) < 5 * (2 / rows.numel()) ** 0.5
    assert abs(float((columns**2).mean()) - 1) < 5 * (2 / columns.numel()) ** 0.5


def test_masks_have_no_arithmetic():
    """Features whose hash words satisfy a + b = c + d: were the hash linear in them, d's mask would follow from the rest."""
    width = 1024
    columns = torch.arange(width) * random._GOLDEN + digest("dropout", 0, 1, 2, "ffn")[1] - (1 << 63)
    words = random._mix(columns).to(torch.int32).numpy()
    first, second = np.triu_indices(width, 1)
    sums = words[first] + words[second]
    order = np.argsort(sums, kind="stable")
    twins = np.flatnonzero(np.diff(sums[order]) == 0)
    assert len(twins) > 10
    z = mask(DropoutKey(0, 1, torch.arange(32), torch.arange(64)), width).double().view(-1, width) * 2 - 1
    product = torch.ones(len(z), len(twins), dtype=torch.float64)
    for feature in (first[order[twins]], second[order[twins]], first[order[twins + 1]], second[order[twins + 1]]):
        product *= z[:, feature]
    assert abs(float(product.mean())) * product.numel() ** 0.5 < 4.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scale_and_gradient(dtype):
    """Survivors are scaled by 1/(1-p), the same in backward; dtype kept; p = 0 touches nothing."""
    key = DropoutKey(0, 5, SAMPLES, INDEX)
    x = torch.full((4, 16, 256), 3.0, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.25, key, 0, "ffn")
    assert y.dtype == dtype and y.unique().tolist() == [0.0, 4.0]
    y.sum().backward()
    scale = torch.tensor(4 / 3, dtype=dtype)
    assert torch.equal(x.grad != 0, y != 0) and torch.equal(x.grad.max(), scale)
    assert dropout(x, 0.0, key, 0, "ffn") is x


def test_dropout_of_an_empty_micro_batch():
    """Sample id -1 (no sample) is a key like any other."""
    assert mask(DropoutKey(0, 0, torch.tensor([-1]), INDEX), 64).any()


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 20, 63, 64, 65, 1000, 1025, 4097])
def test_permutations_are_exact(n):
    """Every number once, for several keys; scalar, array and 2-D forms agree."""
    for key in (0, "a", ("epoch", 1, 2)):
        order = permute(np.arange(n), n, key)
        assert sorted(order.tolist()) == list(range(n)) and order.dtype == np.int64
        assert [permute(i, n, key) for i in range(min(n, 5))] == order[:5].tolist()
    assert isinstance(permute(0, n, 0), int)
    assert np.array_equal(permute(np.zeros((2, 3), np.int32), n, 0), np.full((2, 3), permute(0, n, 0)))


def test_permutations_of_huge_ranges():
    """No memory is needed: distinct places in a range of 10^15, and the bijection of the cipher at 2^62."""
    order = permute(np.arange(20_000), 10**15, 1)
    assert len(set(order.tolist())) == 20_000 and order.min() >= 0 and 4e14 < order.mean() < 6e14 and order.max() < 10**15
    assert len({permute(i, 2**62, 1) for i in range(50)}) == 50


def test_permutations_look_random():
    """Where each element goes is uniform over keys (chi-squared), and neighbours do not stay neighbours."""
    n, keys = 7, 4000
    table = np.stack([permute(np.arange(n), n, ("k", key)) for key in range(keys)])
    for i in range(n):
        counts = np.bincount(table[:, i], minlength=n)
        assert ((counts - keys / n) ** 2 / (keys / n)).sum() < 27.9  # 6 degrees of freedom, one in 10,000
    order = permute(np.arange(10_000), 10_000, 5)
    assert (np.abs(np.diff(order)) == 1).sum() < 12 and abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04
    other = permute(np.arange(10_000), 10_000, 6)
    assert (order == other).sum() < 8 and (order == np.arange(10_000)).sum() < 8


@pytest.mark.parametrize(("i", "n"), [(5, 5), (-1, 5), (0, 0)])
def test_permute_refuses_places_outside(i, n):
    with pytest.raises(ValueError, match="permute"):
        permute(i, n, 0)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_streams_differ_and_repeat():
    """C14: ranks x workers x epochs, keyed by the sample: all streams differ for numpy, Python and torch, and repeat."""

    def draws():
        out = []
        for epoch in range(2):
            for sample in range(4):  # two ranks with two workers each: different samples
                stream = generator(0, "augment", epoch, sample)
                seed = int(stream.integers(2**63))
                torch_draw = torch.rand(1, generator=torch.Generator().manual_seed(seed)).item()
                out.append((stream.random(), python_random.Random(seed).random(), torch_draw))
        return out

    first = draws()
    assert first == draws()
    for values in zip(*first, strict=True):
        assert len(set(values)) == 8
    assert generator(0, "a", 12).random() != generator(0, "a1", 2).random()  # parts are not run together


def test_nothing_global_is_read_or_moved():
    """The file asks no global generator: names decide alone."""
    source = Path(random.__file__).read_text()
    assert "manual_seed" not in source and "np.random.seed" not in source and "torch.rand" not in source
