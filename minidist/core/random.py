"""Randomness that depends on what is drawn, never on who draws it: weights, dropout masks, sample order.

There is no generator state to save, restore or keep in step between ranks. Every number is a function of named things:
a weight of (seed, parameter name), a dropout mask of (seed, step, layer, site, sample, position, feature), an order of
(key). So any cut of the model or of the batch sees the same numbers, a recomputed forward sees the same mask, and a
resumed run needs one integer.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from minidist.core.slices import Slice

BLOCK = 1 << 20  # elements drawn under one key: 4 MB, 20 ms; small enough that a slice draws little it does not keep


def digest(*what: object, words: int = 2) -> list[int]:
    """`words` (at most 8) 64-bit integers that depend on every part of `what` (ints and strings)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in what)
    data = blake2b(text.encode(), digest_size=8 * words).digest()
    return [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(words)]


def generator(seed: int, *what: object) -> np.random.Generator:
    """A numpy stream of its own for (seed, what...): `generator(seed, "crop", sample_id)` differs from every other one.

    Key by the sample, not by rank, worker or epoch counters kept elsewhere: then it also repeats on another layout.
    """
    return np.random.Generator(np.random.Philox(key=digest("stream", seed, *what)))


# --- weights ----------------------------------------------------------------------------------------------------------


def normal(seed: int, name: str, piece: Slice, std: float) -> Tensor:
    """Initial values of `piece` of the parameter `name`: fp32 CPU tensor (piece.numel,), normal(0, std), padding 0.

    `name` is the parameter's name in the plain whole model. Only the blocks that the piece touches are drawn, each up
    to the last element it needs: a row slice costs its share of the whole, a column slice as much as the whole.
    """
    local = np.zeros(piece.numel, np.float32)
    runs = piece.run_table()
    runs = runs[np.argsort(runs[:, 1], kind="stable")]
    at, start, length = runs.T
    stop = start + length
    furthest = np.maximum.accumulate(stop)  # a kv copy may repeat a run, so ends need not rise with starts
    for block in _touched(start, stop):
        low, high = block * BLOCK, (block + 1) * BLOCK
        first, last = np.searchsorted(furthest, low, "right"), np.searchsorted(start, high, "left")
        begin = np.maximum(start[first:last], low)
        end = np.maximum(np.minimum(stop[first:last], high), begin)  # a short run before a long one may end earlier
        values = _draw(seed, name, block, int(end.max()) - low) * np.float32(std)
        _scatter(local, at[first:last] + begin - start[first:last], values, begin - low, end - begin)
    return torch.from_numpy(local)


def _draw(seed: int, name: str, block: int, count: int) -> np.ndarray:
    """The first `count` standard normals of one block: a prefix of the stream, whatever `count` is."""
    key = digest("weight", seed, name, block)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(count, dtype=np.float32)


