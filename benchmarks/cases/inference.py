"""What networks put out, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from diffnet import DiffusionNet, Operators
from diffnet.benchmarks.cases.train_step import BLOCKS, CLASSES, INPUTS, captured
from diffnet.benchmarks.harness.arithmetic import Arithmetic, arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import compiled, first_made, forget_compiled, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.original.network import original_meshes, original_network


@benchmark("inference", metrics=("ms", "MB"))
def inference(options: Options) -> Iterator[Case]:
    """The outputs of a network of 4 blocks, without gradients, on one mesh.

    The original's form computes in float32, rounded to tf32 where dtype is tf32; the others under autocast to dtype.
    """
    device, k = options.device, options.k or 128
    for dtype in options.dtypes or ("bf16", "tf32"):
        kind = arithmetic(dtype)
        for c in options.widths or (128,):
            for v in options.vertices or (2_000, 10_000, 50_000, 200_000, 1_000_000):
                forget_compiled()
                operators, x = synthetic_operators(v, k, device), torch.randn(v, INPUTS, device=device)
                make = partial(_network, kind, c, x, operators)
                peers = {
                    "original": first_made(partial(_original, c, x, operators)),
                    "plain": first_made(partial(make, "torch")),
                    "triton": on_kernels(device, first_made(partial(make, "triton"))),
                    "triton-captured": on_kernels(device, first_made(partial(captured, device, make))),
                }
                if options.compile:
                    peers["original-compiled"] = first_made(partial(_original, c, x, operators, compile=True))
                    peers["plain-compiled"] = first_made(partial(make, "torch", compile=True))
                # Of a block and vertex: both ways of the spectral transform, gradient features, MLP; the bytes are
                # those of one in which all but the sum over vertices is done in one pass.
                flops = float(BLOCKS * v * (4 * k * c + 12 * k * c + 10 * c * c))
                moved = float(BLOCKS * v * kind.bytes * (4 * k + 3 * c))
                with matmul_precision(kind.tf32):
                    yield Case(
                        {"dtype": dtype, "k": k, "width": c, "vertices": v}, peers, flops=flops, bytes=moved, kind=kind
                    )


def _network(
    kind: Arithmetic, width: int, x: Tensor, operators: Operators, backend: str, compile: bool = False
) -> Callable[[], Tensor]:
    network = DiffusionNet(INPUTS, CLASSES, width=width, blocks=BLOCKS, backend=backend)  # type: ignore[arg-type]
    network.to(x.device).eval()
    rounded = operators.with_basis_dtype(kind.storage)
    model = compiled(network) if compile else network

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, kind.storage, enabled=kind.storage != torch.float32):
            return model(x, rounded)

    return run


def _original(width: int, x: Tensor, operators: Operators, compile: bool = False) -> Callable[[], Tensor]:
    network = DiffusionNet(INPUTS, CLASSES, width=width, blocks=BLOCKS, backend="torch").to(x.device).eval()
    meshes, lengths = original_meshes(operators), list(operators.lengths)
    forward = partial(original_network, network)
    model = compiled(forward) if compile else forward

    def run() -> Tensor:
        with torch.no_grad():
            return model(x, meshes, lengths)

    return run
