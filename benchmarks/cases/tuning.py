"""Kernels with other tile sizes than their own, for changes to the tables of tile sizes in `ops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from diffnet.benchmarks.harness.arithmetic import Arithmetic, arithmetic, matmul_precision
from diffnet.benchmarks.harness.patterns import mesh_pattern, moved_bytes
from diffnet.benchmarks.harness.peers import on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, benchmark
from diffnet.ops import Pattern
from diffnet.ops.common.precision import dot_precision
from diffnet.ops.sparse.pattern import csr_arrays

# Rows, eigenpairs (or inputs) and channels of a tile; warps; pipeline stages. Each benchmark adds the number of
# programs per multiprocessor. All tiles fit Hopper's shared memory at K = 128 and spill a few registers at most.
FORWARD = {
    "bf16": [(64, 128, 64, 4, 1), (64, 128, 64, 4, 2), (128, 128, 64, 8, 1), (128, 128, 32, 4, 2), (64, 64, 64, 4, 2)],
    "tf32": [
        *((64, 32, 64, 4, 3), (64, 32, 64, 4, 2), (128, 32, 64, 8, 3), (128, 32, 64, 8, 2)),
        *((64, 32, 32, 4, 3), (128, 32, 32, 8, 3), (64, 64, 32, 4, 2)),
    ],
    "fp32": [(64, 32, 32, 4, 3), (64, 32, 32, 4, 2), (64, 32, 64, 4, 2), (128, 32, 64, 8, 2), (64, 16, 64, 4, 3)],
}
BACKWARD = {
    "bf16": [(64, 128, 32, 4, 2), (64, 128, 32, 4, 3), (128, 128, 32, 8, 1), (128, 128, 64, 8, 1), (64, 64, 32, 4, 2)],
    "tf32": [
        *((32, 128, 128, 8, 2), (32, 128, 64, 8, 3), (32, 128, 64, 8, 2)),
        *((32, 64, 64, 4, 3), (32, 64, 64, 4, 2), (32, 64, 128, 8, 2), (64, 64, 64, 4, 2)),
    ],
    "fp32": [(32, 64, 128, 4, 3), (32, 64, 128, 4, 2), (32, 128, 128, 8, 3), (64, 128, 128, 8, 2), (32, 128, 64, 8, 3)],
}
PROJECT = {
    "bf16": [
        (64, 128, 128, 8, 3),
        (64, 128, 128, 8, 4),
        (128, 128, 128, 8, 3),
        (64, 128, 256, 8, 4),
        (64, 128, 64, 4, 4),
        (32, 128, 128, 8, 4),
    ],
    "tf32": [
        *((32, 128, 128, 8, 4), (32, 128, 128, 8, 3), (64, 128, 128, 8, 2)),
        *((32, 128, 64, 4, 3), (64, 128, 64, 4, 2), (64, 64, 64, 4, 3)),
    ],
    "fp32": [(32, 64, 128, 4, 3), (32, 128, 128, 8, 3), (64, 128, 128, 8, 2), (32, 64, 64, 4, 3)],
}
EVALUATE = {
    "bf16": [(64, 128, 128, 4, 3), (64, 128, 128, 8, 3), (64, 128, 64, 4, 3), (128, 128, 64, 4, 2)],
    "tf32": [
        *((64, 128, 64, 4, 2), (64, 128, 64, 4, 1), (128, 128, 64, 8, 2)),
        *((64, 128, 128, 4, 1), (64, 128, 32, 4, 2), (64, 64, 64, 4, 2)),
    ],
    "fp32": [(64, 128, 64, 4, 2), (64, 128, 64, 4, 1), (64, 64, 64, 4, 2), (64, 32, 64, 4, 3)],
}
LINEAR = {
    "bf16": [
        (128, 64, 128, 8, 3),
        (128, 128, 128, 8, 2),
        (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 4),
        (128, 64, 64, 4, 3),
    ],
    "tf32": [
        *((128, 64, 128, 8, 3), (128, 64, 128, 8, 2), (128, 32, 128, 8, 3), (128, 32, 128, 8, 4)),
        *((64, 64, 128, 4, 3), (64, 64, 128, 4, 2), (64, 32, 128, 4, 3), (64, 32, 128, 4, 4)),
    ],
    "fp32": [(64, 32, 128, 4, 3), (64, 32, 128, 4, 2), (128, 32, 128, 8, 3), (64, 64, 128, 4, 2), (64, 32, 64, 4, 3)],
}
# In these two tables a tile holds all channels. Some of the tiles are too large for 128 channels.
MLP_FORWARD = {
    "bf16": [(64, 64, 128, 4, 2), (64, 64, 128, 4, 3), (64, 32, 128, 4, 3), (32, 64, 128, 4, 3), (128, 64, 128, 8, 3)],
    "tf32": [(64, 32, 128, 4, 2), (64, 32, 128, 4, 3), (64, 64, 128, 4, 2), (32, 32, 128, 4, 3), (64, 32, 128, 8, 3)],
    "fp32": [(64, 64, 128, 4, 2), (64, 32, 128, 4, 2), (64, 32, 128, 4, 3)],
}
MLP_BACKWARD = {
    "bf16": [(32, 128, 128, 4, 3), (32, 128, 128, 8, 3), (64, 128, 128, 4, 2), (64, 128, 128, 4, 3)],
    "tf32": [(32, 128, 128, 4, 2), (32, 128, 128, 8, 3), (64, 128, 128, 4, 1), (64, 128, 128, 4, 3)],
    "fp32": [(64, 128, 128, 4, 3), (64, 128, 128, 4, 1), (32, 128, 128, 4, 3)],
}
WEIGHTS = {
    "bf16": [
        (64, 128, 128, 8, 4),
        (64, 128, 128, 8, 3),
        (32, 128, 128, 8, 4),
        (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 3),
    ],
    "tf32": [(32, 128, 128, 8, 3), (32, 64, 128, 4, 3), (32, 64, 64, 4, 4)],
    "fp32": [(32, 64, 128, 4, 3), (32, 128, 128, 8, 3), (64, 128, 128, 8, 2), (32, 64, 64, 4, 3)],
}
# Programs per multiprocessor, registers per thread, and the entries gathered together: in the first step, and later.
WALKS = [
    (programs, registers, first, unroll)
    for programs, registers in ((32, 64), (28, 72), (24, 80), (20, 96), (16, 128))
    for first, unroll in ((7, 2), (4, 4), (8, 4))
]
# Bytes and entries that a program gathers together, and its warps.
GATHERINGS = [
    *((4096, 8, 4), (4096, 2, 4), (2048, 4, 2), (2048, 8, 2), (2048, 4, 4)),
    *((8192, 4, 4), (8192, 4, 8), (8192, 2, 8), (16384, 2, 8)),
]


# A function that launches a kernel with a tiling, its operations, and the bytes it must move.
Made: TypeAlias = tuple[Callable[..., object], float, float]
# Makes these for a device, an arithmetic, V, K and C.
Make: TypeAlias = Callable[[torch.device, Arithmetic, int, int, int], Made]


def _cases(
    options: Options,
    name: str,
    candidates: dict[str, list[tuple[int, int, int, int, int]]],
    programs: tuple[int, ...],
    make: Make,
    widths: tuple[int, ...] = (128, 256),
) -> Iterator[Case]:
    device, k = options.device, options.k or 128
    for dtype in options.dtypes or ("bf16", "tf32"):
        kind = arithmetic(dtype)
        listed = candidates["bf16" if kind.storage.itemsize == 2 else dtype]
        for c in options.widths or widths:
            for v in options.vertices or (2_000, 50_000, 524_288):
                run, flops, moved = make(device, kind, v, k, c)
                peers = {
                    f"{v_}x{k_}x{c_}-w{warps}-s{stages}-p{p}": on_kernels(
                        device, partial(_with_tiling, run, (v_, k_, c_, warps, stages, p))
                    )
                    for v_, k_, c_, warps, stages in listed
                    for p in programs
                }
                with matmul_precision(kind.tf32):
                    yield Case(
                        {"kernel": name, "dtype": dtype, "k": k, "width": c, "vertices": v},
                        {"table": on_kernels(device, partial(run, tiling=None)), **peers},
                        flops=flops,
                        bytes=moved,
                        kind=kind,
                    )


def _with_tiling(run: Callable[..., object], sizes: tuple[int, int, int, int, int, int]) -> object:
    from diffnet.ops.common.launch import Tiling

    return run(tiling=Tiling(*sizes))


def _random(device: torch.device, kind: Arithmetic, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(kind.storage)


@benchmark("tune-gradient-features-forward", metrics=("TFLOP/s",))
def tune_forward(options: Options) -> Iterator[Case]:
    """Tiles of the forward of gradient features, together with x_d."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        table = _random(device, kind, 3, 1, k, c)
        evecs, gradient_evecs = _random(device, kind, v, k), _random(device, kind, 2, v, k)
        ptr = torch.tensor([0, v], device=device)

        def run(tiling: object) -> object:
            from diffnet.ops.common.matmul import operands
            from diffnet.ops.gradient_features.kernels import forward

            (split,) = operands([table], table.dtype, dot_precision(table))
            return forward(split, evecs, gradient_evecs, ptr, tiling)  # type: ignore[arg-type]

        return run, 14.0 * v * k * c, float(kind.bytes * v * (3 * k + 2 * c))

    yield from _cases(options, "forward", FORWARD, (2, 4, 8), make)


