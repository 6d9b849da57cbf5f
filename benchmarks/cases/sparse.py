"""Products on CSR patterns: meshes in good and bad vertex orders, and rows of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.patterns import ORDERS, Order, mesh_pattern, moved_bytes, skewed_pattern
from diffnet.benchmarks.harness.peers import both_passes, on_kernels, where_implemented
from diffnet.benchmarks.harness.registry import Case, Options, Parameter, benchmark
from diffnet.benchmarks.harness.sweep import Size
from diffnet.ops import Backend, Pattern, SparseMatrix, implicit_diffusion, sddmm, sparse_softmax, spmm

VERTICES = (100_000, 1_000_000)
HEADS = 4


def pattern_sizes(options: Options, pattern: Pattern) -> Iterator[Size]:
    """The dtypes and widths to measure on a pattern. Without a GPU, kernels are interpreted and the default is fp32."""
    default = ("fp32", "bf16") if options.device.type == "cuda" else ("fp32",)
    for dtype in options.dtypes or default:
        for width in options.widths or (128,):
            with matmul_precision(arithmetic(dtype).tf32):
                yield Size(dtype, width, pattern.columns, options.device)


def mesh_sizes(options: Options, order: Order = "local") -> Iterator[tuple[Pattern, Size]]:
    """The patterns of meshes with the dtypes and widths to measure on them."""
    for v in options.vertices or VERTICES:
        pattern = mesh_pattern(v, order, options.device)
        for size in pattern_sizes(options, pattern):
            yield pattern, size


@benchmark("spmm", metrics=("GB/s",))
def spmm_cases(options: Options) -> Iterator[Case]:
    """Sparse times dense on the pattern of a mesh."""
    for order in ORDERS:
        for pattern, size in mesh_sizes(options, order):
            yield _spmm_case(pattern, size, {"order": order, **size.parameters()})


@benchmark("spmm-skewed", metrics=("GB/s",))
def skewed_cases(options: Options) -> Iterator[Case]:
    """Sparse times dense on rows whose lengths follow a power law."""
    for v in options.vertices or (100_000,):
        pattern = skewed_pattern(v, options.device)
        for size in pattern_sizes(options, pattern):
            yield _spmm_case(pattern, size, size.parameters())


def _spmm_case(pattern: Pattern, size: Size, parameters: dict[str, Parameter]) -> Case:
    values = _random(size, pattern.nnz)
    x = _random(size, size.vertices, size.width)
    csr = SparseMatrix(pattern, values).to_torch()
    coo = csr.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    return Case(
        parameters,
        {
            "diffnet": partial(spmm, pattern, values, x),
            "torch-csr": where_implemented(partial(torch.matmul, csr, x)),
            "torch-coo": where_implemented(partial(torch.matmul, coo, x)),
        },
        flops=2.0 * pattern.nnz * size.width,
        bytes=moved_bytes(pattern, size.kind.bytes, values=1, dense=2 * size.width),
        kind=size.kind,
    )


@benchmark("gradients", metrics=("GB/s",))
def gradient_cases(options: Options) -> Iterator[Case]:
    """gradX and gradY of a function, in one pass and one by one, forward and backward to the function."""
    for pattern, size in mesh_sizes(options):
        c, device = size.width, size.device
        values = _random(size, 2, pattern.nnz)
        matrices = [SparseMatrix(pattern, value).to_torch() for value in values]
        x = _random(size, size.vertices, c).requires_grad_()
        forwards: dict[str, Callable[[], Tensor]] = {
            "one pass": partial(spmm, pattern, values, x, backend="triton"),
            "two passes": partial(_stacked, pattern, values, x),
        }
        for step, peers in both_passes(device, forwards, [x], kernels=tuple(forwards)):
            if step == "forward":
                # These peers compute the products alone. "two passes" also stacks them into one tensor.
                peers["two calls"] = on_kernels(device, partial(_one_by_one, pattern, values, x))
                peers["torch-csr"] = where_implemented(partial(_each, matrices, x.detach()))
            yield Case(
                {"pass": step, **size.parameters()},
                peers,
                flops=4.0 * pattern.nnz * c,
                bytes=moved_bytes(pattern, size.kind.bytes, values=2, dense=3 * c),
                kind=size.kind,
            )


def _one_by_one(pattern: Pattern, values: Tensor, x: Tensor) -> list[Tensor]:
    return [spmm(pattern, value, x, backend="triton") for value in values]


def _stacked(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    return torch.stack(_one_by_one(pattern, values, x))


def _each(matrices: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    return [matrix @ x for matrix in matrices]


@benchmark("sddmm", metrics=("GB/s",))
def sddmm_cases(options: Options) -> Iterator[Case]:
    """Dense times dense at the entries of the pattern of a mesh."""
    for pattern, size in mesh_sizes(options):
        a, b = (_random(size, size.vertices, size.width) for _ in range(2))
        zeros = SparseMatrix(pattern, torch.zeros_like(_random(size, pattern.nnz))).to_torch()
        sampled = partial(torch.sparse.sampled_addmm, zeros, a, b.mT, beta=0)
        yield Case(
            size.parameters(),
            {
                "diffnet": partial(sddmm, pattern, a, b),
                "torch-sampled-addmm": where_implemented(sampled),
            },
            flops=2.0 * pattern.nnz * size.width,
            bytes=moved_bytes(pattern, size.kind.bytes, values=1, dense=2 * size.width),
            kind=size.kind,
        )


@benchmark("mesh-attention")
def attention_cases(options: Options) -> Iterator[Case]:
    """Attention of 4 heads over one-rings: sddmm, softmax and spmm, forward and backward."""
    for pattern, size in mesh_sizes(options):
        given = _random(size, size.vertices, 3, HEADS, size.width // HEADS).requires_grad_()
        forwards = {
            "triton": partial(_attend, pattern, given, "triton"),
            "plain": partial(_attend, pattern, given, "torch"),
        }
        for step, peers in both_passes(size.device, forwards, [given]):
            yield Case({"pass": step, **size.parameters()}, peers)


def _attend(pattern: Pattern, given: Tensor, backend: Backend) -> Tensor:
    query, key, value = given.permute(1, 2, 0, 3)
    scores = sddmm(pattern, query, key, backend=backend)
    weights = sparse_softmax(pattern, scores, scale=query.shape[-1] ** -0.5, backend=backend)
    return spmm(pattern, weights, value, backend=backend)


@benchmark("implicit-diffusion")
def implicit_cases(options: Options) -> Iterator[Case]:
    """One implicit diffusion step by conjugate gradients, with times up to 0.01 on a mesh of unit area."""
    device = options.device
    for v in options.vertices or (10_000, 100_000):
        pattern = mesh_pattern(v, "local", device)
        count = pattern.columns
        diagonal = pattern.row_indices == pattern.column_indices
        laplacian = SparseMatrix(pattern, torch.where(diagonal, 6.0, -1.0))
        mass, ptr = torch.full((count,), 1 / count, device=device), torch.tensor([0, count], device=device)
        for c in options.widths or (128,):
            x, time = torch.randn(count, c, device=device), torch.linspace(0, 0.01, c, device=device)
            solve = partial(implicit_diffusion, x, time, laplacian, mass, ptr, [count])
            yield Case(
                {"width": c, "vertices": count},
                {
                    "triton": on_kernels(device, partial(solve, backend="triton")),
                    "plain": partial(solve, backend="torch"),
                },
            )


def _random(size: Size, *shape: int) -> Tensor:
    return torch.randn(*shape, device=size.device).to(size.storage)
