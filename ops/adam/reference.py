"""Plain PyTorch form of the update of Adam."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AdamTensors(NamedTuple):
    """What an update reads and changes, with an entry for each parameter.

    means, squares: the moving averages of gradients and of their squares
    steps: (), the numbers of updates so far
    averages: of the weights, or None
    """

    parameters: list[Tensor]
    grads: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]
    averages: list[Tensor] | None = None


class AdamOptions(NamedTuple):
    """Options of Adam as in PyTorch.

    decoupled: whether the decay of the weights is that of AdamW
    average_decay: see `WeightAverage`
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    average_decay: float = 0.0


@torch.no_grad()
def adam_reference(tensors: AdamTensors, rate: Tensor, options: AdamOptions) -> None:
    """Update parameters in place. rate: (), the learning rate (Kingma & Ba 2015; Loshchilov & Hutter 2019)"""
    beta1, beta2 = options.betas
    for i, (p, grad, mean, square, step) in enumerate(zip(*tensors[:5], strict=True)):
        step += 1
        if options.decoupled:
            p -= rate * options.weight_decay * p
        else:
            grad = grad + options.weight_decay * p
        mean.lerp_(grad, 1 - beta1)
        square.lerp_(grad * grad, 1 - beta2)
        root = (square / (1 - beta2**step)).sqrt()
        p -= rate * mean / (1 - beta1**step) / (root + options.eps)
        if tensors.averages is not None:
            tensors.averages[i].lerp_(p, 1 - options.average_decay)
