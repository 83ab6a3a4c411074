"""`minidist bench pipeline`: our runtime against torch.distributed.pipelining, schedule by schedule, same model and data.

The peer is wired as torch's documentation and torchtitan have it: a PipelineStage a chunk, of the same modules, cut at the same
layers; a loss that is a sum, so `scale_grads=False`; no merged outputs, which nobody asks for; gradients clipped by the norm
over all ranks; AdamW, fused, over what a rank holds. Both sides do MICRO_BATCHES micro-batches a step, the fewest that every
schedule's peer takes on 4 ranks. Torch has no ZB-H1 by that name: its interleaved zero-bubble schedule, ZB1P, is
ZB-H1 where a rank has one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed import pipelining

from minidist import ranks as pool
from minidist.bench import zero
from minidist.bench.measure import COUNTED, Side
from minidist.bench.report import Row, row
from minidist.bench.zero import TIMEOUT_S, WARMUPS, Size, compare, config_of, groups
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.data.batch import Batch
from minidist.model.transformer import Transformer, initialise
from minidist.parallel.pipeline import stages
from minidist.parallel.pipeline.setting import stages_by_rank
from minidist.train.config import Config
from minidist.train.optim import set_lr
from minidist.train.schedule import lr_at

PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",  # with one chunk a rank
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""our schedule -> torch's class"""
MICRO_BATCHES = 8
LOSS_BOUND = 1e-5  # relative, in fp32: sums in another order part by rounding

SIZES = {
    "tiny": Size(layers=4, width=64, ffn=64, vocab=64, rows=1, seq_len=16),
    "small": Size(layers=8, width=128, ffn=352, vocab=256, rows=1, seq_len=32),
    "large": Size(layers=8, width=256, ffn=704, vocab=256, rows=1, seq_len=128),
}
"""small: a good part of a step is launching work and messages; large: most of it is compute; tiny shows that the bench works"""


def check(ranks: int, pairs: int, sizes: str, schedule: str | None = None) -> None:
    """Refuse, before any rank starts, what cannot be measured. ValueError with option, value and remedy."""
    zero.check(ranks, pairs, sizes)
    for size in sizes.split(","):
        most = min(SIZES[size].layers, MICRO_BATCHES) // 2  # every stage has a layer, and a micro-batch at any time
        if ranks > most:
            raise ValueError(f"--ranks {ranks}: with two stages each, the model of size {size} is for {most} at most")
    if schedule not in (None, *PEERS):
        raise ValueError(f"--schedule {schedule}: use one of {', '.join(PEERS)}; leave it out to compare them all")


def run(ranks: int, pairs: int, sizes: str, schedule: str | None = None) -> list[Row]:
    """Compare one schedule, or all, at each of `sizes` ("small,large") on local ranks. Progress goes to standard error.

    Raises report.Unequal, before any time is reported, where the two sides' losses differ.
    """
    rows = []
    for size in sizes.split(","):
        for name in PEERS if schedule is None else (schedule,):
            steps, layout = WARMUPS + pairs + COUNTED, {"pp": ranks, "schedule": name}
            config = config_of(layout, SIZES[size], ranks, steps, MICRO_BATCHES)
            work = (compare, ranks, config, torchs, f"{name}, {size}", pairs)
            seen = pool.run(*work, layout=config.layout, timeout_s=TIMEOUT_S, check=False)
            rows.append(row(name, PEERS[name], size, seen, LOSS_BOUND))
    return rows


def torchs(mesh: Mesh, config: Config, batches: Sequence[Batch]) -> Side:
    """Torch's engine. Only who holds the last stage knows the loss of a step; the mean over the ranks is it, others give 0."""
    model, schedule = peer(mesh, config)
    held, optim = stages_by_rank(config.layout)[mesh.coordinates["pp"]], config.optim
    first, last = 0 in held, stage_count(config) - 1 in held
    settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}  # fused, as ours: torch's fastest
    optimizer = torch.optim.AdamW(groups(model, config), **settings)

    def step(number: int) -> float:
        batch, losses = batches[number], []
        set_lr(optimizer, lr_at(number, config))
        optimizer.zero_grad()
        given = (batch.tokens,) if first else ()
        target = batch.targets if last else None
        schedule.step(*given, positions=batch.positions, target=target, losses=losses, return_outputs=False)
        clip(list(model.parameters()), optim.clip, mesh)
        optimizer.step()
        return host(torch.stack(losses).sum(), expect=0.0) * mesh.world.size if last else 0.0

    return step


def peer(mesh: Mesh, config: Config) -> tuple[nn.Module, Any]:
    """(this rank's part of the model, torch's schedule over its stages)."""
    layout, place = config.layout, mesh.coordinates["pp"]
    plain = Transformer(config.model)
    initialise(plain, config.run.seed)
    cut = stages.cut_of(layout, config.model, stages_by_rank(layout), config.train.seq_len)
    stages.keep(plain, cut, place)
    plain.to(mesh.device)
    tokens = config.train.global_batch * config.train.seq_len  # all of them count

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum") / tokens

    chunks = [
        pipelining.PipelineStage(chunk, number, len(cut.layers), mesh.device, group=mesh.group("pp").handle)
        for number, chunk in zip(cut.stages[place], stages.stages_of(plain, cut, place), strict=True)
    ]
    kind = getattr(pipelining.schedules, PEERS[layout.schedule])
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    return plain, kind(chunks[0] if single else chunks, MICRO_BATCHES, loss_fn=loss, scale_grads=False)


def stage_count(config: Config) -> int:
    """Stages of the whole pipeline."""
    return sum(map(len, stages_by_rank(config.layout)))


def clip(parameters: list[nn.Parameter], limit: float, mesh: Mesh) -> Tensor:
    """Clip by the norm () of the gradients of all ranks, as torchtitan does: no function of torch's sums it over a pipeline."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    square = norm**2
    distributed.all_reduce(square, group=mesh.group("pp").handle)
    nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())
    return square.sqrt()
