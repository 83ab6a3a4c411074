"""`minidist bench tensor`: tensor and sequence parallelism against torch's DTensor, on the same model and data.

The peer is wired as torch's tutorial has it: `parallelize_module` with a plan a block, the vocabulary cut over ranks, and
`loss_parallel`, which never gathers logits either. Under sequence parallelism it keeps what it has gathered for the weight
gradient, as ours does with `layout.sp_regather = false`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as dtensor

from minidist import ranks as pool
from minidist.bench.measure import COUNTED, Side
from minidist.bench.report import Row, row
from minidist.bench.zero import LOSS_BOUND, SIZES, TIMEOUT_S, WARMUPS, check, compare, config_of, groups
from minidist.core.device import host
from minidist.core.mesh import Mesh
from minidist.data.batch import Batch
from minidist.model.transformer import Transformer, initialise
from minidist.train.config import Config
from minidist.train.optim import set_lr
from minidist.train.schedule import lr_at

__all__ = ["WAYS", "check", "run"]

WAYS = {
    "tp": ({}, "DTensor"),
    "tp, sp kept": ({"sp": True, "sp_regather": False}, "DTensor, sequence parallel"),
    "tp, sp": ({"sp": True}, "DTensor, sequence parallel"),
}
"""name -> our settings of the layout, and the peer"""


def run(ranks: int, pairs: int, sizes: str) -> list[Row]:
    """Compare every way at each of `sizes` ("small,large") on local ranks. Progress goes to standard error.

    Raises report.Unequal, before any time is reported, where the two sides' losses differ.
    """
    rows = []
    for size in sizes.split(","):
        for name, (settings, against) in WAYS.items():
            config = config_of({"tp": ranks, **settings}, SIZES[size], ranks, steps=WARMUPS + pairs + COUNTED)
            work = (compare, ranks, config, torchs, f"{name}, {size}", pairs)
            seen = pool.run(*work, layout=config.layout, timeout_s=TIMEOUT_S, check=False)
            rows.append(row(name, against, size, seen, LOSS_BOUND))
    return rows


def torchs(mesh: Mesh, config: Config, batches: Sequence[Batch]) -> Side:
    """Torch's engine; the loss of a step is that of all tokens, the same on every rank."""
    plain = Transformer(config.model)
    initialise(plain, config.run.seed)
    over = init_device_mesh(mesh.device.type, (mesh.world.size,))
    model, optim = plain.to(mesh.device), config.optim
    for block in model.blocks:
        dtensor.parallelize_module(block, over, block_plan(config.layout.sp))
    dtensor.parallelize_module(model, over, ends_plan(config.layout.sp))
    settings = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "fused": True}  # fused, as ours: torch's fastest
    optimizer = torch.optim.AdamW(groups(model, config), **settings)

    def step(number: int) -> float:
        batch = batches[number]
        set_lr(optimizer, lr_at(number, config))
        optimizer.zero_grad()
        with dtensor.loss_parallel():
            logits = model(batch.tokens, batch.positions, batch.documents)
            loss = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten())
            loss.backward()
        clip(list(model.parameters()), config.optim.clip)
        optimizer.step()
        return host(whole(loss.detach()), expect=0.0)

    return step


def block_plan(sp: bool) -> dict[str, dtensor.ParallelStyle]:
    """Torch's plan for one block."""
    columns = {name: dtensor.ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up")}
    if not sp:
        return columns | {name: dtensor.RowwiseParallel() for name in ("attention.o", "ffn.down")}
    rows = {name: dtensor.RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.o", "ffn.down")}
    norms = {name: dtensor.SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    inputs = {
        "attention": dtensor.PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "ffn": dtensor.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    return columns | rows | norms | inputs


def ends_plan(sp: bool) -> dict[str, dtensor.ParallelStyle]:
    """Torch's plan for embedding, last norm and head."""
    hidden = Shard(1) if sp else Replicate()
    plan: dict[str, dtensor.ParallelStyle] = {
        "embedding": dtensor.RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "head": dtensor.ColwiseParallel(input_layouts=hidden, output_layouts=Shard(-1), use_local_output=False),
    }
    return plan | ({"norm": dtensor.SequenceParallel()} if sp else {})


def clip(parameters: list[nn.Parameter], limit: float) -> None:
    """Clip by the norm of all gradients, of which some are cut and some are not; torch takes a norm of one kind only."""
    cut = [p for p in parameters if isinstance(p, DTensor)]
    rest = [p for p in parameters if not isinstance(p, DTensor)]
    norms = [whole(nn.utils.get_total_norm([p.grad for p in some])) for some in (cut, rest) if some]
    norm = torch.stack(norms).norm()
    for some in filter(None, (cut, rest)):
        nn.utils.clip_grads_with_norm_(some, limit, norm)


def whole(x: Tensor) -> Tensor:
    """What a DTensor stands for."""
    return x.full_tensor() if isinstance(x, DTensor) else x
