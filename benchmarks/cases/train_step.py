"""Whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet import DiffusionNet, Operators
from diffnet.benchmarks.harness.arithmetic import Arithmetic, arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import compiled, first_made, forget_compiled, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, Unavailable, benchmark
from diffnet.benchmarks.harness.synthetic import synthetic_operators
from diffnet.benchmarks.original.network import original_meshes, original_network
from diffnet.train.capture import CapturedStep

BLOCKS, INPUTS, CLASSES = 4, 16, 8


@benchmark("train-step", metrics=("ms", "MB"))
def train_step(options: Options) -> Iterator[Case]:
    """A step (forward, cross-entropy, backward, Adam) of a network of 4 blocks with dropout, on one mesh.

    The original's form computes in float32, rounded to tf32 where dtype is tf32; the others under autocast to dtype.
    """
    device, k = options.device, options.k or 128
    for dtype in options.dtypes or ("bf16", "tf32"):
        kind = arithmetic(dtype)
        for c in options.widths or (128,):
            for v in options.vertices or (2_000, 10_000, 50_000, 200_000):
                forget_compiled()
                operators = synthetic_operators(v, k, device)
                x, labels = torch.randn(v, INPUTS, device=device), torch.randint(CLASSES, (v,), device=device)
                make = partial(_step, kind, c, x, operators, labels)
                original = partial(_original_step, c, x, operators, labels)
                peers = {
                    "original": first_made(original),
                    "plain": first_made(partial(make, "torch")),
                    "triton": on_kernels(device, first_made(partial(make, "triton"))),
                    "triton-captured": on_kernels(device, first_made(partial(captured, device, make))),
                }
                if options.compile:
                    peers["original-compiled"] = first_made(partial(original, compile=True))
                    peers["plain-compiled"] = first_made(partial(make, "torch", compile=True))
                    peers["triton-compiled"] = on_kernels(device, first_made(partial(make, "triton", compile=True)))
                # Of a block and vertex, forward and backward: both ways of the spectral transform, gradient features,
                # MLP; the bytes are those of a block whose every part reads its inputs and writes its outputs once.
                flops = float(BLOCKS * v * (8 * k * c + 36 * k * c + 30 * c * c))
                moved = float(BLOCKS * v * kind.bytes * (8 * k + 18 * c))
                with matmul_precision(kind.tf32):
                    yield Case(
                        {"dtype": dtype, "k": k, "width": c, "vertices": v},
                        peers,
                        flops=flops,
                        bytes=moved,
                        kind=kind,
                    )


def _step(
    kind: Arithmetic,
    width: int,
    x: Tensor,
    operators: Operators,
    labels: Tensor,
    backend: str,
    compile: bool = False,
) -> Callable[[], Tensor]:
    network = DiffusionNet(INPUTS, CLASSES, width=width, blocks=BLOCKS, backend=backend)  # type: ignore[arg-type]
    network.to(x.device).train()
    optimizer = torch.optim.Adam(
        network.parameters(), lr=torch.tensor(1e-3, device=x.device), capturable=x.is_cuda, fused=x.is_cuda
    )
    rounded = operators.with_basis_dtype(kind.storage)
    model = compiled(network) if compile else network

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, kind.storage, enabled=kind.storage != torch.float32):
            logits = model(x, rounded)
        # Reduced by PyTorch's loss itself, one multiprocessor would go through all vertices.
        loss = F.cross_entropy(logits.float(), labels, reduction="none").mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def captured(device: torch.device, make: Callable[[str], Callable[[], Tensor]]) -> Callable[[], object]:
    """What `make` makes of the kernels, as a CUDA graph."""
    if device.type != "cuda":
        raise Unavailable("CUDA graphs need a GPU")
    return CapturedStep(make("triton"))


def _original_step(
    width: int, x: Tensor, operators: Operators, labels: Tensor, compile: bool = False
) -> Callable[[], Tensor]:
    network = DiffusionNet(INPUTS, CLASSES, width=width, blocks=BLOCKS, backend="torch").to(x.device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    meshes, lengths = original_meshes(operators), list(operators.lengths)
    forward = partial(original_network, network)
    if compile:
        forward = partial(compiled(partial(original_network, network)))

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(forward(x, meshes, lengths), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step
