"""`SparseMatrix`, a pattern with sets of values on it, and the products `spmm` and `sddmm`.

Each of these is the derivative of the other, so both can be differentiated any number of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from diffnet.ops import definition
from diffnet.ops.common.backend import Backend, check_backend, use_definition, use_kernels
from diffnet.ops.common.checks import broadcast_shapes, check_is_tensor, check_operand, device_and_dtype
from diffnet.ops.common.compiler import is_stand_in
from diffnet.ops.common.dispatch import differentiable, differentiated, is_traced, save_settings
from diffnet.ops.common.memo import FieldwiseCopy
from diffnet.ops.common.precision import in_dtype, product_dtype, scipy_array, without_autocast
from diffnet.ops.sparse import reference
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.pattern import (
    Pattern,
    block_diagonal_pattern,
    check_blocks,
    check_is_pattern,
    check_plain,
    product_arrays,
    split_diagonal_pattern,
)

# A torch.sparse_csr or torch.sparse_coo tensor, a matrix or array of scipy.sparse, or a `SparseMatrix`.
MatrixLike: TypeAlias = Any


def spmm(
    pattern: Any, values: Tensor, x: Tensor | None = None, *, transpose: bool = False, backend: Backend = "auto"
) -> Tensor:
    """Multiply sparse matrices by dense ones. All sets of values on the pattern share one pass over its indices.

    `spmm(pattern, values, x)`, or `spmm(matrix, x)` for a torch.sparse_csr or torch.sparse_coo tensor, a SciPy matrix
    or a `SparseMatrix`. Convert a matrix that is used again with `SparseMatrix.from_torch` or `from_scipy` once: it
    keeps what products and gradients need.

    The product has the promoted dtype of both operands, or autocast's, as dense products have. Low precision is added
    up in float32. If both operands are integer or bool, the product is computed in int64.

    Differentiable in values and x. Deterministic, but on a GPU not for backend="torch".

    Args:
        pattern: (rows, columns), a `Pattern`, or a matrix, whose values are left out if others are given
        values: (…, nnz)
        x: (columns, C) for all sets, or (…, columns, C) with one factor for each set. Batches broadcast.
        transpose: whether to multiply by the transposed matrices instead. x is (…, rows, C) then.
        backend: see `use_kernels`

    Returns:
        (…, rows, C), or (…, columns, C) if transposed

    Raises:
        TypeError: for complex operands, and for a pattern that is none of these.
        ValueError: if shapes or devices don't match.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> spmm(pattern, torch.tensor([1.0, 2.0, 3.0]), torch.eye(3))
    tensor([[1., 0., 2.],
            [0., 3., 0.]])
    >>> spmm(torch.tensor([[1.0, 0.0], [0.0, 3.0]]).to_sparse(), torch.ones(2, 1))
    tensor([[1.],
            [3.]])
    """
    if x is None:
        if isinstance(pattern, Pattern):
            raise TypeError("a Pattern holds no values; write spmm(pattern, values, x), or spmm(matrix, x)")
        (pattern, values), x = pattern_and_values(pattern), values
    pattern = pattern_of(pattern)
    rows, columns = reversed(pattern.shape) if transpose else pattern.shape
    device = pattern.device
    check_operand("values", values, (pattern.nnz,), device)
    check_operand("the dense factor", x, (columns, "C"), device)
    batch = broadcast_shapes(values.shape[:-1], x.shape[:-2])
    dtype = product_dtype(values, x)
    if not dtype.is_floating_point or use_definition(backend):
        check_backend(backend)
        places = pattern.row_indices, pattern.column_indices
        at, near = places[::-1] if transpose else places
        return definition.spmm(at, near, rows, values.to(dtype), x.to(dtype))
    flat = values.to(dtype).expand(*batch, pattern.nnz).reshape(math.prod(batch), pattern.nnz)
    dense = _flat_sets(x.to(dtype), batch)
    triton = use_kernels(backend, flat, dense)
    # Sorting the transpose takes longer than the product.
    transposed = transpose or differentiated((flat, dense)) or is_traced((flat, dense))
    arrays = product_arrays(pattern, triton, transposed=transposed)
    out: Tensor = spmm_operator(arrays, flat, dense, transpose, False, triton)
    return out.reshape(*batch, rows, x.shape[-1])


def sddmm(pattern: Pattern | MatrixLike, a: Tensor, b: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Multiply dense matrices, A Bᵀ, at the entries of the pattern only, in one pass over its indices.

    In attention, a is the query and b the key: (…, H, rows, C) and (…, H, columns, C) with C channels of each head give
    the scores (…, H, nnz) of H heads.

    The result has the promoted dtype of both factors, or autocast's, as in `spmm`.

    Differentiable in a and b. Deterministic, but on a GPU not for backend="torch".

    Args:
        pattern: (rows, columns), a `Pattern`, or a matrix as in `spmm`, whose values aren't read
        a: (…, rows, C)
        b: (…, columns, C). Batches broadcast.
        backend: see `use_kernels`

    Returns:
        (…, nnz), row by row

    Raises:
        TypeError: for complex factors, and for a pattern that is none of these.
        ValueError: if shapes or devices don't match.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> sddmm(pattern, torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]]))
    tensor([3., 5., 8.])
    """
    pattern = pattern_of(pattern)
    rows, columns = pattern.shape
    device = pattern.device
    check_operand("the dense factor a", a, (rows, "C"), device)
    check_operand("the dense factor b", b, (columns, a.shape[-1]), device)
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    dtype = product_dtype(a, b)
    a, b = in_dtype(a, dtype), in_dtype(b, dtype)
    if not a.is_floating_point() or use_definition(backend):
        check_backend(backend)
        return definition.sddmm(pattern.row_indices, pattern.column_indices, a, b)
    a, b = _flat_sets(a, batch), _flat_sets(b, batch)
    triton = use_kernels(backend, a, b)
    # On the CPU, PyTorch takes a fifth more time with 32-bit indices.
    out: Tensor = sddmm_operator(product_arrays(pattern, triton, long=not triton), a, b, triton)
    return out.reshape(*batch, pattern.nnz) if batch else out[0]