@benchmark("tune-gradient-features-backward", metrics=("TFLOP/s",))
def tune_backward(options: Options) -> Iterator[Case]:
    """Tiles of the backward of gradient features."""
    yield from _cases(options, "backward", BACKWARD, (1, 2, 4), _backward("backward", 24.0, 1))


@benchmark("tune-gradient-features-derivatives", metrics=("TFLOP/s",))
def tune_derivatives(options: Options) -> Iterator[Case]:
    """Tiles of the first half of the backward of gradient features, with float32 in parts.

    `tune-gradient-features-backward` measures the second half.
    """
    in_parts = tuple(dtype for dtype in options.dtypes or ("tf32", "fp32") if dtype in ("tf32", "fp32"))
    if in_parts:
        options = replace(options, dtypes=in_parts)
        yield from _cases(options, "derivatives", FORWARD, (2, 4, 8), _backward("derivatives", 12.0, 5))


def _backward(name: str, flops: float, columns: int) -> Make:
    """Make a function of the backward by name.

    flops: its operations per vertex, eigenpair and channel
    columns: the number of V × C matrices it moves
    """

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        table = _random(device, kind, 3, 1, k, c)
        grad, gradient_evecs = _random(device, kind, v, c), _random(device, kind, 2, v, k)
        ptr = torch.tensor([0, v], device=device)

        def run(tiling: object) -> object:
            from diffnet.ops.common.matmul import operands
            from diffnet.ops.gradient_features import kernels as gradient_features

            (split,) = operands([table], table.dtype, dot_precision(table))
            return getattr(gradient_features, name)(grad, split, gradient_evecs, ptr, tiling)

        return run, flops * v * k * c, float(kind.bytes * v * (2 * k + columns * c))

    return make


