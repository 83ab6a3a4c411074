"""The summed loss: it adds up over any cut, which a mean does not."""

import torch

from minidist.model.loss import IGNORE, count_valid, loss_sum


def logits_with_loss(losses: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two-class logits (n,2) whose loss for target 0 is exactly each of `losses`."""
    wanted = torch.tensor(losses, dtype=torch.float64)
    logits = torch.stack([torch.zeros_like(wanted), torch.log(torch.expm1(wanted))], -1)  # log(1 + e^x) = loss
    return logits.requires_grad_(), torch.zeros(len(losses), dtype=torch.int64)


def test_unequal_pieces():
    """C01: a piece of 1 token with loss 8 and one of 7 with loss 1 each: 15/8, where the mean of means is 4.5."""
    logits, targets = logits_with_loss([8.0] + [1.0] * 7)
    whole = loss_sum(logits, targets) / count_valid(targets)
    (gradient,) = torch.autograd.grad(whole, logits)
    pieces = [slice(0, 1), slice(1, 8)]
    total = int(count_valid(targets))
    parts = [loss_sum(logits[p], targets[p]) / total for p in pieces]
    for loss in (whole, sum(parts)):
        assert abs(loss.item() - 1.875) < 1e-10
    cut = sum(torch.autograd.grad(part, logits)[0] for part in parts)
    assert torch.allclose(cut, gradient, rtol=0, atol=1e-10)


def test_targets_that_do_not_count():
    """IGNORE adds neither loss nor gradient; a micro-batch of nothing else gives 0 and zero gradients, not nan."""
    logits, targets = logits_with_loss([2.0, 3.0, 5.0])
    targets[1] = IGNORE
    loss = loss_sum(logits, targets)
    loss.backward()
    assert abs(loss.item() - 7.0) < 1e-12 and int(count_valid(targets)) == 2 and (logits.grad[1] == 0).all()
    empty, _ = logits_with_loss([1.0, 2.0])
    nothing = loss_sum(empty, torch.full((2,), IGNORE))
    nothing.backward()
    assert nothing.item() == 0.0 and (empty.grad == 0).all()


def test_low_precision_is_summed_wide():
    """4096 bf16 rows of loss ln 2: a bf16 sum would be off by percents."""
    logits = torch.zeros(4, 1024, 2, dtype=torch.bfloat16)
    loss = loss_sum(logits, torch.zeros(4, 1024, dtype=torch.int64))
    assert loss.dtype == torch.float32 and abs(loss.item() / 4096 - 0.693147) < 1e-5