def row_sum(pattern: Pattern, values: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Sum the entries of each row: values (…, nnz) → (…, rows). Differentiable.

    Integers and bools are added up in int64, and autocast changes no dtype, as in `torch.sum`.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> row_sum(pattern, torch.tensor([1.0, 2.0, 3.0]))
    tensor([3., 3.])
    """
    check_is_pattern(pattern)
    check_operand("values", values, (pattern.nnz,), pattern.device)
    dtype = values.dtype if values.is_floating_point() else torch.int64
    ones = torch.ones(pattern.columns, 1, dtype=dtype, device=values.device)
    with without_autocast(values):
        return spmm(pattern, values, ones, backend=backend)[..., 0]


def diagonal(pattern: Pattern, values: Tensor) -> Tensor:
    """Return the diagonal, 0 where there is no entry: values (…, nnz) → (…, min(rows, columns)). Differentiable.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> diagonal(pattern, torch.tensor([1.0, 2.0, 3.0]))
    tensor([1., 3.])
    """
    check_is_pattern(pattern)
    check_operand("values", values, (pattern.nnz,), pattern.device)
    rows = pattern.row_indices
    on_diagonal = values.masked_fill(rows != pattern.column_indices, 0)
    # Each row has at most one diagonal entry. The order of the atomic additions doesn't matter: all others are zeros.
    sums = values.new_zeros(*values.shape[:-1], pattern.shape[0]).index_add(-1, rows, on_diagonal)
    return sums[..., : pattern.columns]


def pattern_and_values(matrix: MatrixLike) -> tuple[Pattern, Tensor]:
    """The pattern and the values of a matrix. Raises TypeError for other objects, with what is expected."""
    if isinstance(matrix, Tensor):
        matrix = SparseMatrix.from_torch(matrix)
    elif hasattr(matrix, "tocsr"):
        matrix = SparseMatrix.from_scipy(matrix)
    if isinstance(matrix, SparseMatrix):
        return matrix.pattern, matrix.values
    raise TypeError(
        "pattern should be a Pattern or a sparse matrix (SparseMatrix, torch.sparse_csr, torch.sparse_coo or SciPy), "
        f"got {type(matrix).__name__}"
    )


def pattern_of(matrix: Any) -> Pattern:
    """A pattern as it is, or the pattern of a matrix. Raises TypeError for other objects."""
    return matrix if isinstance(matrix, Pattern) else pattern_and_values(matrix)[0]


@dataclass(frozen=True, eq=False)
class SparseMatrix(FieldwiseCopy):
    """A pattern with values (…, nnz). Several sets of values are several matrices of one structure.

    >>> import torch
    >>> matrix = SparseMatrix.from_torch(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr())
    >>> matrix @ torch.ones(3, 1)
    tensor([[3.],
            [3.]])
    >>> matrix.mT.values
    tensor([1., 3., 2.])
    """

    pattern: Pattern
    values: Tensor
    # NumPy leaves products with an array on the left to the methods below.
    __array_ufunc__: ClassVar[None] = None

    def __post_init__(self) -> None:
        if is_stand_in(self.values):
            return
        check_is_pattern(self.pattern)
        check_is_tensor("values", self.values)
        if self.values.ndim == 0 or self.values.shape[-1] != self.pattern.nnz:
            raise ValueError(f"values should have shape (…, {self.pattern.nnz}), shape is {tuple(self.values.shape)}")

    def __repr__(self) -> str:
        values = self.values
        return f"SparseMatrix(shape={self.shape}, nnz={self.pattern.nnz}, dtype={values.dtype}, device={values.device})"

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, rows, columns)"""
        return *self.values.shape[:-1], *self.pattern.shape

    @property
    def nnz(self) -> int:
        """The number of entries of one set of values."""
        return self.pattern.nnz

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def mT(self) -> SparseMatrix:
        """The transposed matrix, so that `matrix.mT @ x` is the transposed product."""
        pattern, order = self.pattern.transpose
        return SparseMatrix(pattern, self.values[..., order])

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> SparseMatrix:
        """Move the pattern and the values to a device, and convert the values to a dtype, as `torch.Tensor.to` does.

        `.to(dtype)` is allowed. Index arrays keep their dtype.
        """
        device, dtype = device_and_dtype(device, dtype)
        values = self.values.to(device=device, dtype=dtype, non_blocking=non_blocking)
        return SparseMatrix(self.pattern.to(device, non_blocking=non_blocking), values)

    def pin_memory(self) -> SparseMatrix:
        """Copy the pattern and the values to pinned memory."""
        return SparseMatrix(self.pattern.pin_memory(), self.values.pin_memory())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> SparseMatrix:
        """Apply a function to the values and to all index arrays, see `Pattern.map_tensors`."""
        return SparseMatrix(self.pattern.map_tensors(function), function(self.values))

    def with_row_order(self, order: Tensor | None, *, check: bool = True) -> SparseMatrix:
        """Return the same matrix with its rows stored in another order; None for their own. See `Pattern`."""
        if order is None and self.pattern.row_order is None:
            return self
        pattern, entries = self.pattern.with_row_order(order, check=check)
        return SparseMatrix(pattern, self.values[..., entries])

    def __matmul__(self, x: Tensor) -> Tensor:
        """Multiply by x (columns, C) or (columns,), see `spmm`. Returns (…, rows, C) or (…, rows). Differentiable."""
        if isinstance(x, Tensor) and x.ndim == 1:
            return spmm(self.pattern, self.values, x[:, None])[..., 0]
        return spmm(self.pattern, self.values, x)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """Multiply x (C, rows) or (rows,) by the matrix. Returns (…, C, columns) or (…, columns). Differentiable."""
        check_is_tensor("the dense factor", x)
        if x.ndim == 1:
            return spmm(self.pattern, self.values, x[:, None], transpose=True)[..., 0]
        return spmm(self.pattern, self.values, x.mT, transpose=True).mT

    def __mul__(self, factor: Any) -> SparseMatrix:
        """Multiply all values by a real number, or by a tensor or an array of shape (). Differentiable.

        Numbers of NumPy count as those of Python, so they change no dtype. Raises TypeError for other factors.
        """
        if isinstance(factor, Tensor):
            is_number = factor.ndim == 0
        else:
            factor = factor.item() if getattr(factor, "ndim", None) == 0 else factor
            is_number = isinstance(factor, (Real, torch.SymInt, torch.SymFloat))
        if not is_number:
            raise TypeError("a SparseMatrix is multiplied by numbers; m @ x is the product of matrices")
        return SparseMatrix(self.pattern, self.values * factor)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Take products with a tensor. torch.compile finds them here, and PyTorch those with a tensor on the left.

        For both m @ x and x @ m, torch.compile gives the arguments (x, m), so the graph breaks there.
        """
        if function not in _PRODUCTS or options:
            return NotImplemented
        left, right = arguments
        matrix, factor = arguments if isinstance(left, SparseMatrix) else (right, left)
        if function in _MULTIPLICATIONS:
            return matrix.__mul__(factor)
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg="write spmm(m, x) for m @ x")  # type: ignore[no-untyped-call]
        return matrix.__matmul__(factor) if matrix is left else matrix.__rmatmul__(factor)

    @classmethod
    def from_dense(cls, matrix: Tensor) -> SparseMatrix:
        """Convert the entries of dense matrices (…, rows, columns) that are not 0 in all sets. It waits for a GPU.

        Gradients reach the tensor.

        >>> import torch
        >>> SparseMatrix.from_dense(torch.eye(3)).nnz
        3
        """
        check_is_tensor("matrix", matrix)
        if matrix.ndim < 2 or matrix.layout != torch.strided:
            raise ValueError(f"a dense matrix expected, got {matrix.ndim}-D of {matrix.layout}")
        pattern = Pattern.from_mask((matrix != 0).flatten(0, -3).any(0) if matrix.ndim > 2 else matrix != 0)
        return cls(pattern, matrix[..., pattern.row_indices, pattern.column_indices])

    def to_dense(self) -> Tensor:
        """Convert to dense matrices (…, rows, columns). Differentiable."""
        rows, columns = self.pattern.shape
        places = self.pattern.row_indices.long() * columns + self.pattern.column_indices
        flat = self.values.new_zeros(*self.values.shape[:-1], rows * columns).index_copy(-1, places, self.values)
        return flat.reshape(self.shape)

    @classmethod
    def from_edges(cls, edge_index: Tensor, edge_weight: Tensor, size: tuple[int, int]) -> SparseMatrix:
        """Convert weighted edges of a graph, the inverse of `to_edges`. Gradients reach the weights.

        edge_index: (2, nnz) integers, from the columns in [0] to the rows in [1], in any order
        edge_weight: (nnz, …)
        size: the rows and columns

        Raises TypeError if these are no tensors, ValueError for other shapes and as `Pattern.from_coo` does.
        """
        check_plain("edge_index", edge_index)
        if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype not in (torch.int32, torch.int64):
            kind = f"{edge_index.dtype} of shape {tuple(edge_index.shape)}"
            raise ValueError(f"edge_index should be int32 or int64 of shape (2, nnz), got {kind}")
        check_is_tensor("edge_weight", edge_weight)
        if edge_weight.shape[:1] != edge_index.shape[1:]:
            expected = f"({edge_index.shape[1]}, …)"
            raise ValueError(f"edge_weight should have shape {expected}, shape is {tuple(edge_weight.shape)}")
        pattern, entries = Pattern.from_coo(edge_index[1], edge_index[0], size)
        return cls(pattern, edge_weight.movedim(0, -1)[..., entries])

    @classmethod
    def from_torch(cls, matrix: Tensor, *, check: bool = True) -> SparseMatrix:
        """Convert a sparse tensor (rows, columns) of PyTorch: CSR, COO, CSC, BSR or BSC. See `Pattern` for `check`.

        A CSR result shares its memory, but copies values that require a gradient. The entries of COO are sorted, and
        those at one place added up. Gradients reach the tensor.

        Raises TypeError for other objects, ValueError for tensors of other layouts.
        """
        if not isinstance(matrix, Tensor):
            raise TypeError(f"a torch.sparse_csr or torch.sparse_coo tensor expected, got {type(matrix).__name__}")
        if matrix.layout in (torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc) and matrix.ndim == 2:
            matrix = matrix.to_sparse_coo()  # type: ignore[no-untyped-call]
        if matrix.layout not in (torch.sparse_csr, torch.sparse_coo) or matrix.ndim != 2:
            raise ValueError(
                f"a 2-D torch.sparse_csr or torch.sparse_coo tensor expected, got {matrix.ndim}-D of {matrix.layout}"
            )
        if matrix.layout == torch.sparse_coo:
            if matrix.dense_dim() != 0:
                raise ValueError(f"a sparse tensor without dense dimensions expected, got {matrix.dense_dim()}")
            entries = matrix.coalesce()  # sorted by rows and columns, each once
            rows, columns = entries.indices()
            lengths = torch.bincount(rows, minlength=matrix.shape[0])
            pattern = Pattern.from_row_lengths(lengths, columns, matrix.shape[1], check=check)
            return cls(pattern, entries.values())
        pattern = Pattern(matrix.crow_indices(), matrix.col_indices(), matrix.shape[1], check=check)
        # torch.compile can't take a view of a sparse tensor.
        values = matrix.values()  # type: ignore[no-untyped-call]
        return cls(pattern, values.clone() if values.requires_grad else values.detach())

    def to_torch(self) -> Tensor:
        """Convert one set of values to a torch.sparse_csr tensor. It shares memory if rows have their own order."""
        self._expect_one_set()
        matrix = self.with_row_order(None)
        return reference.csr_tensor(matrix.pattern.indptr, matrix.pattern.indices, matrix.values, matrix.pattern.shape)

    def to_edges(self) -> tuple[Tensor, Tensor]:
        """The entries as weighted edges of a graph, as layers of PyTorch Geometric take them.

        Returns edge_index (2, nnz) int64, from the columns in [0] to the rows in [1], and edge_weight (nnz, …). The sum
        of edge_weight ∘ x[edge_index[0]] over the edges to each row is the product with x. Several sets of values
        (S, nnz), such as those of `operators.gradient`, give edge_weight (nnz, S).

        >>> import torch
        >>> matrix = SparseMatrix.from_torch(torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]).to_sparse_csr())
        >>> matrix.to_edges()
        (tensor([[0, 2, 1],
                [0, 0, 1]]), tensor([1., 2., 3.]))
        """
        ends = torch.stack([self.pattern.column_indices, self.pattern.row_indices])
        return ends.long(), self.values.movedim(-1, 0)

    @classmethod
    def from_scipy(cls, matrix: Any, *, check: bool = True) -> SparseMatrix:
        """Convert a SciPy sparse matrix or array of any format. The memory of a CSR one is shared.

        Raises ValueError if it has another number of dimensions than 2, and, see `Pattern`, if its sort_indices() or
        sum_duplicates() has to be called first. Raises TypeError for other objects.
        """
        if not hasattr(matrix, "tocsr"):
            kind = type(matrix).__name__
            raise TypeError(f"a SciPy sparse matrix expected, got {kind}; write scipy.sparse.csr_array(matrix)")
        if len(matrix.shape) != 2:
            raise ValueError(f"a SciPy matrix (rows, columns) expected, shape is {matrix.shape}")
        csr = matrix.tocsr()
        indptr, indices, values = (torch.from_numpy(a) for a in (csr.indptr, csr.indices, csr.data))
        return cls(Pattern(indptr, indices, csr.shape[1], check=check), values)

    def to_scipy(self) -> Any:
        """Convert one set of values to a scipy.sparse.csr_array.

        float16 and bfloat16 become float32, because SciPy has neither.
        """
        from scipy.sparse import csr_array

        self._expect_one_set()
        matrix = self.with_row_order(None)
        arrays = (matrix.values, matrix.pattern.indices, matrix.pattern.indptr)
        return csr_array(tuple(scipy_array(a) for a in arrays), shape=matrix.pattern.shape)

    def _expect_one_set(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"one set of values expected, values have shape {tuple(self.values.shape)}")


_MULTIPLICATIONS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, *_MULTIPLICATIONS)


def check_is_matrix(name: str, matrix: Any, hint: str = "") -> None:
    """Check that an argument is a `SparseMatrix`. Raises TypeError, whose text ends in a hint."""
    if not isinstance(matrix, SparseMatrix):
        kind = f"Tensor of {matrix.layout}" if isinstance(matrix, Tensor) else type(matrix).__name__
        raise TypeError(f"{name} should be a SparseMatrix, got {kind}{hint}")


def block_diagonal(matrices: Sequence[SparseMatrix]) -> SparseMatrix:
    """Put matrices along the diagonal of one matrix.

    Raises ValueError for no matrices, and for matrices that differ in the number of sets of values, dtype or device.
    """
    check_matrix_blocks(matrices)
    if len(matrices) == 1:
        return matrices[0]
    pattern = block_diagonal_pattern([m.pattern for m in matrices])
    return SparseMatrix(pattern, torch.cat([m.values for m in matrices], dim=-1))


def check_matrix_blocks(matrices: Sequence[SparseMatrix]) -> None:
    """Check that matrices can be the blocks of one matrix. Raises ValueError, see `block_diagonal`."""
    check_blocks([m.pattern for m in matrices])
    if len({(m.values.shape[:-1], m.values.dtype) for m in matrices}) > 1:
        kinds = sorted({f"{tuple(m.values.shape[:-1])} of {m.values.dtype}" for m in matrices})
        raise ValueError(f"matrices should have the same sets of values and dtype, got {', '.join(kinds)}")


def split_diagonal(matrix: SparseMatrix, lengths: Sequence[int]) -> list[SparseMatrix]:
    """Split a matrix into square diagonal blocks with these numbers of rows, the inverse of `block_diagonal`.

    Raises ValueError if an entry lies outside of the blocks, or if the lengths don't add up to the rows.
    """
    parts = split_diagonal_pattern(matrix.pattern, lengths)
    return [SparseMatrix(pattern, matrix.values[..., entries]) for pattern, entries in parts]


def _flat_sets(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Return a dense factor (…, N, C) as (S, N, C) for the S sets of a batch, or as (1, N, C) if all sets share it."""
    if x.ndim == 2:
        return x[None]
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    return x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:])


