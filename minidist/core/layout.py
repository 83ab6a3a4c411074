"""The layout: how many ranks lie along each axis, and which ranks form which group. Arithmetic only, no processes.

The whole mesh is one `arange(world_size)` reshaped to (pp, dp, cp, tp); every group is a slice of it. Ranks are ordered
pp, dp, cp, tp from outer to inner, so that tp, the axis that talks most, stays inside a server.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

AXES = ("pp", "dp", "cp", "tp")  # of the mesh, outer to inner
CP_ATTENTION = ("ring", "gather", "ulysses")
GROUPS = ("world", *AXES, "dp_cp", "ep", "expert_dp", "shard", "replicate", "tied")


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis. `pp * dp * cp * tp` ranks in all; `ep` and `shard` borrow theirs from dp x cp.

    Raises ValueError, with the remedy, for a combination that no run could use.
    """

    pp: int = 1
    """pipeline stages"""
    dp: int = 1
    """data-parallel replicas"""
    cp: int = 1
    """context-parallel ranks: each holds a part of every sequence"""
    tp: int = 1
    """tensor-parallel ranks: each holds a part of every large matrix"""
    ep: int = 1
    """expert-parallel ranks, consecutive places of dp x cp"""
    shard: int = 0
    """ranks that share one copy of the optimizer state, consecutive places of dp x cp; 0 means all of dp x cp. Fewer is
    hybrid sharding: the copies are kept equal by a further sum"""
    zero: int = 0
    """what the ranks that share the state cut among them (ZeRO's stage): 0 nothing, 1 optimizer state, 2 and gradients,
    3 and weights"""
    reshard: bool = True
    """with zero = 3: free a block's weights after forward and gather them again for backward. false keeps them between the
    two: a third less traffic, and the whole weights held at the peak"""
    bucket: int = 25
    """with zero = 0: MiB of gradients that may travel together. Fewer and longer reductions waste less time, but the next one
    starts later; 0 sends every block alone"""
    sp: bool = False
    """with tp > 1: sequence parallelism. Norms, dropout and the residual stream work on a shard of the sequence on each
    tensor-parallel rank"""
    sp_regather: bool = True
    """with sp: gather a block's input again in backward: less memory, a quarter more bytes. false keeps what was gathered"""
    cp_attention: str = "ring"
    """with cp > 1, how attention sees the whole sequence: "ring" (keys and values go round), "gather" (all of them at once)
    or "ulysses" (heads for sequence, and back)"""
    schedule: str = "1f1b"
    """with pp > 1: gpipe, 1f1b, interleaved, bfs, zb-h1, zb-v or dualpipe-v, or a file with a schedule of your own (text, or
    torch's .csv)"""
    chunks: int = 0
    """with pp > 1: stages that each rank holds; 0 means what the schedule needs, which is 1, or 2"""
    split: str = "even"
    """with pp > 1, layers of each stage: "even", "cost" (the output head counts as work) or numbers such as "3,3,2" """

    def __post_init__(self):
        for field in fields(self):
            size, least = getattr(self, field.name), 0 if field.name in ("shard", "zero", "bucket", "chunks") else 1
            if field.type == "int" and (not isinstance(size, int) or isinstance(size, bool) or size < least):
                raise ValueError(f"layout.{field.name} = {size!r}: give a whole number of at least {least}")
        if self.cp_attention not in CP_ATTENTION:
            raise ValueError(f"layout.cp_attention = {self.cp_attention!r}: use one of {', '.join(CP_ATTENTION)}")
        if self.zero > 3:
            raise ValueError(f"layout.zero = {self.zero}: ZeRO has stages 0 to 3, use one of them")
        places = self.dp * self.cp
        for name in ("ep", "shard"):
            size = getattr(self, name)
            if size and places % size:
                raise ValueError(
                    f"layout.{name} = {size} does not divide dp x cp = {self.dp} x {self.cp} = {places}: "
                    f"use one of {_divisors(places)}"
                )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the optimizer state: `shard`, or all of dp x cp where it is 0."""
        return self.shard or self.dp * self.cp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank along each axis: {"pp": ., "dp": ., "cp": ., "tp": .}."""
        self._check_rank(rank)
        shape = (self.pp, self.dp, self.cp, self.tp)
        return {axis: int(i) for axis, i in zip(AXES, np.unravel_index(rank, shape), strict=True)}

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates; the inverse of `coordinates`."""
        return int(np.ravel_multi_index((pp, dp, cp, tp), (self.pp, self.dp, self.cp, self.tp)))

    def groups(self, name: str) -> list[list[int]]:
        """All groups of one kind, each a list of global ranks in order of place. Every rank is in exactly one.

        `name` is "world", a mesh axis, or: "dp_cp" (dense gradients are summed over it; dp outer, cp inner), "ep" and
        "expert_dp" (`ep` consecutive places of dp_cp; the same place in each ep group), "shard" and "replicate" (the
        same with `shard`), "tied" (first and last stage, where a tied embedding lives twice; alone elsewhere).
        """
        return [list(group) for group in _groups(self, name)]

    def group_of(self, name: str, rank: int) -> list[int]:
        """The group of kind `name` that holds `rank`."""
        self._check_rank(rank)
        return next(group for group in self.groups(name) if rank in group)

    def expect_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that this layout does not multiply out to."""
        if ranks != self.world_size:
            product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
            rest = self.pp * self.cp * self.tp
            fix = f"set layout.dp = {ranks // rest}" if ranks % rest == 0 and ranks >= rest else "change one of the axes"
            raise ValueError(
                f"layout: {product} = {self.world_size} ranks, but {ranks} were started: {fix}, or start {self.world_size}"
            )

    def expect_model(self, *, layers: int, heads: int, kv_heads: int, ffn: int, experts: int = 0) -> None:
        """Refuse a model that this layout cannot cut evenly, naming both numbers."""
        for axis, size, what, count in (
            ("tp", self.tp, "heads", heads),
            ("tp", self.tp, "kv_heads", self.tp if self.tp % kv_heads == 0 else kv_heads),  # fewer are held several times
            ("tp", self.tp, "ffn", ffn),
            ("ep", self.ep, "experts", experts or self.ep),
        ):
            if count % size:
                best = max(d for d in _divisors(size) if count % d == 0)
                raise ValueError(
                    f"layout.{axis} = {size} does not divide model.{what} = {count}: "
                    f"use {axis} = {best}, or a model whose {what} is a multiple of {size}"
                )
        if self.pp > layers:
            raise ValueError(
                f"layout.pp = {self.pp} is more than model.layers = {layers}: use pp <= {layers}, a stage needs a layer"
            )

    def expect_batch(self, *, global_batch: int, seq_len: int) -> None:
        """Refuse a batch of `global_batch` sequences of `seq_len` tokens that leaves a rank with nothing."""
        if global_batch < self.dp:
            raise ValueError(
                f"train.global_batch = {global_batch} is smaller than layout.dp = {self.dp}: some ranks would never see a "
                f"sequence; use a global batch of at least {self.dp}, or dp <= {global_batch}"
            )
        if self.cp > 1 and seq_len % (2 * self.cp):
            raise ValueError(
                f"train.seq_len = {seq_len} does not divide into 2 x cp = {2 * self.cp} zig-zag pieces: "
                f"use a multiple of {2 * self.cp}"
            )
        if self.sp and seq_len % (self.cp * self.tp):
            raise ValueError(
                f"train.seq_len = {seq_len} does not divide into cp x tp = {self.cp} x {self.tp} sequence shards: "
                f"use a multiple of {self.cp * self.tp}, or layout.sp = false"
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: this layout has ranks 0 to {self.world_size - 1}")


@lru_cache(maxsize=256)
def _groups(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    mesh = np.arange(layout.world_size).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    if name == "world":
        rows = mesh.reshape(1, -1)
    elif name in AXES:
        axis = AXES.index(name)
        rows = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])
    elif name == "tied":
        ends = sorted({0, layout.pp - 1})
        rows = [*mesh[ends].reshape(len(ends), -1).T, *mesh[1:-1].reshape(-1, 1)]
    elif name in ("dp_cp", "ep", "expert_dp", "shard", "replicate"):
        places = layout.dp * layout.cp
        rows = mesh.reshape(layout.pp, places, layout.tp).swapaxes(1, 2).reshape(-1, places)
        inner = {"ep": layout.ep, "expert_dp": layout.ep}.get(name, layout.shard_size)
        if name in ("ep", "shard"):  # consecutive places
            rows = rows.reshape(-1, inner)
        elif name in ("expert_dp", "replicate"):  # the same place of each run of consecutive ones
            rows = rows.reshape(-1, places // inner, inner).swapaxes(1, 2).reshape(-1, places // inner)
    else:
        raise ValueError(f"no group is called {name!r}: use one of {', '.join(GROUPS)}")
    return tuple(tuple(int(rank) for rank in row) for row in rows)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
