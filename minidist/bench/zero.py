"""`minidist bench zero`: stages 0 to 3 against torch's DDP, ZeroRedundancyOptimizer and FSDP2, on the same model and data.

The peers are wired as their documentation has it, with torch's default settings: fully_shard on every block, then on the root;
the optimizer over the parameters it leaves. Their loss is the mean of a rank's tokens and they average gradients over the
ranks, which is our one division by the tokens of the global batch, since here all ranks have equally many and all count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from minidist import ranks as pool
from minidist.bench.measure import COUNTED, Series, Side, interleave
from minidist.bench.report import Row, row
from minidist.core import comm
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.data.batch import Batch
from minidist.model.transformer import Transformer, initialise
from minidist.train import config as configs
from minidist.train.build import runtime
from minidist.train.config import Config
from minidist.train.optim import set_lr
from minidist.train.schedule import lr_at
from minidist.train.step import Step

PEERS = {0: "DDP", 1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, weights kept", 3: "FSDP2, weights freed"}
WARMUPS = 4  # the first steps make optimizer states and buckets, DDP's second one rebuilds its buckets
LOSS_BOUND = 1e-4  # relative; DESIGN's bound for fp32: sums in another order part by rounding, which AdamW's division enlarges
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Size:
    """A model and how much of the batch each rank runs at once."""

    layers: int
    width: int
    ffn: int
    vocab: int
    rows: int
    """sequences of a rank"""
    seq_len: int


SIZES = {
    "tiny": Size(layers=2, width=64, ffn=64, vocab=64, rows=2, seq_len=16),
    "small": Size(layers=4, width=256, ffn=704, vocab=256, rows=1, seq_len=64),
    "large": Size(layers=4, width=256, ffn=704, vocab=256, rows=12, seq_len=256),
}
"""small: most of a step is communication; large: most of it is compute; tiny shows that the bench works, no more"""


Theirs = Callable[[Mesh, Config, Sequence[Batch]], Side]


def check(ranks: int, pairs: int, sizes: str, stage: int | None = None) -> None:
    """Refuse, before any rank starts, what cannot be measured. ValueError with option, value and remedy."""
    if ranks < 2:
        raise ValueError(f"--ranks {ranks}: give at least 2, one rank has nobody to share anything with")
    if pairs < 1:
        raise ValueError(f"--pairs {pairs}: give at least 1; 10 or more for a spread that says something")
    if stage not in (None, *PEERS):
        raise ValueError(f"--stage {stage}: ZeRO has stages 0, 1, 2 and 3; leave it out to compare them all")
    unknown = [size for size in sizes.split(",") if size not in SIZES]
    if unknown:
        raise ValueError(
            f"--sizes {sizes}: there is no size {unknown[0]!r}, use some of {', '.join(SIZES)}, with commas between"
        )


def run(ranks: int, pairs: int, sizes: str, stage: int | None = None) -> list[Row]:
    """Compare one stage, or all, at each of `sizes` ("small,large") on local ranks. Progress goes to standard error.

    Raises report.Unequal, before any time is reported, where the two sides' losses differ.
    """
    rows = []
    for size in sizes.split(","):
        for one in PEERS if stage is None else (stage,):
            config = config_of({"dp": ranks, "zero": one}, SIZES[size], ranks, steps=WARMUPS + pairs + COUNTED)
            name = f"stage {one}"
            work = (compare, ranks, config, torchs, f"{name}, {size}", pairs)
            seen = pool.run(*work, layout=config.layout, timeout_s=TIMEOUT_S, check=False)
            rows.append(row(name, PEERS[one], size, seen, LOSS_BOUND))
    return rows


def config_of(layout: dict[str, Any], size: Size, ranks: int, steps: int, micro_batches: int = 1) -> Config:
    """fp32 and AdamW as they are by default, at a constant rate; `micro_batches` of `size.rows` sequences on each dp place."""
    heads = size.width // 32
    shape = {
        "layers": size.layers,
        "width": size.width,
        "heads": heads,
        "kv_heads": heads,
        "ffn": size.ffn,
        "vocab": size.vocab,
    }
    rows = size.rows * layout.get("dp", 1) * micro_batches
    batch = {"micro_batch": size.rows, "global_batch": rows, "seq_len": size.seq_len, "steps": steps}
    config = configs.from_dict(
        {
            "model": shape,
            "layout": layout,
            "train": batch,
            "optim": {"warmup": 0, "min_lr_ratio": 1.0},
        }
    )
    configs.check(config, ranks)
    return config


def compare(mesh: Mesh, config: Config, theirs: Theirs, title: str, pairs: int) -> Series:
    """The program of a rank: both sides, in turns. Their loss is the mean over the ranks of what `theirs` returns."""
    place = mesh.coordinates["dp"]
    batches = [batch_of(config, place, number).to(mesh.device) for number in range(config.train.steps)]
    sides = [ours(mesh, config, batches), theirs(mesh, config, batches)]

    def say(text: str) -> None:
        if mesh.rank == 0:
            print(f"{title}: {text}", file=sys.stderr)

    series = interleave(sides, pairs=pairs, warmups=WARMUPS, meet=lambda: comm.barrier(mesh.world), say=say)
    means = torch.tensor(series.losses[1], dtype=torch.float64, device=mesh.device)
    series.losses[1][:] = host(comm.all_reduce(means, mesh.world, tag="control") / mesh.world.size, expect=series.losses[1])
    return series


def batch_of(config: Config, place: int, number: int) -> Batch:
    """The batch of a dp place in step `number`: rows that count, each in its own stride, so that it can be learned."""
    rows = config.train.global_batch // config.layout.dp
    seq_len, vocab = config.train.seq_len, config.model.vocab
    samples = torch.arange(rows) + (number * config.layout.dp + place) * rows
    draw = torch.Generator().manual_seed(int(samples[0]))
    begin, stride = torch.randint(vocab, (rows, 1), generator=draw), torch.randint(1, 4, (rows, 1), generator=draw)
    windows = (begin + stride * torch.arange(seq_len + 1)) % vocab
    return Batch.of(windows.numpy(), samples.numpy(), separator=None)


def ours(mesh: Mesh, config: Config, batches: Sequence[Batch]) -> Side:
    """Our engine; the loss of a step is that of the whole job."""
    step, rows = Step(runtime(mesh, config), mesh, config), config.train.micro_batch
    cut = [[batch.rows(a, a + rows) for a in range(0, len(batch.tokens), rows)] for batch in batches]
    return lambda number: step.run(cut[number]).loss


def torchs(mesh: Mesh, config: Config, batches: Sequence[Batch]) -> Side:
    """Torch's engine for the same stage; the loss of a step is the mean of this rank's tokens."""
    plain = Transformer(config.model)
    initialise(plain, config.run.seed)
    model, optimizer = peer(plain.to(mesh.device), mesh, config)

    def step(number: int) -> float:
        batch = batches[number]
        set_lr(optimizer, lr_at(number, config))
        optimizer.zero_grad()
        logits = model(batch.tokens, batch.positions, batch.documents)
        loss = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        optimizer.step()
        return host(loss.detach(), expect=0.0)

    return step


def peer(model: Transformer, mesh: Mesh, config: Config) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Torch's own way to the stage that the layout names: (model to call, optimizer)."""
    stage, optim = config.layout.zero, config.optim
    settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}  # fused, as ours: torch's fastest
    if stage >= 2:
        over = init_device_mesh(mesh.device.type, (mesh.world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=over, reshard_after_forward=stage == 3)
        fully_shard(model, mesh=over, reshard_after_forward=stage == 3)
        return model, torch.optim.AdamW(groups(model, config), **settings)
    wrapped = DistributedDataParallel(model)
    if stage == 1:
        return wrapped, ZeroRedundancyOptimizer(groups(wrapped, config), optimizer_class=torch.optim.AdamW, **settings)
    return wrapped, torch.optim.AdamW(groups(wrapped, config), **settings)


def groups(model: nn.Module, config: Config) -> list[dict]:
    """Parameter groups as ours: weight decay on matrices only."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
