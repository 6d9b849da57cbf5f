"""Products on CSR patterns: of meshes in good and bad orders of their vertices, and of rows of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from scipy.sparse import csr_array
from torch import Tensor

from diffnet.benchmarks.harness.arithmetic import arithmetic, matmul_precision
from diffnet.benchmarks.harness.peers import backward_of, on_kernels
from diffnet.benchmarks.harness.registry import Case, Options, Unavailable, benchmark
from diffnet.geometry.discretize.vertex_order import order_along_surface, order_unless_near
from diffnet.ops import Pattern, SparseMatrix, implicit_diffusion, sddmm, sparse_softmax, spmm

VERTICES = (100_000, 1_000_000)
WIDTHS = (128,)
Order: TypeAlias = Literal["local", "shuffled", "renumbered", "precomputed"]
ORDERS: tuple[Order, ...] = get_args(Order)


def dtypes(options: Options) -> tuple[str, ...]:
    """Those asked for; without a GPU, where kernels are interpreted, float32 only."""
    return options.dtypes or (("fp32", "bf16") if options.device.type == "cuda" else ("fp32",))


def where_implemented(run: Callable[[], object]) -> Callable[[], object]:
    """Unavailable where PyTorch has no implementation for a dtype or a device."""

    def checked() -> object:
        try:
            return run()
        except RuntimeError as error:  # NotImplementedError is one
            if "not implemented" in str(error) or "to be Float" in str(error):
                raise Unavailable(str(error).splitlines()[0]) from error
            raise

    return checked


def mesh_pattern(vertices: int, order: Order, device: torch.device) -> Pattern:
    """Each vertex and its six neighbours in a triangulated grid closed to a torus, of about so many vertices.

    order: vertices are numbered row by row; at random; at random and then along the surface; or at random, and rows
        are stored along the surface, as `precompute` has it
    """
    side = max(3, round(vertices**0.5))
    count = side * side
    x, y = torch.arange(count) % side, torch.arange(count) // side
    steps = [(-1, -1), (0, -1), (-1, 0), (0, 0), (1, 0), (0, 1), (1, 1)]
    columns = torch.stack([(x + i) % side + (y + j) % side * side for i, j in steps], dim=1)
    if order != "local":
        columns = _renumbered(columns, torch.randperm(count, generator=torch.Generator().manual_seed(0)))
    if order == "renumbered":
        columns = _renumbered(columns, torch.argsort(torch.from_numpy(order_along_surface(_graph(columns)))))
    columns = columns.sort(dim=1).values
    pattern = Pattern.from_row_lengths(torch.full((count,), 7), columns.flatten().int(), count)
    rows = order_unless_near(_graph(columns)) if order == "precomputed" else None
    if rows is not None:
        pattern, _ = pattern.with_row_order(torch.from_numpy(rows))
    return pattern.prepare().to(device)


def _graph(columns: Tensor) -> csr_array:
    count, length = columns.shape
    indptr = torch.arange(0, length * count + 1, length).int()
    return csr_array((torch.ones(columns.numel()), columns.flatten().int(), indptr), shape=(count, count))


def skewed_pattern(rows: int, device: torch.device) -> Pattern:
    """Rows whose lengths follow a power law: 7 entries on average, and a tenth of all columns at most."""
    generator = torch.Generator().manual_seed(0)
    longest = max(rows // 10, 1)
    lengths = (2.5 * torch.rand(rows, generator=generator, dtype=torch.float64) ** (-1 / 1.5)).long()
    lengths = lengths.clamp(1, longest)
    # Entries at equal distances from a random place on, so that none is twice in a row.
    number = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    stride = torch.repeat_interleave(rows // lengths, lengths)
    start = torch.repeat_interleave(torch.randint(rows, (rows,), generator=generator), lengths)
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    columns = (start + number * stride) % rows
    columns = (row * rows + columns).sort().values % rows
    return Pattern.from_row_lengths(lengths, columns.int(), rows).prepare().to(device)


def _renumbered(columns: Tensor, new: Tensor) -> Tensor:
    out = torch.empty_like(columns)
    out[new] = new[columns]
    return out


def _spmm_case(pattern: Pattern, options: Options, dtype: str, c: int, parameters: dict[str, int | str]) -> Case:
    device, kind = options.device, arithmetic(dtype)
    v = pattern.columns
    values = torch.randn(pattern.nnz, device=device).to(kind.storage)
    x = torch.randn(v, c, device=device).to(kind.storage)
    csr = SparseMatrix(pattern, values).to_torch()
    coo = csr.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    peers = {
        "triton": on_kernels(device, partial(spmm, pattern, values, x, backend="triton")),
        "torch-csr": where_implemented(partial(torch.matmul, csr, x)),
        "torch-coo": where_implemented(partial(torch.matmul, coo, x)),
    }
    flops, moved = 2.0 * pattern.nnz * c, moved_bytes(pattern, kind.bytes, values=1, dense=2 * c)
    return Case(parameters, peers, flops=flops, bytes=moved, kind=kind)


def moved_bytes(pattern: Pattern, size: int, *, values: int, dense: int) -> float:
    """Bytes of a pattern of int32, so many values an entry, and so many numbers a row."""
    return float(4 * (pattern.nnz + pattern.shape[0]) + size * (values * pattern.nnz + dense * pattern.shape[0]))


def _one_by_one(pattern: Pattern, values: Tensor, x: Tensor) -> list[Tensor]:
    return [spmm(pattern, value, x, backend="triton") for value in values]


def _stacked(pattern: Pattern, values: Tensor, x: Tensor) -> Tensor:
    return torch.stack(_one_by_one(pattern, values, x))


def _each(matrices: Sequence[Tensor], x: Tensor) -> list[Tensor]:
    return [matrix @ x for matrix in matrices]


@benchmark("spmm", metrics=("GB/s",))
def spmm_cases(options: Options) -> Iterator[Case]:
    """Sparse times dense on the pattern of a mesh."""
    for order in ORDERS:
        for v in options.vertices or VERTICES:
            pattern = mesh_pattern(v, order, options.device)
            for dtype in dtypes(options):
                with matmul_precision(arithmetic(dtype).tf32):
                    for c in options.widths or WIDTHS:
                        named: dict[str, int | str] = {
                            "order": order,
                            "dtype": dtype,
                            "width": c,
                            "vertices": pattern.columns,
                        }
                        yield _spmm_case(pattern, options, dtype, c, named)


@benchmark("spmm-skewed", metrics=("GB/s",))
def skewed_cases(options: Options) -> Iterator[Case]:
    """Sparse times dense with rows whose lengths follow a power law."""
    for v in options.vertices or (100_000,):
        pattern = skewed_pattern(v, options.device)
        for dtype in dtypes(options):
            for c in options.widths or WIDTHS:
                yield _spmm_case(pattern, options, dtype, c, {"dtype": dtype, "width": c, "vertices": v})


@benchmark("gradients", metrics=("GB/s",))
def gradient_cases(options: Options) -> Iterator[Case]:
    """gradX and gradY of a function, in one pass and one by one, forward and backward to the function."""
    device = options.device
    for v in options.vertices or VERTICES:
        pattern = mesh_pattern(v, "local", device)
        for dtype in dtypes(options):
            kind = arithmetic(dtype)
            values = torch.randn(2, pattern.nnz, device=device).to(kind.storage)
            both = [SparseMatrix(pattern, value).to_torch() for value in values]
            for c in options.widths or WIDTHS:
                x = torch.randn(pattern.columns, c, device=device).to(kind.storage).requires_grad_()

                forwards: dict[str, Callable[[], Tensor]] = {
                    "one pass": partial(spmm, pattern, values, x, backend="triton"),
                    "two passes": partial(_stacked, pattern, values, x),
                }
                for step in ("forward", "backward"):
                    runs = {n: f if step == "forward" else backward_of(f, [x]) for n, f in forwards.items()}
                    peers = {name: on_kernels(device, run) for name, run in runs.items()}
                    if step == "forward":
                        detached = x.detach()
                        # The products only, not put together in one tensor, as "two passes" does for its backward.
                        peers["two calls"] = on_kernels(device, partial(_one_by_one, pattern, values, x))
                        peers["torch-csr"] = where_implemented(partial(_each, both, detached))
                    flops, moved = 4.0 * pattern.nnz * c, moved_bytes(pattern, kind.bytes, values=2, dense=3 * c)
                    yield Case(
                        {"pass": step, "dtype": dtype, "width": c, "vertices": pattern.columns},
                        peers,
                        flops=flops,
                        bytes=moved,
                        kind=kind,
                    )


@benchmark("sddmm", metrics=("GB/s",))
def sddmm_cases(options: Options) -> Iterator[Case]:
    """Dense times dense at the entries of the pattern of a mesh."""
    device = options.device
    for v in options.vertices or VERTICES:
        pattern = mesh_pattern(v, "local", device)
        for dtype in dtypes(options):
            kind = arithmetic(dtype)
            for c in options.widths or WIDTHS:
                a, b = (torch.randn(pattern.columns, c, device=device).to(kind.storage) for _ in range(2))
                zeros = SparseMatrix(pattern, torch.zeros(pattern.nnz, device=device).to(kind.storage)).to_torch()

                flops, moved = 2.0 * pattern.nnz * c, moved_bytes(pattern, kind.bytes, values=1, dense=2 * c)
                yield Case(
                    {"dtype": dtype, "width": c, "vertices": pattern.columns},
                    {
                        "triton": on_kernels(device, partial(sddmm, pattern, a, b, backend="triton")),
                        "torch-sampled-addmm": where_implemented(
                            partial(torch.sparse.sampled_addmm, zeros, a, b.mT, beta=0)
                        ),
                    },
                    flops=flops,
                    bytes=moved,
                    kind=kind,
                )


@benchmark("mesh-attention")
def attention_cases(options: Options) -> Iterator[Case]:
    """Attention of 4 heads over one-rings: sddmm, softmax and spmm, forward and backward."""
    device, heads = options.device, 4
    for v in options.vertices or VERTICES:
        pattern = mesh_pattern(v, "local", device)
        for dtype in dtypes(options):
            kind = arithmetic(dtype)
            for c in options.widths or WIDTHS:
                shape = (pattern.columns, 3, heads, c // heads)
                given = torch.randn(*shape, device=device).to(kind.storage).requires_grad_()

                def attend(
                    backend: Literal["torch", "triton"], given: Tensor = given, pattern: Pattern = pattern
                ) -> Tensor:
                    query, key, value = given.permute(1, 2, 0, 3)
                    scores = sddmm(pattern, query, key, backend=backend)
                    weights = sparse_softmax(pattern, scores, scale=query.shape[-1] ** -0.5, backend=backend)
                    return spmm(pattern, weights, value, backend=backend)

                for step in ("forward", "backward"):
                    runs = {"triton": partial(attend, "triton"), "plain": partial(attend, "torch")}
                    peers = {n: f if step == "forward" else backward_of(f, [given]) for n, f in runs.items()}
                    peers["triton"] = on_kernels(device, peers["triton"])
                    yield Case({"pass": step, "dtype": dtype, "width": c, "vertices": pattern.columns}, peers)


@benchmark("implicit-diffusion")
def implicit_cases(options: Options) -> Iterator[Case]:
    """One implicit step of diffusion by conjugate gradients, with times up to 0.01 on a mesh of unit area."""
    device = options.device
    for v in options.vertices or (10_000, 100_000):
        pattern = mesh_pattern(v, "local", device)
        count = pattern.columns
        diagonal = pattern.row_indices == pattern.indices
        laplacian = SparseMatrix(pattern, torch.where(diagonal, 6.0, -1.0))
        mass, ptr = torch.full((count,), 1 / count, device=device), torch.tensor([0, count], device=device)
        for c in options.widths or WIDTHS:
            x, time = torch.randn(count, c, device=device), torch.linspace(0, 0.01, c, device=device)
            solve = partial(implicit_diffusion, x, time, laplacian, mass, ptr, [count])
            yield Case(
                {"width": c, "vertices": count},
                {
                    "triton": on_kernels(device, partial(solve, backend="triton")),
                    "plain": partial(solve, backend="torch"),
                },
            )
