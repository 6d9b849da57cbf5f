"""The last layer and the loss of a segmentation with many classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from diffnet.benchmarks.harness.peers import compiled, leaf, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, Run, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.ops import Backend, cross_entropy, mlp

CLASSES = 260


@benchmark("loss-head", metrics=("GB/s",))
def loss_head_cases(options: Options) -> Iterator[Case]:
    """The last layer to 260 classes and the loss, forward and backward.

    The floor assumes that no logits are kept: it counts reading the features and writing their gradients.
    """
    device = options.device
    for size in sweep(options, dtypes=("bf16", "tf32"), widths=(128, 256), vertices=(2_000, 15_000, 50_000, 200_000)):
        c, v = size.width, size.vertices
        layer = nn.Linear(c, CLASSES).to(device, size.storage)
        x, labels = leaf(v, c, device=device, dtype=size.storage), torch.randint(CLASSES, (v,), device=device)
        plain, ours = partial(_loss, layer, "torch"), partial(_loss, layer, "triton")
        peers: dict[str, Run] = {"eager": partial(_gradients, plain, x, labels, layer)}
        if options.compile:
            peers["compiled"] = partial(_gradients, compiled(plain), x, labels, layer)
        peers["triton"] = on_kernels(device, partial(_gradients, ours, x, labels, layer))
        yield Case(
            size.parameters(classes=CLASSES),
            peers,
            flops=6.0 * v * c * CLASSES,
            bytes=2.0 * size.kind.bytes * v * c,
            kind=size.kind,
        )


def _loss(layer: nn.Linear, backend: Backend, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(mlp([x], [layer.weight], [layer.bias], backend=backend), labels, backend=backend).mean()


def _gradients(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor, layer: nn.Linear) -> object:
    return torch.autograd.grad(loss(x, labels), [x, *layer.parameters()])
