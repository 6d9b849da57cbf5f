"""Whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.benchmarks.cases.matrix_products import matrix_products
from diffnet.benchmarks.cases.networks import BLOCKS, Inputs, network_inputs, network_peers
from diffnet.benchmarks.harness.peers import first_made, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.ops import Backend


@benchmark("train-step", metrics=("ms", "MB"))
def train_step(options: Options) -> Iterator[Case]:
    """A step (forward, cross-entropy, backward, Adam) of a network of 4 blocks with dropout, on one mesh.

    The original's form computes in float32, or in tf32 if the dtype is tf32. The others run under autocast to the
    dtype.
    """
    k = options.k or 128
    for inputs in network_inputs(options, (2_000, 10_000, 50_000, 200_000)):
        size = inputs.size
        c, v = size.width, size.vertices
        peers = network_peers(inputs, _step, _original_step, options.compile)
        peers["matrix-products"] = first_made(partial(matrix_products, inputs, backward=True))
        if options.compile:
            make = partial(_step, inputs, "triton", compile=True)
            peers["triton-compiled"] = on_kernels(size.device, first_made(make))
        yield Case(
            size.parameters(k=k),
            peers,
            # Per block and vertex, forward and backward: both spectral transforms, gradient features, MLP.
            flops=float(BLOCKS * v * (8 * k * c + 36 * k * c + 30 * c * c)),
            # Every part of a block reads its inputs and writes its outputs once.
            bytes=float(BLOCKS * v * size.kind.bytes * (8 * k + 18 * c)),
            kind=size.kind,
        )


def _step(inputs: Inputs, backend: Backend, compile: bool = False) -> Callable[[], Tensor]:
    device = inputs.size.device
    on_gpu = device.type == "cuda"
    network = inputs.network(backend).train()
    optimizer = torch.optim.Adam(
        network.parameters(), lr=torch.tensor(1e-3, device=device), capturable=on_gpu, fused=on_gpu
    )
    forward = inputs.forward(network, compile)

    def loss() -> Tensor:
        # A mean inside PyTorch's loss would sum all vertices on one multiprocessor.
        return F.cross_entropy(forward().float(), inputs.labels, reduction="none").mean()

    return _optimized(optimizer, loss)


def _original_step(inputs: Inputs, compile: bool = False) -> Callable[[], Tensor]:
    network = inputs.network("torch").train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    forward = inputs.original_forward(network, compile)
    return _optimized(optimizer, lambda: F.cross_entropy(forward(), inputs.labels))


def _optimized(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step of the optimizer that returns the loss."""

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value

    return step