@benchmark("tune-project", metrics=("GB/s",))
def tune_project(options: Options) -> Iterator[Case]:
    """Tiles of Φᵀ(m ∘ x)."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        x, evecs, mass = _random(device, kind, v, c), _random(device, kind, v, k), torch.rand(v, device=device)
        ptr = torch.tensor([0, v], device=device)

        def run(tiling: object) -> object:
            from diffnet.ops.spectral.kernels import project

            return project(x, evecs, mass, ptr, tiling)  # type: ignore[arg-type]

        return run, 2.0 * v * k * c, float(kind.bytes * v * (k + c))

    yield from _cases(options, "project", PROJECT, (1, 2, 4), make)


@benchmark("tune-evaluate", metrics=("GB/s",))
def tune_evaluate(options: Options) -> Iterator[Case]:
    """Tiles of m ∘ (Φ D)."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        d, evecs, mass = torch.randn(1, k, c, device=device), _random(device, kind, v, k), torch.rand(v, device=device)
        ptr = torch.tensor([0, v], device=device)

        def run(tiling: object) -> object:
            from diffnet.ops.spectral.kernels import evaluate

            return evaluate(d, evecs, mass, ptr, tiling)  # type: ignore[arg-type]

        return run, 2.0 * v * k * c, float(kind.bytes * v * (k + c))

    yield from _cases(options, "evaluate", EVALUATE, (2, 4, 8), make)


