"""Tensors beyond 2³¹ elements are computed right or refused by name.

Expanded tensors take no memory. On a GPU, slow tests compute with real tensors and compare some rows with plain PyTorch
in float64. They take up to 100 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from kernel_accuracy import relative
from refusals import refused
from torch import Tensor

from diffnet import ops
from diffnet.ops.common.limits import MAX_INT32, MAX_ROWS, check_matrix, check_programs
from diffnet.ops.common.spans import MAX_SPAN, choose_span
from diffnet.ops.common.tiling import MAX_ROW_STRIDE, row_major
from diffnet.ops.implicit import kernels as implicit_kernels
from diffnet.ops.implicit.reference import System
from diffnet.ops.sparse import spmm_kernels
from diffnet.ops.sparse.csr import shifted
from diffnet.ops.sparse.pattern import csr_arrays

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 2**31  # as many rows as 32-bit numbers don't count


def expanded(*shape: int) -> Tensor:
    return torch.ones(1, device=DEVICE).expand(shape)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def small_pattern() -> ops.Pattern:
    return ops.Pattern(numbers(0, 1, 3), numbers(0, 0, 1), 2)


def implicit_iteration() -> None:
    system = System(
        csr_arrays(small_pattern(), True), expanded(3), expanded(2), expanded(2), expanded(1), numbers(0, ROWS)
    )
    vertices = expanded(ROWS, 1)
    implicit_kernels.iteration(system, vertices, vertices, vertices, expanded(1, 1))


def extents() -> Tensor:
    return numbers(0, ROWS)


ONE, ROW = (1, 1), (ROWS, 1)
# The operation that the message names, and a call of its kernels.
REFUSED: list[tuple[str, Callable[..., object], tuple[tuple[int, ...], ...]]] = [
    ("to_spectral", lambda *x: ops.to_spectral(*x, extents(), backend="triton"), (ROW, ROW, (ROWS,))),
    ("from_spectral", lambda *x: ops.from_spectral(*x, extents(), backend="triton"), ((1, 1, 1), ROW)),
    ("diffuse", partial(ops.diffuse, backend="triton"), ((1, ROWS, 1), (1, ROWS), (1,))),
    ("gradient_features", partial(ops.gradient_features, backend="triton"), ((2, ROWS, 1), ONE, ONE)),
    (
        "spectral_gradient_features",
        lambda *x: ops.spectral_gradient_features(*x, extents(), backend="triton"),
        ((1, 1, 1), (2, ROWS, 1), ONE, ONE),
    ),
    ("mlp", lambda x, w: ops.mlp([x], [w], backend="triton"), (ROW, ONE)),
    ("cross_entropy", lambda x: ops.cross_entropy(x, numbers(0), backend="triton"), ((1, ROWS),)),
    ("spmm", lambda *x: spmm_kernels.spmm(csr_arrays(small_pattern(), True), *x), ((1, 3), (1, ROWS, 1))),
    ("sddmm", lambda *x: spmm_kernels.sddmm(csr_arrays(small_pattern(), True), *x), ((1, 2, 1), (1, ROWS, 1))),
    ("implicit_diffusion", implicit_iteration, ()),
]


@pytest.mark.parametrize(("operation", "function", "shapes"), REFUSED, ids=[row[0] for row in REFUSED])
def test_kernels_refuse_rows_that_they_do_not_count(
    operation: str, function: Callable[..., object], shapes: tuple[tuple[int, ...], ...]
) -> None:
    with pytest.raises(
        ValueError, match=f"kernels of {operation} take at most {MAX_ROWS} rows and columns, got {ROWS}"
    ):
        function(*(expanded(*shape) for shape in shapes))


@pytest.mark.parametrize(("rows", "columns"), [(2**24, 1), (1, 2**24), (2**16, 2**15)])
def test_kernels_refuse_matrices_that_32_bit_offsets_do_not_reach(rows: int, columns: int) -> None:
    message = f"of mlp take matrices .*got {rows} × {columns}"
    refused(ValueError, message, ops.mlp, [expanded(2, columns)], [expanded(rows, columns)], backend="triton")
    refused(ValueError, message, check_matrix, "mlp", rows, columns)
    check_matrix("mlp", 2**12, 2**12)


def test_kernels_refuse_grids_that_a_gpu_does_not_launch() -> None:
    check_programs("spmm", MAX_INT32, 65_535)
    refused(ValueError, f"spmm of these sizes takes {2**31} programs", check_programs, "spmm", 2**31)
    refused(ValueError, "spmm of these sizes takes 65536 programs side by side", check_programs, "spmm", 1, 65_536)
    sets = 2**31
    with pytest.raises(ValueError, match="spmm of these sizes takes"):
        ops.spmm(small_pattern(), expanded(sets, 3), expanded(sets, 2, 1), backend="triton")


def test_row_numbers_of_the_last_span_have_32_bits() -> None:
    for block in (16, 64, 128):
        span = choose_span(MAX_ROWS, block, 1)
        assert span == MAX_SPAN
        assert span % block == 0
        assert MAX_ROWS + 2 * span <= MAX_INT32
    assert choose_span(1_000_000, 64, 132) == 7616  # about as many spans as programs


def test_rows_that_lie_far_apart_are_copied() -> None:
    """A tile of 128 such rows would exceed 32-bit offsets."""
    near = torch.empty(1, device="meta").as_strided((3, 4), (MAX_ROW_STRIDE, 1))
    far = torch.empty(1, device="meta").as_strided((3, 4), (2 * MAX_ROW_STRIDE, 1))
    assert row_major(near) is near
    assert row_major(far).stride() == (4, 1)


@pytest.mark.parametrize("size", [3, 2**30, 2**31 - 1, 2**40])
@pytest.mark.parametrize("sets", [1, 3])
def test_indices_of_several_sets(size: int, sets: int) -> None:
    """32-bit indices don't wrap around."""
    found = shifted(torch.tensor([0, 2, 1], dtype=torch.int32), sets, size)
    expected = torch.arange(sets)[:, None] * size + torch.tensor([0, 2, 1])
    assert torch.equal(found.long(), expected.flatten())
    assert found.dtype == (torch.int32 if sets * size < 2**31 else torch.int64)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("with_order", [False, True])
