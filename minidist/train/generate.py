"""Text from a trained model, one token at a time, the same for the same seed on every machine and layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.core import comm
from minidist.core.device import host
from minidist.data.batch import Batch
from minidist.parallel.context import shard
from minidist.parallel.pipeline.runtime import Call, Pipeline


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    vocab: int | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> list[int]:
    """`count` token ids that go on from `prompt` (at least one id), of which the last `context` are looked at.

    `temperature` 0 takes the most likely token; `top_k` > 0 draws among that many most likely ones only. `vocab` bars
    ids that the tokenizer does not have, where the model's vocabulary is padded. No key-value cache: each token runs
    the window anew, which for a small model is quick enough and cannot be wrong. `forward`: window (1,S) -> logits whose last
    row follows it, default the model itself; `last_logits` for one that is cut over ranks.
    """
    if not prompt:
        raise ValueError("prompt: empty, give at least one token to go on from")
    training, device = model.training, next(model.parameters()).device
    model.eval()
    draw = torch.Generator().manual_seed(seed)  # on the CPU, so that a GPU draws the same numbers
    ids = list(prompt)
    for _ in range(count):
        window = torch.tensor([ids[-context:]], device=device)  # (1, S)
        logits = (forward or model)(window)[0, -1, :vocab].double().cpu()  # (V,)
        ids.append(host(pick(logits, temperature, top_k, draw), expect=0))
    model.train(training)
    return ids[len(prompt) :]


def last_logits(pipeline: Pipeline, window: Tensor) -> Tensor:
    """Logits (1,1,V) of the token that follows `window` (1,S), the same on every rank, of a model cut over ranks.

    Sequence shards need a length that divides: the window is filled up at its end, where a causal model cannot look.
    """
    mesh, model = pipeline.mesh, pipeline.zero.model
    layout, last = mesh.layout, window.shape[1] - 1
    multiple = (layout.tp if layout.sp else 1) * (2 * layout.cp if layout.cp > 1 else 1)
    tokens = F.pad(window, (0, -window.shape[1] % multiple))
    batch = Batch.of(F.pad(tokens, (0, 1)).cpu().numpy(), np.zeros(1), separator=None)
    batch = shard(batch, mesh.group("cp"), layout.cp_attention).to(window.device)
    row = torch.zeros(1, 1, model.cfg.vocab, dtype=pipeline.zero.formats.weights, device=window.device)

    def pick_last(logits: Tensor, _: int) -> None:
        whole = model.all_logits(logits)  # (1,S,V)
        row.copy_((whole * (batch.index == last)[:, None]).sum(1, keepdim=True))

    pipeline.forward([Call(batch)], pick_last)
    for name in ("cp", "pp"):  # of each, one rank has it
        comm.all_reduce(row, mesh.group(name), tag="control")
    return row


def pick(logits: Tensor, temperature: float, top_k: int, draw: torch.Generator) -> Tensor:
    """One token id, a scalar tensor, out of logits (V,)."""
    if temperature == 0:
        return logits.argmax()
    if top_k:
        kept = logits.topk(min(top_k, len(logits)))
        choice = torch.multinomial((kept.values / temperature).softmax(0), 1, generator=draw)
        return kept.indices[choice[0]]
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=draw)[0]
