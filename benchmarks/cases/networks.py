"""The inputs and peers that the benchmarks of whole networks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diffnet import DiffusionNet, Operators
from diffnet.benchmarks.harness.captured import CapturedStep
from diffnet.benchmarks.harness.peers import compiled, first_made, on_kernels
from diffnet.benchmarks.harness.registry import Options, Run, Unavailable
from diffnet.benchmarks.harness.sweep import Size, sweep
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.original.network import original_meshes, original_network
from diffnet.ops import Backend

BLOCKS, INPUTS, CLASSES = 4, 16, 8


@dataclass(frozen=True)
class Inputs:
    """The inputs of a network on one mesh: operators, features x (V, 16) and labels (V,)."""

    size: Size
    operators: Operators
    x: Tensor
    labels: Tensor

    def network(self, backend: Backend) -> DiffusionNet:
        """A network of 4 blocks, in training mode."""
        return DiffusionNet(INPUTS, CLASSES, width=self.size.width, blocks=BLOCKS, backend=backend).to(self.x.device)

    def forward(self, network: DiffusionNet, compile: bool) -> Callable[[], Tensor]:
        """The outputs of a network under autocast to the storage dtype."""
        dtype = self.size.storage
        rounded = self.operators.with_basis_dtype(dtype)
        model = compiled(network) if compile else network

        def run() -> Tensor:
            with torch.autocast(self.x.device.type, dtype, enabled=dtype != torch.float32):
                return model(self.x, rounded)

        return run

    def original_forward(self, network: DiffusionNet, compile: bool) -> Callable[[], Tensor]:
        """The outputs of a network, computed by the original's form."""
        meshes, lengths = original_meshes(self.operators), list(self.operators.lengths)
        forward = partial(original_network, network)
        return partial(compiled(forward) if compile else forward, self.x, meshes, lengths)


def network_inputs(options: Options, vertices: tuple[int, ...]) -> Iterator[Inputs]:
    """The inputs of all sizes, by default in bf16 and tf32 at width 128."""
    for size in sweep(options, dtypes=("bf16", "tf32"), widths=(128,), vertices=vertices):
        v, device = size.vertices, size.device
        yield Inputs(
            size,
            synthetic_operators(v, options.k or 128, device),
            torch.randn(v, INPUTS, device=device),
            torch.randint(CLASSES, (v,), device=device),
        )


class MakeRun(Protocol):
    """Builds a function without arguments that computes with a network of a backend."""

    def __call__(self, inputs: Inputs, backend: Backend, compile: bool = False) -> Callable[[], Tensor]: ...


class MakeOriginal(Protocol):
    """Builds a function without arguments that computes by the original's form."""

    def __call__(self, inputs: Inputs, compile: bool = False) -> Callable[[], Tensor]: ...


def network_peers(inputs: Inputs, make: MakeRun, make_original: MakeOriginal, compile: bool) -> dict[str, Run]:
    """The original's form, our network on plain PyTorch and our network on kernels, also captured and compiled."""
    device = inputs.size.device
    peers = {
        "original": first_made(partial(make_original, inputs)),
        "plain": first_made(partial(make, inputs, "torch")),
        "triton": on_kernels(device, first_made(partial(make, inputs, "triton"))),
        "triton-captured": on_kernels(device, first_made(partial(_captured, inputs, make))),
    }
    if compile:
        peers["original-compiled"] = first_made(partial(make_original, inputs, compile=True))
        peers["plain-compiled"] = first_made(partial(make, inputs, "torch", compile=True))
    return peers


def _captured(inputs: Inputs, make: MakeRun) -> Run:
    """The function on kernels as a CUDA graph."""
    if inputs.size.device.type != "cuda":
        raise Unavailable("CUDA graphs need a GPU")
    return CapturedStep(make(inputs, "triton"))
