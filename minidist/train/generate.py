"""Text from a trained model, one token at a time, the same for the same seed on every machine and layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minidist.core.device import host


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
) -> list[int]:
    """`count` token ids that go on from `prompt` (at least one id), of which the last `context` are looked at.

    `temperature` 0 takes the most likely token; `top_k` > 0 draws among that many most likely ones only. `vocab` bars
    ids that the tokenizer does not have, where the model's vocabulary is padded. No key-value cache: each token runs
    the window anew, which for a small model is quick enough and cannot be wrong.
    """
    if not prompt:
        raise ValueError("prompt: empty, give at least one token to go on from")
    training, device = model.training, next(model.parameters()).device
    model.eval()
    draw = torch.Generator().manual_seed(seed)  # on the CPU, so that a GPU draws the same numbers
    ids = list(prompt)
    for _ in range(count):
        window = torch.tensor([ids[-context:]], device=device)  # (1, S)
        logits = model(window)[0, -1, :vocab].double().cpu()  # (V,)
        ids.append(host(pick(logits, temperature, top_k, draw), expect=0))
    model.train(training)
    return ids[len(prompt) :]


def pick(logits: Tensor, temperature: float, top_k: int, draw: torch.Generator) -> Tensor:
    """One token id, a scalar tensor, out of logits (V,)."""
    if temperature == 0:
        return logits.argmax()
    if top_k:
        kept = logits.topk(min(top_k, len(logits)))
        choice = torch.multinomial((kept.values / temperature).softmax(0), 1, generator=draw)
        return kept.indices[choice[0]]
    return torch.multinomial((logits / temperature).softmax(0), 1, generator=draw)[0]
