"""The MLP of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from diffnet.benchmarks.harness.peers import both_passes, compiled, leaf
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.sweep import sweep
from diffnet.ops import Backend, mlp
from diffnet.ops.common.backend import HAS_TRITON


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
            moved = moved_columns(step, inputs, weights) if HAS_TRITON else columns
            yield Case(
                {"pass": step, **size.parameters()},
                peers,
                flops=v * flops,
                bytes=float(size.kind.bytes * v * c * columns),
                design_bytes={"triton": float(size.kind.bytes * v * c * moved)},
                kind=size.kind,
            )


def moved_columns(step: str, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
    """The matrices (V, C) that our kernels read and write in a pass.

    One kernel for all layers also writes both hidden layers. With a kernel for each layer, the next one reads them.
    The backward reads the hidden layers and writes the gradients before the activations, and the kernel of the weights
    reads all of these and the inputs. On Hopper, the forward also writes signs of the hidden layers, a bit for 16, and
    the backward reads these instead.
    """
    from diffnet.ops.mlp.kernels import backward_tiling, fits_hopper, forward_tiling

    signs = 2 / 16 if fits_hopper(inputs, weights) else 0
    if step == "forward":
        return 6 + signs if forward_tiling(inputs, weights, True) else 4 + 2 + 3
    return ((6 + signs if signs else 8) if backward_tiling(inputs, weights) else 3 + 3 + 5) + 8


def _block_mlp(
    backend: Backend, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    return mlp(inputs, weights, biases, dropout=0.5, residual=inputs[0], backend=backend)