@benchmark("tune-linear", metrics=("GB/s",))
def tune_linear(options: Options) -> Iterator[Case]:
    """Tiles of the first layer of a block's MLP, with dropout."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        parts = [_random(device, kind, v, c) for _ in range(3)]
        weight, bias = _random(device, kind, c, 3 * c), torch.randn(c, device=device)
        seed = torch.randint(2**31, (2,), device=device)

        def run(tiling: object) -> object:
            from diffnet.ops.common.matmul import operands
            from diffnet.ops.mlp.linear_kernels import linear

            (w,) = operands([weight], weight.dtype, dot_precision(weight))
            return linear(parts, w, bias, activation=True, dropout=0.5, seed=seed, tiling=tiling)  # type: ignore[arg-type]

        return run, 6.0 * v * c * c, float(kind.bytes * v * 4 * c)

    yield from _cases(options, "linear", LINEAR, (1,), make)


@benchmark("tune-mlp-forward", metrics=("GB/s",))
def tune_mlp_forward(options: Options) -> Iterator[Case]:
    """Tiles of a block's MLP in one kernel, without dropout."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        inputs, weights = _block_mlp(device, kind, v, c)
        biases = [torch.randn(c, device=device) for _ in weights]

        def run(tiling: Any) -> object:
            from diffnet.ops.common.matmul import operands
            from diffnet.ops.mlp.kernels import forward

            matrices = operands(weights, weights[0].dtype, dot_precision(weights[0]))
            return forward(inputs, matrices, biases, inputs[0], 0.0, None, False, _all_channels(tiling, c))

        return run, 10.0 * v * c * c, float(kind.bytes * v * 4 * c)

    yield from _cases(options, "mlp forward", MLP_FORWARD, (1,), make, (32, 64, 128))


@benchmark("tune-mlp-backward", metrics=("GB/s",))
def tune_mlp_backward(options: Options) -> Iterator[Case]:
    """Tiles of the backward of a block's MLP in one kernel, without the gradients of weights."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        inputs, weights = _block_mlp(device, kind, v, c)

        def run(tiling: Any) -> object:
            from diffnet.ops.common.matmul import operands
            from diffnet.ops.mlp.kernels import backward

            matrices = operands(weights, weights[0].dtype, dot_precision(weights[0]))
            return backward(inputs[0], inputs, matrices, inputs[1:], True, 0.5, True, _all_channels(tiling, c))

        return run, 10.0 * v * c * c, float(kind.bytes * v * 8 * c)

    yield from _cases(options, "mlp backward", MLP_BACKWARD, (1, 2, 3), make, (32, 64, 128))


def _block_mlp(device: torch.device, kind: Arithmetic, v: int, c: int) -> tuple[list[Tensor], list[Tensor]]:
    weights = [_random(device, kind, c, inputs * c) for inputs in (3, 1, 1)]
    return [_random(device, kind, v, c) for _ in range(3)], weights


def _all_channels(tiling: Any, c: int) -> Any:
    from diffnet.ops.common.launch import tile

    return tiling and tiling._replace(c=tile(c, tiling.c), k=tile(c, tiling.k))


@benchmark("tune-weight-gradients", metrics=("GB/s",))
def tune_weight_gradients(options: Options) -> Iterator[Case]:
    """Tiles of the gradients of the weights of a block's MLP."""

    def make(device: torch.device, kind: Arithmetic, v: int, k: int, c: int) -> Made:
        grads, inputs, hidden = ([_random(device, kind, v, c) for _ in range(n)] for n in (3, 3, 2))

        def run(tiling: object) -> object:
            from diffnet.ops.mlp.weight_gradient_kernels import weight_gradients

            return weight_gradients(inputs, hidden, grads, tiling)  # type: ignore[arg-type]

        return run, 10.0 * v * c * c, float(kind.bytes * v * 8 * c)

    yield from _cases(options, "weight gradients", WEIGHTS, (1, 2), make)