def _pattern_and_transpose(structure: Sequence[Tensor]) -> tuple[CsrArrays, CsrArrays, Tensor]:
    """Undo `product_arrays`."""
    return CsrArrays(*structure[:5]), CsrArrays(*structure[5:10]), structure[10]


def _spmm_forward(
    structure: Sequence[Tensor], values: Tensor, x: Tensor, transpose: bool, reduce: bool, triton: bool
) -> Tensor:
    """Multiply Aₛ xₛ or Aₛᵀ xₛ: values (S, nnz), x (S or 1, …, C) → (S, …, C), or summed over the sets (1, …, C)."""
    csr, transposed, order = _pattern_and_transpose(structure)
    csr = transposed if transpose else csr
    if len(values) == 0:
        return x.new_zeros(1 if reduce else 0, csr.indptr.shape[0] - 1, x.shape[2])
    if triton:
        from diffnet.ops.sparse import spmm_kernels

        return spmm_kernels.spmm(csr, values, x, reduce, order if transpose else None)
    return reference.spmm(csr, values[:, order] if transpose else values, x, reduce)


def _spmm_fake(
    structure: Sequence[Tensor], values: Tensor, x: Tensor, transpose: bool, reduce: bool, triton: bool
) -> Tensor:
    csr, transposed, _ = _pattern_and_transpose(structure)
    rows = (transposed if transpose else csr).indptr.shape[0] - 1
    return x.new_empty(1 if reduce else len(values), rows, x.shape[2])


