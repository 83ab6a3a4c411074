"""Expert parallelism: every rank of an ep group holds some of the experts, and tokens travel to them and back.

Lepikhin et al. 2021, "GShard", section 3; the dropless form, whose splits are as uneven as the routing, is that of Gale et al.
2023, "MegaBlocks". The ranks of an ep group hold different tokens and different experts. Each counts how many of its rows
(a row is one choice of one token) go to each expert; the counts travel first, so that everyone knows what will come; then
the rows go to their experts, and come back the same way. An expert's gradient thus holds what all tokens of its ep group did to
it, and is summed over the ranks that hold the same expert (`expert_dp`), not over all of dp x cp: `parameter.over` says so.

With tensor parallelism each expert is cut over tp as a feed-forward is: gate and up by columns, down by rows, one sum after the
results are added up. With sequence parallelism tokens are first gathered over tp, and that sum falls apart into shards.

Bytes that rank i sends by tag `expert`, where n_ij of its rows go to rank j, a row is D elements of e bytes, and forward and
backward are one step's: 2 D e sum_j (n_ij + n_ji), j other than i. It sends n_ij rows out and n_ji results back, and the same
numbers of gradients. Evenly spread, N rows of each rank over n ranks: 4 N D e (n - 1) / n.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from minidist.core import comm, comm_grad
from minidist.core.device import host
from minidist.core.mesh import Group, Mesh
from minidist.core.slices import Box, Slice
from minidist.model.balance import Rows
from minidist.model.config import ModelConfig
from minidist.model.moe import Experts, MoE, clear_bias, even, mix
from minidist.model.transformer import Transformer

HIDDEN = {"gate": 1, "up": 1, "down": 2}
"""a stacked parameter of the experts -> its dim of hidden features, which tp cuts; ep cuts dim 0"""


def apply(model: Transformer, mesh: Mesh, *, sp: bool = False) -> None:
    """Cut the experts of `model` over the ep and tp groups of `mesh`, and send tokens to them. Nothing to do without experts.

    `sp`: the layers get and give shards of the sequence, one for each rank of tp; their routers see these alone, so a router's
    gradient is then a part of a sum over tp. Selection biases are put on the mesh's device.
    """
    ep, tp, cp = (mesh.group(name) for name in ("ep", "tp", "cp"))
    expect_rows(model.cfg, cp.size)
    clear_bias(model, mesh.device)
    for name, layer in model.named_modules():
        if isinstance(layer, MoE):
            if ep.size * tp.size > 1:
                for key in HIDDEN:
                    cut(layer.experts, key, f"{name}.experts.{key}", ep, tp)
                layer.mix = partial(mix_across, ep, tp, sp)
            layer.rows = Shards(cp, tp if sp else None)


def expect_rows(cfg: ModelConfig, cp: int) -> None:
    """Refuse a capacity where rows are cut over cp ranks."""
    if cfg.capacity and cp > 1:
        raise ValueError(
            f"model.capacity = {cfg.capacity} with layout.cp = {cp}: an expert's room is counted along whole rows, which no "
            f"rank has; use model.capacity = 0, or layout.cp = 1"
        )


def cut(experts: Experts, key: str, name: str, ep: Group, tp: Group) -> None:
    """Keep this rank's experts, and of them this rank's hidden features, of one parameter."""
    old, start, shape = experts._parameters[key], [0, 0, 0], list(experts._parameters[key].shape)
    for dim, group in ((0, ep), (HIDDEN[key], tp)):
        assert shape[dim] % group.size == 0, f"{name} {shape} over {group.size} ranks: Layout.expect_model refuses this"
        shape[dim] //= group.size
        start[dim] = group.rank * shape[dim]
    box = Box(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True)))
    part = old.detach()[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].clone()
    new = nn.Parameter(part, requires_grad=old.requires_grad)
    new.slice = Slice(name, tuple(old.shape), (box,))
    if ep.size > 1:
        new.over = "expert_dp"
    setattr(experts, key, new)


def mix_across(ep: Group, tp: Group, sp: bool, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`moe.mix` with experts on other ranks: x (B,S,D), chosen and weights (B,S,K) -> (B,S,D); under `sp`, shards of S.

    Each rank of tp has a part of every expert's sum, so the weights' gradients are parts too, and are summed as x's are.
    """
    run = partial(exchange, ep) if ep.size > 1 else Experts.forward
    if sp:
        x, weights = (comm_grad.all_gather(part, tp, dim=1) for part in (x, weights))
        chosen = comm.all_gather(chosen, tp, dim=1)
        return comm_grad.reduce_scatter(mix(experts, x, chosen, weights, run), tp, dim=1)
    if tp.size == 1:
        return mix(experts, x, chosen, weights, run)
    x, weights = (comm_grad.fan_out(same, tp) for same in (x, weights))
    return comm_grad.fan_in(mix(experts, x, chosen, weights, run), tp)


def exchange(group: Group, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Bring rows to their experts' ranks, through the experts, and back.

    rows (N,D), sorted by expert; counts (E,), how many go to each of all experts -> (N,D), in the order of rows. Ranks and
    experts without rows take part as any other.
    """
    mine = counts.view(group.size, -1)  # (ranks, experts of each)
    theirs = comm.all_to_all(mine, group, tag="control")  # (ranks, my experts): what each rank has for them
    shares = [even(len(rows), group.size)] * 2
    send, recv = host(torch.stack((mine.sum(1), theirs.sum(1))), expect=shares)
    came = comm_grad.all_to_all(rows, group, send, recv)  # by rank, and from each by expert
    expert = torch.arange(theirs.shape[1], device=rows.device).repeat(group.size)
    order = expert.repeat_interleave(theirs.flatten(), output_size=len(came)).argsort(stable=True)  # by expert
    done = experts(came.index_select(0, order), theirs.sum(0))
    return comm_grad.all_to_all(torch.empty_like(came).index_copy(0, order, done), group, recv, send)


class Shards(Rows):
    """Rows cut over cp, and under sequence parallelism over tp too, in shards of equal length."""

    def __init__(self, cp: Group, tp: Group | None):
        """`tp` None: every rank of tp sees all tokens of its rank of cp."""
        self.cp, self.tp = cp, tp
        self.counted = cp.rank == 0

    def part(self, x: Tensor) -> Tensor:
        """(B,S,...) -> this rank's shard (B,S/tp,...)."""
        return x.chunk(self.tp.size, 1)[self.tp.rank] if self.tp else x

    def whole(self, x: Tensor) -> Tensor:
        """All shards of tp side by side."""
        return comm.all_gather(x, self.tp, dim=1) if self.tp else x

    def total(self, x: Tensor) -> Tensor:
        """Summed over the ranks that see other tokens of the same rows. Each of them has the same loss then: it counts once."""
        for group in (self.cp, self.tp):
            if group and group.size > 1:
                x = comm_grad.fan_in(x, group, tag="control")
        return x
