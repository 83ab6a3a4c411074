"""Backward in two: a linear layer's input gradient at once, its weights' gradient whenever nothing is waiting for time.

For y = x W', backward needs g W (the input's gradient, for which the layer before waits) and g' x (the weights', for which
nobody waits before the end of the step). Two techniques live on that, by this one mechanism. Tensor parallelism launches the
sum of the input's gradient over its ranks and works on the weights' while it travels (`parallel.tensor`). A pipeline sends the
input's gradient to the stage before and puts the weights' off until it would idle (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 2): then autograd gets None for these weights, and what is left to do, g and x, lies in a `Later`.

Linear layers alone are split. Norms, routers, biases, embeddings and stacked experts finish with the input's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Later:
    """Weight gradients that were put off: in the order in which backward came by, which is that of their computation."""

    def __init__(self):
        self._off = False
        self._tasks: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    @contextmanager
    def putting_off(self) -> Iterator[list[tuple[nn.Parameter, Tensor, Tensor]]]:
        """While a backward for the inputs alone runs. Gives the list in which its tasks are: (weight, g (N,O), x (N,I))."""
        self._off, self._tasks = True, []
        try:
            yield self._tasks
        finally:
            self._off, self._tasks = False, []  # whoever took the list decides how long it lives

    def grads(self, weights: Sequence[nn.Parameter], outputs: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """Gradients of weights (O,I) of one input x (...,I), given those of their outputs (...,O); None where put off."""
        rows = x.flatten(0, -2)
        tasks = [(weight, grad.flatten(0, -2), rows) for weight, grad in zip(weights, outputs, strict=True)]
        if self._off:
            self._tasks += [task for task in tasks if task[0].requires_grad]
            return [None] * len(tasks)
        return [weight_grad(*task) if task[0].requires_grad else None for task in tasks]


def weight_grad(weight: nn.Parameter, grad: Tensor, rows: Tensor) -> Tensor:
    """g' x of a task (weight (O,I), g (N,O), x (N,I)): (O,I)."""
    return grad.T @ rows


def apply(model: nn.Module, later: Later) -> None:
    """Make the plain linear layers of `model` ask `later`. After what cuts layers: it gives them forwards that ask too."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(linear, module, later)


def linear(layer: nn.Linear, later: Later, x: Tensor) -> Tensor:
    """x W' + b, whose weight gradient may be put off: (...,I) -> (...,O)."""
    y = product(x, layer.weight, later)
    return y if layer.bias is None else y + layer.bias


def product(x: Tensor, weight: nn.Parameter, later: Later) -> Tensor:
    """x W' of x (...,I) and W (O,I): (...,O)."""
    return _Linear.apply(x, weight, later)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, later: Later) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.later = weight, later  # the parameter itself: what is saved may come back as another object
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        return of_x, *ctx.later.grads([ctx.weight], [grad], x), None