def test_packed_patterns_have_64_bit_indices_if_they_need_them(prepared: bool, with_order: bool) -> None:
    order = torch.tensor([1, 0], dtype=torch.int32) if with_order else None
    indptr, indices = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [5, 0, 2**31 - 2]))
    wide = ops.Pattern(indptr, indices, 2**31 - 1, order)
    if prepared:
        # The transpose of so many columns would take 16 GB. Any will do here.
        object.__setattr__(wide, "_long_pieces", wide.long_pieces)
    packed = ops.block_diagonal_pattern([wide, wide, wide])
    assert packed.stored_indices.dtype == packed.stored_indptr.dtype == torch.int64
    assert packed.columns == 3 * (2**31 - 1)
    expected = torch.arange(3)[:, None] * (2**31 - 1) + indices
    assert torch.equal(packed.stored_indices, expected.flatten())
    assert packed.stored_indptr.tolist() == [0, 1, 3, 4, 6, 7, 9]
    assert not with_order or packed.row_order.tolist() == [1, 0, 3, 2, 5, 4]
    assert ops.block_diagonal_pattern([small_pattern()] * 2).column_indices.dtype == torch.int64  # as it was
    narrow = ops.Pattern(indptr, torch.tensor([1, 0, 1], dtype=torch.int32), 2, order)
    assert ops.block_diagonal_pattern([narrow, narrow]).column_indices.dtype == torch.int32


def test_patterns_of_many_entries_have_64_bit_indices() -> None:
    lengths = torch.empty(2, dtype=torch.int64, device="meta")
    indices = torch.empty(2**31, dtype=torch.int32, device="meta")
    assert ops.Pattern.from_row_lengths(lengths, indices, 5).indptr.dtype == torch.int64
    assert ops.Pattern.from_row_lengths(lengths, indices[:9], 5).indptr.dtype == torch.int32


# ---- real tensors of more than 2³¹ elements ----


def large(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.slow(pytest.mark.usefixtures("freed")(test)))


V, C, LAST = 17_500_000, 128, 1000
SOME = (slice(0, LAST), slice(2**24 - 500, 2**24 + 500), slice(V - LAST, V))  # 2²⁴ rows of 128 are 2³¹ elements
LENGTHS = [V - LAST, LAST]


