"""Sparse matrices of this library, PyTorch and SciPy, their patterns, and stored row orders."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from conftest import ROOT
from float64 import DEVICE, random
from refusals import refused
from sparse_cases import SHAPES, dense_of, ints, pattern_of, random_mask, random_pattern, shape_id, strided
from torch import Tensor

from diffnet.geometry import nearest_pattern
from diffnet.ops import (
    Backend,
    EllPattern,
    HybridPattern,
    Pattern,
    SparseMatrix,
    block_diagonal,
    diagonal,
    row_sum,
    sddmm,
    sparse_softmax,
    spmm,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")]


def test_conversions() -> None:
    pattern = random_pattern()
    matrix = SparseMatrix(pattern, random(pattern.nnz))
    dense = dense_of(pattern, matrix.values)
    for each in (matrix, SparseMatrix(pattern, strided(matrix.values))):
        torch.testing.assert_close(each.to_torch() @ torch.eye(6).double(), dense)
        np.testing.assert_array_equal(each.to_scipy().toarray(), dense)
    for again in (SparseMatrix.from_torch(matrix.to_torch()), SparseMatrix.from_scipy(matrix.to_scipy())):
        assert again.pattern.shape == (9, 6)
        assert torch.equal(again.values, matrix.values)
        assert torch.equal(again.pattern.indices, pattern.indices)
        assert torch.equal(again.pattern.indptr, pattern.indptr)
    transposed = scipy.sparse.csc_matrix(matrix.to_scipy())
    assert torch.equal(SparseMatrix.from_scipy(transposed).values, matrix.values)
    adjacency = SparseMatrix.from_scipy(matrix.to_scipy() != 0)
    assert adjacency.values.dtype == torch.bool
    torch.testing.assert_close(adjacency @ torch.full((6, 1), 0.9), 0.9 * pattern.row_lengths[:, None])


def test_dense_matrices_edges_and_products() -> None:
    """Under the names that users of torch.sparse look for, and with gradients."""
    mask = random(9, 6) > 0
    dense = (random(2, 9, 6, seed=1) * mask).requires_grad_()
    matrix = SparseMatrix.from_dense(dense)
    x, y, number = random(6, 3), random(4, 9), torch.tensor(3.0).double().requires_grad_()
    assert (matrix.nnz, matrix.dtype, matrix.device) == (int(mask.sum()), dense.dtype, dense.device)
    for ours, expected in (
        (matrix.to_dense(), dense),
        (y @ matrix, y @ dense),
        (y[0] @ matrix, y[0] @ dense),
        ((2 * matrix) @ x, 2 * dense @ x),
        ((number * matrix * number) @ x, number * dense @ x * number),
        (SparseMatrix.from_edges(*matrix.to_edges(), (9, 6)).to_dense(), dense),
    ):
        (a,), (b,) = (torch.autograd.grad(out.square().sum(), dense, retain_graph=True) for out in (ours, expected))
        torch.testing.assert_close((ours, a), (expected, b * mask))
    refused(TypeError, "multiplied by numbers", matrix.__mul__, x)
    order = torch.randperm(matrix.nnz)
    rows, columns = matrix.pattern.row_indices[order], matrix.pattern.column_indices[order]
    pattern, entries = Pattern.from_coo(rows, columns, (9, 6))
    assert torch.equal(pattern.indptr, matrix.pattern.indptr)
    assert torch.equal(order[entries], torch.arange(matrix.nnz))
    refused(ValueError, "rows should be from 0 to 3", Pattern.from_coo, rows, columns, (4, 6))
    refused(ValueError, "twice in row 0", Pattern.from_coo, ints(0, 0), ints(1, 1), (1, 2))
    for convert in (dense[0].to_sparse_csc(), dense[0].to_sparse_bsr((3, 3)), dense[0].to_sparse_bsc((3, 3))):
        assert torch.equal(SparseMatrix.from_torch(convert).to_dense(), dense[0])


def test_representations_are_one_line() -> None:
    pattern = random_pattern()
    matrix = SparseMatrix(pattern, random(2, pattern.nnz))
    assert repr(pattern) == f"Pattern(shape=(9, 6), nnz={pattern.nnz}, device=cpu)"
    assert repr(matrix) == f"SparseMatrix(shape=(2, 9, 6), nnz={pattern.nnz}, dtype={matrix.values.dtype}, device=cpu)"


def test_what_does_not_convert() -> None:
    pattern = random_pattern()
    several = SparseMatrix(pattern, random(2, pattern.nnz))
    for convert in (several.to_torch, several.to_scipy):
        refused(ValueError, rf"\(2, {pattern.nnz}\)", convert)
    refused(ValueError, "strided", SparseMatrix.from_torch, random(9, 6))
    refused(ValueError, r"shape is \(3,\)", SparseMatrix, pattern, torch.zeros(3))


def test_no_warning_about_csr_tensors() -> None:
    """PyTorch warns once per process, so this needs a process of its own. Global filters are left as they are."""
    code = (
        "import torch, warnings\n"
        "from diffnet.ops import Pattern, SparseMatrix\n"
        "before = list(warnings.filters)\n"
        "warnings.simplefilter('error')\n"
        "pattern = Pattern(torch.tensor([0, 1]), torch.tensor([0]), 1)\n"
        "SparseMatrix(pattern, torch.ones(1)).to_torch()\n"
        "assert not any('CSR' in str(f) for f in before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(7, 96, 40), (12, 12, 130), "skewed"], ids=shape_id)
def test_other_forms_have_rows_in_their_own_order(shape: tuple[int, int, int] | str) -> None:
    mask, _ = random_mask(shape)
    matrix = SparseMatrix(pattern_of(mask), random(int(mask.sum())))
    stored = matrix.with_row_order(torch.arange(len(mask)).flip(0))
    assert not torch.equal(stored.values, matrix.values)
    expected = matrix.to_scipy().toarray()
    np.testing.assert_array_equal(stored.to_scipy().toarray(), expected)
    np.testing.assert_array_equal(stored.to_torch().to_dense(), expected)
    np.testing.assert_array_equal(stored.mT.to_scipy().toarray(), expected.T)
    x = random(mask.shape[1], 3, seed=1)
    ell, places = EllPattern.from_pattern(stored.pattern)
    torch.testing.assert_close(ell.matmul(stored.values[places.clamp(min=0)], x), matrix @ x)
    hybrid = HybridPattern.from_pattern(stored.pattern)
    torch.testing.assert_close(hybrid.matmul(stored.values, x), matrix @ x)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_row_sum_and_diagonal(shape: tuple[int, int, int] | str) -> None:
    pattern = random_pattern(shape)
    values = random(2, pattern.nnz)
    dense = dense_of(pattern, values)
    torch.testing.assert_close(row_sum(pattern, values), dense.sum(-1))
    torch.testing.assert_close(diagonal(pattern, values), torch.diagonal(dense, dim1=-2, dim2=-1))


def test_wrong_types_are_refused() -> None:
    pattern = random_pattern()
    values = random(pattern.nnz)
    words = r"values should be a tensor, got {}; convert it with torch\."
    refused(TypeError, words.format("list") + "tensor", SparseMatrix, pattern, values.tolist())
    refused(TypeError, words.format("ndarray") + "from_numpy", SparseMatrix, pattern, values.numpy())
    arrays, scipy_matrix = (pattern.indptr, pattern.indices), scipy.sparse.eye_array(3, format="csr")
    refused(TypeError, "pattern should be a Pattern, got tuple", SparseMatrix, arrays, values)
    refused(TypeError, r"torch\.sparse_coo tensor expected, got csr_array", SparseMatrix.from_torch, scipy_matrix)
    refused(TypeError, r"got ndarray; write scipy\.sparse\.csr_array\(matrix\)", SparseMatrix.from_scipy, np.eye(3))
    assert SparseMatrix(pattern, torch.nn.Parameter(values)).values.requires_grad  # learned values are fine


def test_factors_of_a_matrix() -> None:
    """Numbers of Python, NumPy and PyTorch. NumPy leaves arrays on the left to the matrix."""
    matrix = SparseMatrix(random_pattern(), random(random_pattern().nnz).float())
    for two in (2, np.float64(2), np.float32(2), np.array(2.0), torch.tensor(2.0).double()):
        for product in (matrix * two, two * matrix):
            assert torch.equal(product.values, matrix.values + matrix.values)
            assert product.dtype == torch.float32
    for wrong in (np.ones(matrix.nnz), torch.ones(1), [1, 2], "1", None, 1j, np.complex64(1), matrix):
        refused(TypeError, "a SparseMatrix is multiplied by numbers", operator.mul, matrix, wrong)
        refused(TypeError, "a SparseMatrix is multiplied by numbers", operator.mul, wrong, matrix)
    for x, converter in (([1.0] * 9, "tensor"), (np.ones(9), "from_numpy"), (np.ones((2, 9)), "from_numpy")):
        message = rf"the dense factor should be a tensor, got \w+; convert it with torch\.{converter}"
        refused(TypeError, message, operator.matmul, matrix, x)
        refused(TypeError, message, operator.matmul, x, matrix)


def test_wrong_edges_are_refused() -> None:
    edges, weights, size = ints(0, 1, 2, 0).reshape(2, 2), torch.ones(2), (3, 3)
    expected = r"edge_index should be int32 or int64 of shape \(2, nnz\), got torch\."
    for wrong, kind in (
        (ints(0, 1, 2, 0, 1, 2).reshape(3, 2), r"int64 of shape \(3, 2\)"),
        (ints(0, 1), r"int64 of shape \(2,\)"),
        (edges.double(), r"float64 of shape \(2, 2\)"),
    ):
        refused(ValueError, expected + kind, SparseMatrix.from_edges, wrong, weights, size)
    for shape in ((1,), (3, 4), ()):
        message = rf"edge_weight should have shape \(2, …\), shape is \({str(shape)[1:-1]}\)"
        refused(ValueError, message, SparseMatrix.from_edges, edges, torch.ones(shape), size)
    refused(TypeError, "edge_index should be a tensor, got list", SparseMatrix.from_edges, [[0], [1]], weights, size)
    refused(TypeError, "edge_weight should be a tensor, got list", SparseMatrix.from_edges, edges, [1.0, 1.0], size)
    one = torch.tensor(1)
    refused(ValueError, r"rows should have 1 dimension, shape is \(\)", Pattern.from_coo, one, one, size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_in_scipy(dtype: torch.dtype) -> None:
    matrix = SparseMatrix(random_pattern(), random(random_pattern().nnz).to(dtype))
    found = matrix.to_scipy()
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.toarray(), matrix.to_dense().float().numpy())


def test_scipy_arrays_without_two_dimensions_are_refused() -> None:
    for array in (scipy.sparse.coo_array(np.ones(3)), scipy.sparse.coo_array(np.ones((3, 3, 3)))):
        shape = str(array.shape)[1:-1]
        refused(ValueError, rf"\(rows, columns\) expected, shape is \({shape}\)", SparseMatrix.from_scipy, array)
        refused(ValueError, rf"shape is \({shape}\)", spmm, array, torch.ones(3, 1))


def test_matrices_that_cannot_be_packed() -> None:
    pattern = random_pattern()
    one, two = SparseMatrix(pattern, random(pattern.nnz)), SparseMatrix(pattern, random(2, pattern.nnz))
    with pytest.raises(ValueError, match=r"same sets of values and dtype, got \(\) of torch\.float64, \(2,\) of"):
        block_diagonal([one, two])
    with pytest.raises(ValueError, match=r"got \(\) of torch\.float32, \(\) of torch\.float64"):
        block_diagonal([one, one.to(dtype=torch.float32)])
    refused(ValueError, "one block or more, got none", block_diagonal, [])


def dense(rows: int = 7, columns: int = 5) -> Tensor:
    values = random(rows, columns)
    values = torch.where(random(rows, columns, seed=1) > 0, values, 0)
    values[2] = 0
    return values


CONVERSIONS: dict[str, Callable[[Tensor], Any]] = {
    "torch-csr": lambda m: m.to_sparse_csr(),
    "torch-coo": lambda m: m.to_sparse(),
    "torch-coo-uncoalesced": lambda m: torch.sparse_coo_tensor(
        torch.cat([m.nonzero().T.flip(1)] * 2, 1), torch.cat([m[m != 0].flip(0) / 2] * 2), m.shape
    ),
    "scipy-csr": lambda m: scipy.sparse.csr_array(m.numpy()),
    "scipy-coo": lambda m: scipy.sparse.coo_matrix(m.numpy()),
    "SparseMatrix": lambda m: SparseMatrix.from_torch(m.to_sparse()),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_operations_take_the_matrix(convert: Callable[[Tensor], Any]) -> None:
    m = dense()
    matrix, here = convert(m), m != 0
    x, y = random(5, 3), random(7, 3)
    torch.testing.assert_close(spmm(matrix, x), m @ x)
    torch.testing.assert_close(spmm(matrix, y, transpose=True), m.T @ y)
    torch.testing.assert_close(spmm(matrix, torch.ones(int(here.sum())).double(), x), here.double() @ x)
    torch.testing.assert_close(sddmm(matrix, y, x), (y @ x.T)[here])
    expected = torch.softmax(m.masked_fill(~here, -torch.inf), 1)
    torch.testing.assert_close(sparse_softmax(matrix), expected[here])
    scores = random(int(here.sum()))
    assert torch.equal(sparse_softmax(matrix, scores), sparse_softmax(Pattern.from_mask(here), scores))


@pytest.mark.parametrize("layout", ["torch-csr", "torch-coo", "torch-coo-uncoalesced"])
def test_gradients_reach_the_tensor(layout: str) -> None:
    m = dense()
    leaf = CONVERSIONS[layout](m).detach().requires_grad_()
    x, weights = random(5, 3).requires_grad_(), random(7, 3, seed=2)
    (spmm(leaf, x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, m.T @ weights)
    torch.testing.assert_close(leaf.grad.to_dense(), (weights @ x.detach().T) * (m != 0))


def test_coo_becomes_a_matrix() -> None:
    m = dense()
    for given in (m.to_sparse(), CONVERSIONS["torch-coo-uncoalesced"](m)):
        torch.testing.assert_close(SparseMatrix.from_torch(given).to_torch().to_dense(), m)
    empty = SparseMatrix.from_torch(torch.zeros(0, 4).to_sparse())
    assert empty.shape == (0, 4)


def test_operations_name_what_they_take() -> None:
    pattern, x = Pattern.from_mask(dense() != 0), random(5, 3)
    refused(TypeError, r"a Pattern holds no values; write spmm\(pattern, values, x\)", spmm, pattern, x)
    refused(TypeError, r"a Pattern holds no values; write sparse_softmax\(pattern, scores\)", sparse_softmax, pattern)
    for call in (lambda: spmm(np.eye(5), x), lambda: sddmm("a", x, x), lambda: sparse_softmax(3)):
        refused(TypeError, r"pattern should be a Pattern or a sparse matrix .* got (ndarray|str|int)", call)
    refused(ValueError, r"a 2-D torch.sparse_csr or torch.sparse_coo tensor expected, got 2-D of", spmm, dense(), x)
    refused(ValueError, "without dense dimensions expected, got 1", SparseMatrix.from_torch, random(3, 4).to_sparse(1))
    with pytest.raises(ValueError, match=r"mask should be bool of shape \(rows, columns\), got torch.float64"):
        Pattern.from_mask(dense())
    refused(ValueError, r"density should be from 0 to 1, got 1\.5", Pattern.random, 3, 3, 1.5)
    refused(ValueError, r"points should have shape \(N, D\), shape is \(3,\)", nearest_pattern, torch.zeros(3), 2)


def checked(pattern: Pattern) -> Tensor:
    """The mask of a pattern, whose arrays are checked."""
    Pattern(pattern.indptr, pattern.indices, pattern.columns)
    return SparseMatrix(pattern, torch.ones(pattern.nnz)).to_torch().to_dense() > 0


@pytest.mark.parametrize(("length", "before", "after"), [(7, 2, 0), (7, 0, 3), (5, 9, 9), (1, 1, 1), (0, 2, 2)])
def test_windows(length: int, before: int, after: int) -> None:
    i = torch.arange(length)
    distance = i - i[:, None]
    expected = (distance >= -before) & (distance <= after)
    assert torch.equal(checked(Pattern.window(length, before, after)), expected)


@pytest.mark.parametrize(
    ("rows", "columns", "density"), [(50, 40, 0.1), (3, 7, 1), (3, 7, 0), (0, 4, 0.5), (4, 0, 0.5)]
)
def test_random_patterns(rows: int, columns: int, density: float) -> None:
    generator = torch.Generator().manual_seed(0)
    pattern = Pattern.random(rows, columns, density, generator)
    mask = checked(pattern)
    assert (mask.sum(1) == round(density * columns)).all()
    if density == 0.1:
        assert not torch.equal(pattern.indices, Pattern.random(rows, columns, density, generator).indices)
        assert mask.any(0).all()  # all columns are drawn


def test_masks_and_nearest_points() -> None:
    mask = dense() != 0
    assert torch.equal(checked(Pattern.from_mask(mask)), mask)
    points = random(20, 4)
    distances = torch.cdist(points, points)
    expected = distances <= distances.kthvalue(5, dim=1, keepdim=True).values
    assert torch.equal(checked(nearest_pattern(points, 5)), expected)
    assert checked(nearest_pattern(points[:3], 5)).all()


def test_compiles_to_one_graph() -> None:
    """Checks and promoted dtypes don't break the graph."""
    torch._dynamo.reset()
    backend: Backend = "triton"
    pattern = random_pattern().prepare().to(DEVICE)
    adjacency = torch.ones(pattern.nnz, dtype=torch.bool, device=DEVICE)

    def loss(pattern: Pattern, values: Tensor, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        scores = sddmm(pattern, spmm(pattern, values, x, backend=backend), x, backend=backend)
        weights = sparse_softmax(pattern, scores, scale=scale, bias=bias, mask=adjacency, backend=backend)
        out = spmm(pattern, weights, x, backend=backend) + spmm(pattern, adjacency, x, backend=backend)
        return out.square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [random(2, pattern.nnz), random(6, 3, seed=1), random(2, seed=2), random(pattern.nnz, seed=3)]
        leaves = [t.float().to(DEVICE).requires_grad_() for t in leaves]
        out = function(pattern, *leaves)
        results.append([out, *torch.autograd.grad(out, leaves)])
    torch.testing.assert_close(*results)


def test_what_compiles_after_prepare() -> None:
    """Without it, and for m @ x, the error says what to write. Where the graph may break, all work."""
    mask = random(9, 6) > 0
    patterns: list[Any] = [Pattern.from_mask(mask), HybridPattern.from_pattern(Pattern.from_mask(mask))]
    patterns.append(EllPattern.from_pattern(Pattern.from_mask(mask))[0])
    x = random(mask.shape[1], 2)
    for pattern in patterns:
        shape = pattern.indices.shape if isinstance(pattern, EllPattern) else (pattern.nnz,)
        values = random(*shape).requires_grad_()
        product = partial(spmm, pattern) if isinstance(pattern, Pattern) else pattern.matmul
        torch._dynamo.reset()
        whole = torch.compile(product, fullgraph=True, backend="eager")
        refused(torch._dynamo.exc.Unsupported, r"call \.prepare\(\) of the pattern", whole, values, x)
        assert pattern.prepare() is pattern
        torch._dynamo.reset()
        torch.testing.assert_close(whole(values, x), product(values, x))
    matrix = SparseMatrix(patterns[0], random(patterns[0].nnz))
    for call, fits in ((lambda m, x: m @ x, False), (lambda m, x: x.mT @ m.mT, False), (spmm, True)):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, backend="eager")(matrix, x), call(matrix, x))
        torch._dynamo.reset()
        whole = torch.compile(call, fullgraph=True, backend="eager")
        if fits:
            torch.testing.assert_close(whole(2 * matrix, x), 2 * call(matrix, x))
        else:
            refused(torch._dynamo.exc.Unsupported, r"write spmm\(m, x\) for m @ x", whole, matrix, x)


