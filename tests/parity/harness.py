"""The parity model, trained twice: by a plain loop that knows nothing of the engine, and by the engine on n ranks.

Idea 1 makes this a proof: float64 and SGD, so a factor anywhere shows as a factor, and nothing (Adam, clipping, a loss curve)
hides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from minidist import ranks
from minidist.core import slices
from minidist.core.layout import Layout
from minidist.data.batch import Batch, split
from minidist.data.tokens import TokenFile
from minidist.data.windows import Windows
from minidist.model import balance
from minidist.model.balance import Routing
from minidist.model.config import ModelConfig
from minidist.model.loss import IGNORE, loss_sum
from minidist.model.moe import rebalance
from minidist.model.transformer import Transformer, initialise
from minidist.parallel.config import Recompute
from minidist.train.config import Config
from minidist.train.sections import Checkpoint, Data, Metrics, Optim, Precision, Run, Train

MODEL = ModelConfig(layers=8, width=48, heads=12, kv_heads=4, ffn=96, vocab=48, dropout=0.1)
SEQ_LEN, STEPS, LR = 16, 4, 0.1


@dataclass
class Trained:
    """What a run leaves: losses and gradient norms by step; gradients of the last step and weights after it, by name, whole."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def token_file(folder) -> TokenFile:
    """Random documents of 3 to 60 tokens, so that windows begin, end and change documents anywhere."""
    draw = np.random.default_rng(7)
    documents = [draw.integers(1, MODEL.vocab, size) for size in draw.integers(3, 60, 120)]
    return TokenFile.build(folder / "parity", documents, vocab=MODEL.vocab, separator=0)


def config(
    global_batch: int = 24,
    micro_batch: int = 24,
    layout: Layout | None = None,
    model: ModelConfig = MODEL,
    seq_len: int = SEQ_LEN,
) -> Config:
    """SGD without momentum or clipping, at a constant rate."""
    return Config(
        run=Run(name="parity", seed=3),
        model=model,
        data=Data(),
        layout=layout or Layout(),
        train=Train(steps=STEPS, global_batch=global_batch, micro_batch=micro_batch, seq_len=seq_len),
        optim=Optim(name="sgd", lr=LR, warmup=0, min_lr_ratio=1.0, weight_decay=0.01, clip=0.0),
        precision=Precision(dtype="float64"),
        recompute=Recompute(),
        checkpoint=Checkpoint(),
        metrics=Metrics(),
    )


def step_batch(windows: Windows, position: int, count: int) -> Batch:
    """Samples position .. position + count - 1 of the stream, with a stretch of targets ignored that differs by row.

    Rows with unequal numbers of valid targets are what tells a sum of sums from a mean of means.
    """
    ids = windows.ids(np.arange(position, position + count))
    batch = Batch.of(windows.read(ids), ids, windows.tokens.separator)
    for row in range(count):
        batch.targets[row, : (position + row) * 5 % windows.seq_len] = IGNORE
    return batch


def one_process(cfg: Config, tokens: TokenFile) -> Trained:
    """The reference: the whole global batch at once through the plain model, and SGD written out."""
    from minidist.core.random import DropoutKey

    with torch.device("meta"):
        model = Transformer(cfg.model)
    model = model.double().to_empty(device="cpu")
    initialise(model, cfg.run.seed)
    windows = Windows(tokens, cfg.train.seq_len, cfg.run.seed)
    losses, norms = [], []
    for step in range(STEPS):
        batch = step_batch(windows, step * cfg.train.global_batch, cfg.train.global_batch)
        key = DropoutKey(cfg.run.seed, step, batch.samples, batch.index)
        valid = batch.targets != IGNORE
        routing = Routing(valid, factor=1.0 / int(valid.sum())) if cfg.model.experts else None
        logits = model(batch.tokens, batch.positions, batch.documents, key, routing)
        loss = loss_sum(logits, batch.targets) / valid.sum()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        norms.append(norm.item())
        for p in model.parameters():
            p.grad *= min(cfg.optim.clip / norm, 1.0) if cfg.optim.clip else 1.0
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                decay = cfg.optim.weight_decay if p.dim() >= 2 else 0.0
                p -= LR * (p.grad + decay * p)
            if cfg.model.bias_rate:
                rebalance(model, balance.loads([routing]))
    return Trained(losses, norms, grads, {name: p.detach().clone() for name, p in model.named_parameters()})