@pytest.fixture
def freed() -> Iterator[None]:
    memory = torch.cuda.get_device_properties(0).total_memory
    if memory < 1.2e11:
        pytest.skip(f"needs a GPU with 120 GB, this one has {memory / 1e9:.0f}")
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(scale)


def exact(x: Tensor) -> Tensor:
    return x.detach().double()


def last_rows_only() -> Tensor:
    """A cotangent (V, C). Sums over all rows then depend on the last rows only."""
    out = torch.zeros(V, C, dtype=torch.bfloat16, device="cuda")
    out[-LAST:] = normal(LAST, C)
    return out


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert relative(out, expected) <= 1e-2  # false for NaN


@large
def test_large_spectral_transform() -> None:
    x, evecs, mass = normal(V, C), normal(V, C), torch.rand(V, device="cuda").bfloat16()
    ptr = numbers(0, V - LAST, V)
    spectrum = ops.to_spectral(x, evecs, mass, ptr, LENGTHS, backend="triton")
    parts = zip(*(t[:-LAST].split(2**20) for t in (x, evecs, mass)), strict=True)
    assert_close(spectrum[0], sum((e.float().mT @ (m.float()[:, None] * f.float())).double() for f, e, m in parts))
    last, end = (exact(t[-LAST:]) for t in (x, mass)), numbers(0, LAST)
    last_x, last_mass = last
    assert_close(spectrum[1:], ops.to_spectral(last_x, exact(evecs[-LAST:]), last_mass, end, backend="torch"))

    d = normal(2, C, C).requires_grad_()
    out = ops.from_spectral(d, evecs, ptr, LENGTHS, backend="triton")
    for rows, mesh in zip(SOME, (0, 0, 1), strict=True):
        assert_close(out[rows], exact(evecs[rows]) @ exact(d[mesh]))
    cotangent = last_rows_only()
    (grad,) = torch.autograd.grad(out, d, cotangent)
    assert grad[0].count_nonzero() == 0
    assert_close(grad[1], exact(evecs[-LAST:]).mT @ exact(cotangent[-LAST:]))


@large
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "tf32"])
@pytest.mark.usefixtures("tf32_allowed")
def test_large_spectral_gradient_features(dtype: torch.dtype) -> None:
    """With tf32, the backward has two kernels with (2, 4, V, C) between them."""
    evecs, gradient_evecs = normal(V, C).to(dtype), normal(2, V, C, scale=0.03).to(dtype)
    d, a_re, a_im = (normal(*shape).to(dtype).requires_grad_() for shape in ((2, C, C), (C, C), (C, C)))
    out = ops.values_and_gradient_features(
        d, evecs, gradient_evecs, a_re, a_im, numbers(0, V - LAST, V), LENGTHS, backend="triton"
    )
    cotangents = [last_rows_only().to(dtype) for _ in out]
    grads = torch.autograd.grad(out, (d, a_re, a_im), cotangents)
    assert grads[0][0].count_nonzero() == 0
    for rows, mesh in zip(SOME, (0, 0, 1), strict=True):
        leaves = [exact(t).requires_grad_() for t in (d[mesh : mesh + 1], a_re, a_im)]
        basis = exact(evecs[rows]), exact(gradient_evecs[:, rows])
        expected = ops.values_and_gradient_features(leaves[0], *basis, *leaves[1:], numbers(0, LAST), backend="torch")
        for found, right in zip(out, expected, strict=True):
            assert_close(found[rows], right.detach())
    right = torch.autograd.grad(expected, leaves, [exact(c[-LAST:]) for c in cotangents])
    assert_close(grads[0][1:], right[0])
    for found, gradient in zip(grads[1:], right[1:], strict=True):
        assert_close(found, gradient)