@benchmark("tune-spmm", metrics=("GB/s",))
def tune_spmm(options: Options) -> Iterator[Case]:
    """How programs walk along the rows in sparse times dense, for one and two sets of values."""

    def make(pattern: Pattern, kind: Arithmetic, sets: int, c: int) -> Callable[..., object]:
        values = _random(pattern.device, kind, sets, pattern.nnz)
        x = _random(pattern.device, kind, 1, pattern.columns, c)

        def run(*sizes: int) -> object:
            from diffnet.ops.sparse import spmm_kernels

            walk = spmm_kernels.Walk(*sizes) if sizes else None
            return spmm_kernels.spmm(csr_arrays(pattern, True), values, x, walk=walk)

        return run

    names = {"{}-r{}-{}-{}".format(*sizes): sizes for sizes in WALKS}
    yield from _sparse_cases(options, "spmm", names, make)


@benchmark("tune-sddmm", metrics=("GB/s",))
def tune_sddmm(options: Options) -> Iterator[Case]:
    """How programs gather in dense times dense at the entries of a pattern, for one and two sets of values."""

    def make(pattern: Pattern, kind: Arithmetic, sets: int, c: int) -> Callable[..., object]:
        a = _random(pattern.device, kind, sets, pattern.shape[0], c)
        b = _random(pattern.device, kind, 1, pattern.columns, c)

        def run(*sizes: int) -> object:
            from diffnet.ops.sparse import sddmm_kernels

            return sddmm_kernels.sddmm(csr_arrays(pattern, True), a, b, sddmm_kernels.Gathering(*sizes))

        return run

    names = {"{}B-u{}-w{}".format(*sizes): sizes for sizes in GATHERINGS}
    yield from _sparse_cases(options, "sddmm", names, make)


def _sparse_cases(
    options: Options,
    name: str,
    listed: Mapping[str, tuple[int, ...]],
    make: Callable[[Pattern, Arithmetic, int, int], Callable[..., object]],
) -> Iterator[Case]:
    device = options.device
    for v in options.vertices or (1_000_000,):
        pattern = mesh_pattern(v, "local", device)
        for dtype in options.dtypes or ("fp32", "bf16"):
            kind = arithmetic(dtype)
            for c in options.widths or (128,):
                for sets in (1, 2):
                    run = make(pattern, kind, sets, c)
                    candidates = {key: on_kernels(device, partial(run, *sizes)) for key, sizes in listed.items()}
                    yield Case(
                        {"kernel": name, "sets": sets, "dtype": dtype, "width": c, "vertices": pattern.columns},
                        {"table": on_kernels(device, run), **candidates},
                        flops=2.0 * sets * pattern.nnz * c,
                        # spmm reads one dense matrix and writes one per set of values. sddmm reads all of them.
                        bytes=moved_bytes(pattern, kind.bytes, values=sets, dense=(1 + sets) * c),
                    )
