"""The matrix products of a network alone, as a bound for its speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from diffnet.benchmarks.loops.workload import BLOCKS, CLASSES, INPUTS, Workload

Product = Callable[[], object]


def matrix_products(work: Workload, backward: bool) -> Callable[[], None]:
    """All dense products of the original's form of the network, one after the other, with outputs allocated before.

    backward: whether the products of the backward follow those of the forward
    """
    size = work.size
    v, c, k = size.vertices, size.width, work.samples[0].operators.k
    random = partial(torch.randn, device=size.device, dtype=size.storage)
    evecs = random(v, k)
    # Of a block: the layers of the MLP, and A_re and A_im, each applied to both components of the gradient.
    block = [(3 * c, c), (c, c), (c, c), *[(c, c)] * 4]
    products = BLOCKS * (_spectral(random, evecs, c) + [p for i, o in block for p in _linear(random, v, i, o, False)])
    products += [p for i, o in ((INPUTS, c), (c, CLASSES)) for p in _linear(random, v, i, o, False)]
    if backward:
        back = [p for i, o in block for p in _linear(random, v, i, o, True)]
        products += BLOCKS * (_spectral(random, evecs, c) + back)
        products += [p for i, o in ((INPUTS, c), (c, CLASSES)) for p in _linear(random, v, i, o, True)]

    def run() -> None:
        for product in products:
            product()

    return run


def _spectral(random: Callable[..., Tensor], evecs: Tensor, c: int) -> list[Product]:
    """Φᵀ x and Φ D, which are also the products of their backward."""
    (v, k), x, coefficients = evecs.shape, random(len(evecs), c), random(evecs.shape[1], c)
    return [
        partial(torch.mm, evecs.mT, x, out=random(k, c)),
        partial(torch.mm, evecs, coefficients, out=random(v, c)),
    ]


def _linear(random: Callable[..., Tensor], v: int, inputs: int, outputs: int, backward: bool) -> list[Product]:
    """x Wᵀ, or its gradients in x and W."""
    x, weight, y = random(v, inputs), random(outputs, inputs), random(v, outputs)
    if not backward:
        return [partial(torch.mm, x, weight.mT, out=y)]
    return [
        partial(torch.mm, y, weight, out=random(v, inputs)),
        partial(torch.mm, y.mT, x, out=random(outputs, inputs)),
    ]
