"""The last layer and the loss of a segmentation with many classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import compiled, forget_compiled, leaf, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.ops import Backend, cross_entropy, mlp

CLASSES = 260
VERTICES = (2_000, 15_000, 50_000, 200_000)


@benchmark("loss-head", metrics=("GB/s",))
def loss_head_cases(options: Options) -> Iterator[Case]:
    """The last layer to 260 classes and the loss, forward and backward.

    The floor keeps no logits: features are read, and their gradients written.
    """
    device = options.device
    for dtype in options.dtypes or ("bf16", "tf32"):
        kind = arithmetic(dtype)
        for c in options.widths or (128, 256):
            for v in options.vertices or VERTICES:
                forget_compiled()
                layer = nn.Linear(c, CLASSES).to(device, kind.storage)
                x, labels = leaf(v, c, device=device, dtype=kind.storage), torch.randint(CLASSES, (v,), device=device)
                plain, ours = partial(_loss, layer, "torch"), partial(_loss, layer, "triton")
                peers: dict[str, Callable[[], object]] = {"eager": partial(_gradients, plain, x, labels, layer)}
                if options.compile:
                    peers["compiled"] = partial(_gradients, compiled(plain), x, labels, layer)
                peers["triton"] = on_kernels(device, partial(_gradients, ours, x, labels, layer))
                flops, moved = 6.0 * v * c * CLASSES, 2.0 * kind.bytes * v * c
                with matmul_precision(kind.tf32):
                    yield Case(
                        {"dtype": dtype, "classes": CLASSES, "width": c, "vertices": v},
                        peers,
                        flops=flops,
                        bytes=moved,
                        kind=kind,
                    )


def _loss(layer: nn.Linear, backend: Backend, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(mlp([x], [layer.weight], [layer.bias], backend=backend), labels, backend=backend).mean()


def _gradients(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor, layer: nn.Linear) -> object:
    return torch.autograd.grad(loss(x, labels), [x, *layer.parameters()])
