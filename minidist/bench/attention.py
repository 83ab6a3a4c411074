"""`minidist bench attention`: context-parallel attention on n ranks against torch's SDPA on the whole sequence in one process.

Both sides fit q, k and v to a target by gradient descent, forward, backward and all, so that the loss of each step shows the
output and the gradients of those before. One process has what one rank has: a GPU, or one thread of a CPU. So a time ratio of
1/n would be perfect, and a bytes ratio of 1/n what the technique is for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minidist import ranks as pool
from minidist.bench.measure import Series, Side, interleave
from minidist.bench.report import Row, row
from minidist.core import comm
from minidist.core.device import host
from minidist.core.layout import Layout
from minidist.core.mesh import Mesh
from minidist.parallel.context import ATTENTION
from minidist.parallel.zigzag import piece

HEADS, KV_HEADS = 12, 4
RANKS = (2, 3, 4, 6, 12)  # that share the heads, and the sequences of all sizes
WARMUPS = 2
RATE = 0.05  # of the descent
LOSS_BOUND = 1e-5  # relative, in fp32: sums in another order part by rounding
TIMEOUT_S = 3600.0
PEER = "SDPA, one process"


@dataclass(frozen=True)
class Size:
    """One row of `seq_len` places."""

    seq_len: int
    head_width: int


SIZES = {"tiny": Size(48, 8), "small": Size(384, 32), "large": Size(3072, 64)}
"""small: a good part of a step is communication; large: most of it is compute; tiny shows that the bench works, no more"""


def check(ranks: int, pairs: int, sizes: str, way: str | None) -> None:
    """Refuse, before any rank starts, what cannot be measured. ValueError with option, value and remedy."""
    if ranks not in RANKS:
        raise ValueError(
            f"--ranks {ranks}: the {HEADS} heads and the sequences divide by {', '.join(map(str, RANKS))}, use one"
        )
    if pairs < 1:
        raise ValueError(f"--pairs {pairs}: give at least 1; 10 or more for a spread that says something")
    if way not in (None, *ATTENTION):
        raise ValueError(f"--way {way}: use one of {', '.join(ATTENTION)}; leave it out to compare them all")
    unknown = [size for size in sizes.split(",") if size not in SIZES]
    if unknown:
        raise ValueError(
            f"--sizes {sizes}: there is no size {unknown[0]!r}, use some of {', '.join(SIZES)}, with commas between"
        )


def run(ranks: int, pairs: int, sizes: str, way: str | None = None) -> list[Row]:
    """Compare one way, or all, at each of `sizes` ("small,large") on local ranks. Progress goes to standard error.

    Raises report.Unequal, before any time is reported, where the two sides' losses differ.
    """
    rows = []
    for size in sizes.split(","):
        for one in ATTENTION if way is None else (way,):
            work = (compare, ranks, one, SIZES[size], f"{one}, {size}", pairs)
            seen = pool.run(*work, layout=Layout(cp=ranks), timeout_s=TIMEOUT_S, check=False)
            rows.append(row(one, PEER, size, seen, LOSS_BOUND))
    return rows


def compare(mesh: Mesh, way: str, size: Size, title: str, pairs: int) -> Series:
    """The program of a rank: both sides, in turns. The whole sequence is rank 0's, the others wait meanwhile."""
    group = mesh.group("cp")

    def say(text: str) -> None:
        if mesh.rank == 0:
            print(f"{title}: {text}", file=sys.stderr)

    parts = [piece(x.mT, group.size, group.rank, way != "ulysses").mT.contiguous() for x in problem(size, mesh.device)]
    sides = [descent(partial(ATTENTION[way], group=group), *parts), lambda number: 0.0]
    if group.rank == 0:
        sides[1] = descent(torchs, *problem(size, mesh.device))
    series = interleave(sides, pairs=pairs, warmups=WARMUPS, meet=lambda: comm.barrier(mesh.world), say=say)
    sums = torch.tensor(series.losses, dtype=torch.float64, device=mesh.device)
    comm.all_reduce(sums, group, tag="control")
    series.losses[0][:], series.losses[1][:] = host(sums, expect=series.losses)
    return series


def problem(size: Size, device: torch.device) -> list[Tensor]:
    """q, k, v and the target, whole: (1,H,S,K), (1,G,S,K) twice, (1,H,S,K)."""
    draw = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, n, size.seq_len, size.head_width, generator=draw).to(device) for n in heads]


def descent(attention: Callable, q: Tensor, k: Tensor, v: Tensor, target: Tensor) -> Side:
    """Steps on sum((attention(q, k, v) - target)^2) / 2, of which each returns this rank's part."""
    variables = [x.requires_grad_() for x in (q, k, v)]

    def step(number: int) -> float:
        out, _ = attention(*variables)
        off = out.detach() - target
        out.backward(off)
        with torch.no_grad():
            for x in variables:
                x -= RATE * x.grad
                x.grad = None
        return host(off.square().sum() / 2, expect=0.0)

    return step


def torchs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    """Torch's causal attention, whichever kernel it takes."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), None
