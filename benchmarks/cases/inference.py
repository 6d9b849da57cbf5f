"""Outputs of a network without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from diffnet.benchmarks.cases.matrix_products import matrix_products
from diffnet.benchmarks.cases.networks import BLOCKS, Inputs, network_inputs, network_peers
from diffnet.benchmarks.harness.peers import first_made
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.ops import Backend


@benchmark("inference", metrics=("ms", "MB"))
def inference(options: Options) -> Iterator[Case]:
    """The outputs of a network of 4 blocks, without gradients, on one mesh.

    The original's form computes in float32, or in tf32 if the dtype is tf32. The others run under autocast to the
    dtype.
    """
    k = options.k or 128
    for inputs in network_inputs(options, (2_000, 10_000, 50_000, 200_000, 1_000_000)):
        size = inputs.size
        c, v = size.width, size.vertices
        peers = network_peers(inputs, _outputs, _original_outputs, options.compile)
        peers["matrix-products"] = first_made(partial(matrix_products, inputs, backward=False))
        yield Case(
            size.parameters(k=k),
            peers,
            # Per block and vertex: both spectral transforms, gradient features, MLP.
            flops=float(BLOCKS * v * (4 * k * c + 12 * k * c + 10 * c * c)),
            # A block computes everything but the sum over vertices in one pass.
            bytes=float(BLOCKS * v * size.kind.bytes * (4 * k + 3 * c)),
            kind=size.kind,
        )


def _outputs(inputs: Inputs, backend: Backend, compile: bool = False) -> Callable[[], Tensor]:
    return torch.no_grad()(inputs.forward(inputs.network(backend).eval(), compile))


def _original_outputs(inputs: Inputs, compile: bool = False) -> Callable[[], Tensor]:
    return torch.no_grad()(inputs.original_forward(inputs.network("torch").eval(), compile))
