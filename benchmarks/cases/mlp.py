"""The MLP of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from diffnet.benchmarks.harness.peers import both_passes, compiled, leaf
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.ops import Backend, mlp


@benchmark("mlp", metrics=("GB/s",))
def mlp_cases(options: Options) -> Iterator[Case]:
    """The MLP 3C → C → C → C on [x, x_d, f] with dropout and residual, and all of its gradients."""
    device = options.device
    for size in sweep(options):
        c, v, dtype = size.width, size.vertices, size.storage
        layers = [nn.Linear(width, c).to(device, dtype) for width in (3 * c, c, c)]
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        inputs = [leaf(v, c, device=device, dtype=dtype) for _ in range(3)]
        plain = partial(_block_mlp, "torch")
        forwards = {
            "eager": partial(plain, inputs, weights, biases),
            "triton": partial(_block_mlp, "triton", inputs, weights, biases),
        }
        if options.compile:
            forwards["compiled"] = partial(compiled(plain), inputs, weights, biases)
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


def _block_mlp(
    backend: Backend, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    return mlp(inputs, weights, biases, dropout=0.5, residual=inputs[0], backend=backend)
