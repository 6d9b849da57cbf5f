"""The MLP of a block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from diffnet.benchmarks.harness.peers import both_passes, compiled, leaf
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.ops import mlp

DROPOUT = 0.5


@benchmark("mlp", metrics=("GB/s",))
def mlp_cases(options: Options) -> Iterator[Case]:
    """The MLP 3C → C → C → C on [x, x_d, f] with dropout and residual, and all of its gradients."""
    device = options.device
    for size in sweep(options):
        c, v, dtype = size.width, size.vertices, size.storage
        layers = [nn.Linear(inputs, c).to(device, dtype) for inputs in (3 * c, c, c)]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        inputs = [leaf(v, c, device=device, dtype=dtype) for _ in range(3)]
        plain = partial(_plain, layers)
        forwards = {
            "eager": partial(plain, *inputs),
            "triton": partial(mlp, inputs, weights, biases, dropout=DROPOUT, residual=inputs[0], backend="triton"),
        }
        if options.compile:
            forwards["compiled"] = partial(compiled(plain), *inputs)
        # The bytes are those of one kernel that keeps nothing between the layers.
        work = {"forward": (10.0 * c * c, 4), "backward": (20.0 * c * c, 7)}
        for step, peers in both_passes(device, forwards, [*inputs, *weights, *biases]):
            flops, columns = work[step]
            yield Case(
                {"pass": step, **size.parameters()},
                peers,
                flops=v * flops,
                bytes=float(size.kind.bytes * v * c * columns),
                kind=size.kind,
            )


def _plain(layers: list[nn.Linear], x: Tensor, diffused: Tensor, features: Tensor) -> Tensor:
    first, *others = layers
    out: Tensor = first(torch.cat([x, diffused, features], dim=-1))
    for layer in others:
        out = layer(nn.functional.dropout(torch.relu(out), DROPOUT))
    return x + out