@large
def test_large_gradient_features() -> None:
    gradients = normal(2, V, C, scale=0.1).requires_grad_()
    matrices = [normal(C, C, scale=0.3).requires_grad_() for _ in range(2)]
    out = ops.gradient_features(gradients, *matrices, backend="triton")
    cotangent = last_rows_only()
    grads = torch.autograd.grad(out, (gradients, *matrices), cotangent)
    for rows in SOME:
        leaves = [exact(t).requires_grad_() for t in (gradients[:, rows], *matrices)]
        expected = ops.gradient_features(*leaves, backend="torch")
        assert_close(out[rows], expected.detach())
    right = torch.autograd.grad(expected, leaves, exact(cotangent[-LAST:]))
    assert grads[0][:, :-LAST].count_nonzero() == 0
    for found, gradient in zip((grads[0][:, -LAST:], *grads[1:]), right, strict=True):
        assert_close(found, gradient)


@large
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_large_sparse_products(backend: str) -> None:
    """Row i has one entry, in column V − 1 − i. Two sets share the pattern, and each has a dense factor."""
    places = torch.arange(V + 1, dtype=torch.int32, device="cuda")
    pattern = ops.Pattern(places, places[:-1].flip(0), V)
    values, x = normal(2, V).requires_grad_(), normal(2, V, C).requires_grad_()
    out = ops.spmm(pattern, values, x, backend=backend)
    products = ops.sddmm(pattern, x.detach(), out.detach(), backend=backend)
    cotangent = normal(2, V, C)
    grads = torch.autograd.grad(out, (values, x), cotangent)
    for rows in SOME:
        other = slice(V - rows.stop, V - rows.start)
        v, far = exact(values[:, rows]), exact(x[:, other]).flip(1)
        assert_close(out[:, rows], v[..., None] * far)
        assert_close(products[:, rows], (exact(x[:, rows]) * exact(out[:, other]).flip(1)).sum(-1))
        assert_close(grads[0][:, rows], (exact(cotangent[:, rows]) * far).sum(-1))
        back = exact(values[:, other, None]) * exact(cotangent[:, other])
        assert_close(grads[1][:, rows], back.flip(1))


@large
@pytest.mark.parametrize("hidden", [C, 2 * C], ids=["one kernel", "a kernel for each layer"])
def test_large_mlp(hidden: int) -> None:
    inputs = [normal(V, C).requires_grad_() for _ in range(3)]
    shapes = (hidden, 3 * C), (hidden, hidden), (C, hidden)
    weights = [normal(*shape, scale=shape[1] ** -0.5).requires_grad_() for shape in shapes]
    biases = [normal(shape[0]).requires_grad_() for shape in shapes]
    out = ops.mlp(inputs, weights, biases, residual=inputs[0], backend="triton")
    cotangent = last_rows_only()
    grads = torch.autograd.grad(out, [*inputs, *weights, *biases], cotangent)

    def plain(rows: slice, convert: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output and the leaves of plain PyTorch at some rows."""
        leaves = [convert(t).requires_grad_() for t in (*(x[rows] for x in inputs), *weights, *biases)]
        return ops.mlp(leaves[:3], leaves[3:6], leaves[6:], residual=leaves[0], backend="torch"), leaves

    for rows in SOME:
        assert_close(out[rows], plain(rows, exact)[0].detach())
    assert all(g[:-LAST].count_nonzero() == 0 for g in grads[:3])
    # Gradients in bf16 differ at units near 0, which ReLU cuts off or not. Plain PyTorch in bf16 says by how much.
    right, rounded = (
        torch.autograd.grad(*plain(slice(-LAST, None), convert), convert(cotangent[-LAST:]))
        for convert in (exact, lambda x: x.detach().clone())
    )
    for found, gradient, other in zip((*(g[-LAST:] for g in grads[:3]), *grads[3:]), right, rounded, strict=True):
        assert relative(found, gradient) <= 1.5 * relative(other, gradient)


@large
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_large_cross_entropy(backend: str) -> None:
    logits = normal(V, C).requires_grad_()
    labels = torch.randint(C, (V,), device="cuda")
    out = ops.cross_entropy(logits, labels, backend=backend)
    cotangent = torch.rand(V, device="cuda")
    (grad,) = torch.autograd.grad(out, logits, cotangent)
    for rows in SOME:
        leaf = exact(logits[rows]).requires_grad_()
        expected = ops.cross_entropy(leaf, labels[rows], backend="torch")
        assert_close(out[rows], expected.detach())
        assert_close(grad[rows], *torch.autograd.grad(expected, leaf, exact(cotangent[rows])))
