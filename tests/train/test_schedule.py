"""The learning rate by optimizer step: against torch's own schedulers, unmoved by resume, layout or accumulation."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from minidist.train import config as configs
from minidist.train.schedule import lr_at


def config(*overrides, ranks=1):
    return configs.load("tiny", ["--train.steps=10", "--optim.warmup=3", "--optim.lr=0.5", *overrides], ranks=ranks)


def curve(config, steps=10):
    return [lr_at(step, config) for step in range(steps)]


def test_it_is_torchs_warm_up_and_cosine():
    steps, warmup, lr, low = 10, 3, 0.5, 0.05
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    fall = CosineAnnealingLR(optimizer, T_max=steps - 1 - warmup, eta_min=low)
    both = SequentialLR(optimizer, [rise, fall], milestones=[warmup])
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    assert curve(config("--optim.min_lr_ratio=0.1")) == pytest.approx(theirs, rel=1e-12)


def test_ends_and_corners():
    rates = curve(config("--optim.min_lr_ratio=0.1"), 12)
    assert rates[0] == pytest.approx(0.5 / 3) and rates[2] == rates[3] == 0.5  # the first step moves, the peak is reached
    assert rates[9] == pytest.approx(0.05) and rates[9:] == [rates[9]] * 3  # the last step has the lowest rate, and it stays
    assert curve(config("--optim.warmup=0", "--optim.min_lr_ratio=1")) == [0.5] * 10
    assert curve(config("--optim.warmup=20"))[-1] == pytest.approx(0.5 * 10 / 20)  # a run that ends inside the warm-up
    assert (
        curve(config("--optim.warmup=9"))[-1] == curve(config("--optim.warmup=9"))[8] * configs.load("tiny").optim.min_lr_ratio
    )
    assert lr_at(0, config("--train.steps=1", "--optim.warmup=0")) > 0


@pytest.mark.parametrize("k", range(1, 10))
def test_resume_after_step_k_goes_on_exactly(k):  # C28: the count of steps taken is all the state there is
    resumed = configs.loads(configs.dumps(config()))
    assert [lr_at(step, config()) for step in range(k)] + [lr_at(step, resumed) for step in range(k, 10)] == curve(config())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("micro_batch", [24, 6])
def test_neither_ranks_nor_accumulation_move_it(ranks, micro_batch):  # C29; the loop itself is held to it in test_run.py
    assert curve(config(f"--train.micro_batch={micro_batch}", ranks=ranks)) == curve(config())