def on_ranks(mesh, cfg: Config, path: str):
    """The program of a rank: losses, local gradients and local weights as (slice, tensor) pairs, and gradient norms."""
    from minidist.train.build import runtime
    from minidist.train.step import Step

    windows = Windows(TokenFile(path), cfg.train.seq_len, cfg.run.seed)
    zero = runtime(mesh, cfg)
    step = Step(zero, mesh, cfg)
    taken = [step.run(micro_batches(mesh, cfg, windows, number)) for number in range(STEPS)]
    held = ([(record, local.clone()) for record, local in some] for some in (zero.gradients(), zero.weights()))
    return [result.loss for result in taken], *held, [result.grad_norm for result in taken]


def micro_batches(mesh, cfg: Config, windows: Windows, number: int) -> list[Batch]:
    """This rank's part of step `number`."""
    group, start = mesh.group("dp"), number * cfg.train.global_batch
    whole = step_batch(windows, start, cfg.train.global_batch)
    places = split(start, group.rank, group.size, cfg.train.global_batch, cfg.train.micro_batch)
    return [whole.rows(p.start - start, p.stop - start) if len(p) else Batch.empty(1, cfg.train.seq_len) for p in places]


def whole(results: list, which: int) -> dict[str, torch.Tensor]:
    """Whole tensors by name from what the ranks hold: what owners hold, after checking that replicas are equal to it."""
    owned = [(record, local) for rank, result in enumerate(results) for record, local in result[which] if record.owner == rank]
    found = {name: slices.assemble(pieces) for name, pieces in slices.by_name(owned)}
    for rank, result in enumerate(results):
        for record, local in result[which]:
            same = slices.extract(record, found[record.name])
            assert torch.equal(same, local.flatten()), f"rank {rank}: its replica of {record.name} differs from the owner's"
    return found


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """max|a-b| / max|b| over the tensors, each by its own maximum; the names must be the same. NaN if any of them has one."""
    assert a.keys() == b.keys()
    return largest((a[name] - b[name]).abs().max().item() / (b[name].abs().max().item() or 1.0) for name in b)


def largest(errors) -> float:
    """The maximum, or NaN if there is one among them, which `max` may pass over."""
    errors = list(errors)
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def distance(cfg: Config, reference, timeout_s: float = 60.0) -> float:
    """How far training `cfg` on the ranks of its layout leads from `reference(cfg)`, one process's run.

    The largest relative error of the losses and gradient norms of all steps and of gradients and weights after the last, each
    tensor by its own maximum.
    """
    tokens, expected = reference(cfg)
    results = ranks.run(on_ranks, cfg.layout.world_size, cfg, str(tokens.path), layout=cfg.layout, timeout_s=timeout_s)
    numbers = torch.tensor([[losses, norms] for losses, _, _, norms in results], dtype=torch.float64)  # (ranks, 2, steps)
    right = torch.tensor([expected.losses, expected.norms], dtype=torch.float64)
    errors = ((numbers - right) / right).abs().max().item()
    return largest([errors, worst(whole(results, 1), expected.grads), worst(whole(results, 2), expected.weights)])


def compare(cfg: Config, reference, bound: float = 1e-10, timeout_s: float = 60.0) -> float:
    """Train `cfg` on the ranks of its layout and hold it against `reference(cfg)`, one process's run. Gives the error."""
    error = distance(cfg, reference, timeout_s)
    assert error < bound, f"{error:.1e} from one process"
    return error