def test_a_pattern_of_strided_arrays_is_made_inside() -> None:
    torch._dynamo.reset()
    edges = torch.stack([ints(0, 0, 1), ints(0, 2, 1)], dim=1)

    def product(edges: Tensor, values: Tensor) -> Tensor:
        pattern = Pattern(ints(0, 2, 3), edges[:, 1], 3, check=False)
        assert pattern.indices.is_contiguous()
        return values * pattern.indices

    values = random(3)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(edges, values), product(edges, values))


def test_matrices_of_sparse_tensors() -> None:
    """One is converted inside, where the graph breaks, and one before. Gradients reach the sparse tensor."""
    torch._dynamo.reset()
    plain, x = random(3, 3).to_sparse_csr(), random(3, 2, seed=2)
    before = SparseMatrix.from_torch(plain)
    assert before.values.data_ptr() == plain.values().data_ptr()

    def product(matrix: Tensor, before: SparseMatrix, x: Tensor) -> Tensor:
        return SparseMatrix.from_torch(matrix) @ (before @ x)

    results = []
    for function in (torch.compile(product, backend="eager"), product):
        matrix = random(4, 3, seed=1).to_sparse_csr().requires_grad_()
        out = function(matrix, before, x)
        results.append([out, *torch.autograd.grad(out.square().sum(), matrix)])
    torch.testing.assert_close(*results)