def _touched(start: np.ndarray, stop: np.ndarray) -> list[int]:
    """Numbers of the blocks in which some run [start_i, stop_i) has an element, in order."""
    change = np.zeros(stop.max(initial=0) // BLOCK + 2, np.int64)  # runs that begin or end at each block
    np.add.at(change, start // BLOCK, 1)
    np.add.at(change, (stop - 1) // BLOCK + 1, -1)
    return np.flatnonzero(np.cumsum(change)).tolist()


def _scatter(local: np.ndarray, to: np.ndarray, values: np.ndarray, source: np.ndarray, length: np.ndarray) -> None:
    """local[to_i : to_i + length_i] = values[source_i : source_i + length_i] for every run i; no loop over many."""
    if len(to) <= 8:  # a row slice is one long run: copying is ten times cheaper than indexing
        for t, s, n in zip(to.tolist(), source.tolist(), length.tolist(), strict=True):
            local[t : t + n] = values[s : s + n]
        return
    within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)  # 0 1 2 | 0 1 2 3 | ...
    local[np.repeat(to, length) + within] = values[np.repeat(source, length) + within]


# --- dropout ----------------------------------------------------------------------------------------------------------

# Multipliers and shifts of splitmix64 (Steele, Lea, Flood 2014) and one of MurmurHash3, as the signed integers that
# torch has. torch's integer products wrap; its right shift copies the sign, so a mask follows it.
_GOLDEN, _MIX_A, _MIX_B = -7046029254386353131, -4658895280553007687, -7723592293110705685
_MIX_C = -2048144789  # 0x85EBCA6B


@dataclass(frozen=True)
class DropoutKey:
    """What the masks of one micro-batch depend on.

    `samples` (B,) and `index` (S,) or (B,S) are int64 on the batch's device. `index` is the position in the window (not
    in the document), so that a sequence shard names its own places.
    """

    seed: int
    step: int
    samples: Tensor
    index: Tensor


def dropout(x: Tensor, p: float, key: DropoutKey, layer: int, site: str, feature: int = 0) -> Tensor:
    """Zero each element of x (B,S,D) with probability p and scale the rest by 1/(1-p).

    Whether an element stays is a hash of (seed, step, layer, site, sample, position in the window, feature): the same
    on any cut of rows, sequence or features, and in a re-run. `feature` is where x's first feature lies in the whole.
    """
    if p == 0.0:
        return x
    assert 0.0 < p < 1.0, f"dropout probability {p} is outside [0, 1)"
    keep = _hash(key, layer, site, feature, x.shape[-1], x.device) >= round(p * 2**32) - 2**31
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)  # backward keeps `keep`, a byte an element


def _hash(key: DropoutKey, layer: int, site: str, feature: int, width: int, device: torch.device) -> Tensor:
    """Uniform int32 (B,S,D).

    Each row (sample, position) gets a well mixed 64-bit word: an odd factor and an offset. An element is factor x
    feature word + offset, finished by a shift, xor and product that break the straight line: five cheap passes over
    32-bit integers, so the whole dropout costs about what F.dropout does.
    """
    base, other = (word - (1 << 63) for word in digest("dropout", key.seed, key.step, layer, site))
    index = key.index if key.index.dim() == 2 else key.index[None, :]
    rows = _mix(_mix(key.samples[:, None] * _GOLDEN + base) + index * _GOLDEN + other)  # (B,S)
    words = rows[..., None].view(torch.int32)  # (B,S,2)
    columns = torch.arange(feature, feature + width, device=device)
    columns = _mix(columns * _GOLDEN + other)[:, None].view(torch.int32)[:, 0]  # (D,)
    h = torch.addcmul(words[..., 1:], words[..., :1] | 1, columns)  # (B,S,D)
    h ^= (h >> 15) & 0x1FFFF
    return h.mul_(_MIX_C)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64: a bijection of int64 in which every input bit moves every output bit."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


# --- order ------------------------------------------------------------------------------------------------------------

ROUNDS = 8


def permute(i: int | np.ndarray, n: int, key: object) -> int | np.ndarray:
    """Where element i of 0..n-1 goes under the permutation named by `key` (an int, a string or a tuple of them).

    A Feistel network over the smallest power of two >= n, walked until it lands below n (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"): exact for every n >= 1, fewer than two walks on average (n > 2), and no
    memory whatever n is.
    Takes an int or an integer array of any shape and gives the same kind.
    """
    if n < 1:
        raise ValueError(f"permute: n={n} has nothing to permute; n must be at least 1")
    x = np.asarray(i)
    if x.size and (x.min() < 0 or x.max() >= n):
        raise ValueError(f"permute: every index must be in 0..{n - 1}, got {x.min()}..{x.max()}")
    parts = key if isinstance(key, tuple) else (key,)
    keys = np.array(digest("permute", *parts, words=ROUNDS), np.uint64)
    bits = max(2, (n - 1).bit_length())
    out = _feistel(x.reshape(-1).astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(out >= n)).size:
        out[outside] = _feistel(out[outside], bits, keys)
    return int(out[0]) if x.ndim == 0 else out.astype(np.int64).reshape(x.shape)


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """One bijection of 0..2^bits-1: the two halves change each other in turn. Halves may differ by a bit."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = x >> low_bits, x & low_mask
    for round_, key in enumerate(keys):
        if round_ % 2 == 0:
            high = high ^ (_mix_numpy(low + key) & high_mask)
        else:
            low = low ^ (_mix_numpy(high + key) & low_mask)
    return (high << low_bits) | low


def _mix_numpy(x: np.ndarray) -> np.ndarray:
    """`_mix` on numpy's uint64, whose products wrap and whose shift brings in zeros."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_A % 2**64)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_B % 2**64)
    return x ^ (x >> np.uint64(31))