def _sddmm_forward(structure: Sequence[Tensor], a: Tensor, b: Tensor, triton: bool) -> Tensor:
    """Multiply Aₛ Bₛᵀ at the entries: a (S or 1, rows, C), b (S or 1, columns, C) → (S, nnz)."""
    csr = CsrArrays(*structure[:5])
    if a.shape[0] == 0 or b.shape[0] == 0:
        return a.new_empty(0, csr.indices.shape[0])
    if triton:
        from diffnet.ops.sparse import spmm_kernels

        return spmm_kernels.sddmm(csr, a, b)
    return reference.sddmm(csr, a, b)


def _sddmm_fake(structure: Sequence[Tensor], a: Tensor, b: Tensor, triton: bool) -> Tensor:
    return a.new_empty(len(b) if len(a) == 1 else len(a), structure[1].shape[0])


def _spmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, values, x = ctx.saved_tensors
    transpose, _, triton = ctx.settings
    need_values, need_x = ctx.needs_input_grad[1:3]
    grad = grad.to(values.dtype)  # under autocast it may be narrower
    grad_values = grad_x = None
    if need_values:
        a, b = (x, grad) if transpose else (grad, x)
        grad_values = sddmm_operator(structure, a, b, triton)
    if need_x:
        # If all sets share x, its gradient is the sum over the sets.
        grad_x = spmm_operator(structure, values, grad, not transpose, len(x) != len(values), triton)
    return [None] * len(structure), grad_values, grad_x, None, None, None


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, a, b = ctx.saved_tensors
    (triton,) = ctx.settings
    need_a, need_b = ctx.needs_input_grad[1:3]
    grad = grad.to(a.dtype)
    grad_a = spmm_operator(structure, grad, b, False, len(a) != len(grad), triton) if need_a else None
    grad_b = spmm_operator(structure, grad, a, True, len(b) != len(grad), triton) if need_b else None
    return [None] * len(structure), grad_a, grad_b, None


# As custom operators, they keep torch.compile from tracing into sparse tensors and kernels.
spmm_operator = differentiable("diffnet::spmm", _spmm_forward, _spmm_fake, save_settings, _spmm_backward)
sddmm_operator = differentiable("diffnet::sddmm", _sddmm_forward, _sddmm_fake, save_settings, _sddmm_backward)
