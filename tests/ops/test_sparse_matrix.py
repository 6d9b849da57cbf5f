"""Sparse matrices: conversions to and from PyTorch and SciPy, and stored row orders."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
import torch
from conftest import ROOT
from float64 import random
from sparse_cases import SHAPES, dense_of, pattern_of, random_mask, random_pattern, shape_id, strided

from diffnet.ops import EllPattern, HybridPattern, SparseMatrix, block_diagonal, diagonal, row_sum

pytestmark = pytest.mark.usefixtures("one_thread")


def test_conversions() -> None:
    pattern = random_pattern()
    matrix = SparseMatrix(pattern, random(pattern.nnz))
    dense = dense_of(pattern, matrix.values)
    torch.testing.assert_close(matrix.to_torch().to_dense(), dense)
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), dense)
    for again in (SparseMatrix.from_torch(matrix.to_torch()), SparseMatrix.from_scipy(matrix.to_scipy())):
        assert again.pattern.shape == (9, 6)
        assert torch.equal(again.values, matrix.values)
        assert torch.equal(again.pattern.indices, pattern.indices)
        assert torch.equal(again.pattern.indptr, pattern.indptr)
    transposed = scipy.sparse.csc_matrix(matrix.to_scipy())
    assert torch.equal(SparseMatrix.from_scipy(transposed).values, matrix.values)


def test_representations_are_one_line() -> None:
    pattern = random_pattern()
    matrix = SparseMatrix(pattern, random(2, pattern.nnz))
    assert repr(pattern) == f"Pattern(shape=(9, 6), nnz={pattern.nnz}, device=cpu)"
    assert repr(matrix) == f"SparseMatrix(shape=(2, 9, 6), nnz={pattern.nnz}, dtype={matrix.values.dtype}, device=cpu)"


def test_strided_values_convert() -> None:
    pattern = random_pattern()
    values = random(pattern.nnz)
    matrix = SparseMatrix(pattern, strided(values))
    torch.testing.assert_close(matrix.to_torch() @ torch.eye(6).double(), dense_of(pattern, values))
    np.testing.assert_array_equal(matrix.to_scipy().toarray(), dense_of(pattern, values))


def test_what_does_not_convert() -> None:
    pattern = random_pattern()
    several = SparseMatrix(pattern, random(2, pattern.nnz))
    for convert in (several.to_torch, several.to_scipy):
        with pytest.raises(ValueError, match=rf"\(2, {pattern.nnz}\)"):
            convert()
    with pytest.raises(ValueError, match="strided"):
        SparseMatrix.from_torch(random(9, 6))
    with pytest.raises(ValueError, match=r"shape is \(3,\)"):
        SparseMatrix(pattern, torch.zeros(3))


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
    with pytest.raises(TypeError, match=r"values should be a tensor, got list; convert it with torch\.tensor"):
        SparseMatrix(pattern, values.tolist())
    with pytest.raises(TypeError, match=r"values should be a tensor, got ndarray; convert it with torch\.from_numpy"):
        SparseMatrix(pattern, values.numpy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pattern should be a Pattern, got tuple"):
        SparseMatrix((pattern.indptr, pattern.indices), values)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.sparse_coo tensor expected, got csr_array"):
        SparseMatrix.from_torch(scipy.sparse.eye_array(3, format="csr"))
    with pytest.raises(TypeError, match=r"got ndarray; write scipy\.sparse\.csr_array\(matrix\)"):
        SparseMatrix.from_scipy(np.eye(3))
    assert SparseMatrix(pattern, torch.nn.Parameter(values)).values.requires_grad  # learned values are fine


def test_matrices_that_cannot_be_packed() -> None:
    pattern = random_pattern()
    one, two = SparseMatrix(pattern, random(pattern.nnz)), SparseMatrix(pattern, random(2, pattern.nnz))
    with pytest.raises(ValueError, match=r"same sets of values and dtype, got \(\) of torch\.float64, \(2,\) of"):
        block_diagonal([one, two])
    with pytest.raises(ValueError, match=r"got \(\) of torch\.float32, \(\) of torch\.float64"):
        block_diagonal([one, one.to(dtype=torch.float32)])
    with pytest.raises(ValueError, match="one block or more, got none"):
        block_diagonal([])
