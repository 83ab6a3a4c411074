"""Backward in two: what is put off, what it gives when it is done, and that nothing else waits."""

import pytest
import torch
from torch import nn

from minidist.parallel import split
from minidist.parallel.split import Later, weight_grad


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)).double()


def plain(net, x):
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()], x.grad.clone()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)


def test_without_a_pipeline_nothing_changes(x):
    expected, of_x = plain(model(), x)
    x.grad, net = None, model()
    split.apply(net, Later())
    found, same = plain(net, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(same, of_x)


def test_linear_weights_wait_and_nothing_else(x):
    (w1, b1, scale, shift, w2), of_x = plain(model(), x)
    x.grad, net, later = None, model(), Later()
    split.apply(net, later)
    loss = net(x).square().sum()
    with later.putting_off() as tasks:
        loss.backward()
    torch.testing.assert_close(x.grad, of_x)
    first, norm, second = net
    assert first.weight.grad is None and second.weight.grad is None
    torch.testing.assert_close([first.bias.grad, norm.weight.grad, norm.bias.grad], [b1, scale, shift])
    assert [task[0] for task in tasks] == [second.weight, first.weight]
    torch.testing.assert_close([weight_grad(*task) for task in tasks], [w2, w1])


def test_a_frozen_weight_leaves_no_task(x):
    net, later = model(), Later()
    net[0].weight.requires_grad_(False)
    split.apply(net, later)
    loss = net(x).square().sum()
    with later.putting_off() as tasks:
        loss.backward()
    assert [task[0] for task in tasks] == [net[2].weight] and x.grad is not None


def test_a_layer_that_was_replaced_is_left_alone(x):
    net = model()
    net[0].forward = lambda x: x[..., :1].expand(2, 4, 7)
    split.apply(net, Later())
    assert net(x).shape == (2, 4, 3) and net[0].forward(x).shape == (2, 4, 7)
