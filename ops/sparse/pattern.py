"""`Pattern`: the positions of the entries of a sparse matrix, without their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_count, check_index, check_is_tensor, not_a_tensor
from diffnet.ops.common.compiler import is_stand_in, not_compiled
from diffnet.ops.common.limits import MAX_INT32
from diffnet.ops.common.memo import FieldwiseCopy, can_remember, memoized, remember
from diffnet.ops.common.ragged import cat_shifted, row_offsets
from diffnet.ops.sparse.csr import CsrArrays, inverse_order, near_rows, row_of_each

# A row with more entries than this is long. Kernels divide it into pieces of this size and add up the sums of the
# pieces in order. Otherwise one row of 10,000 entries among rows of 7 would keep a whole GPU waiting.
PIECE = 128

# A program computes several rows at a time and waits for the longest of them. If that would double the work, programs
# take rows of similar length together.
ROWS_TOGETHER = 8
MAX_UNEVENNESS = 2.0

# A mark of functions that find what a pattern then remembers.
at_first_use = partial(not_compiled, advice="call .prepare() of the pattern once before, uncompiled")


@dataclass(frozen=True, eq=False, init=False)
class Pattern(FieldwiseCopy):
    """The structure of a sparse matrix in CSR form. It holds no values.

    Non-contiguous index arrays are copied, because kernels read them with stride 1.

    Entry e lies in row row_indices[e] and column column_indices[e], whatever the row order. The arrays of the
    constructor are `stored_indptr` and `stored_indices`. Without a row order, `indptr` and `indices` are the same
    arrays. With one, they would belong to other rows, so reading them raises ValueError.

    Args:
        indptr: (rows+1,) int32 or int64. Row i has the entries indptr[i]:indptr[i+1]. With a row order, these are the
            entries of row row_order[i].
        indices: (nnz,) of the same dtype, the column of each entry. Columns ascend within a row and occur at most once.
        columns: the number of columns
        row_order: (rows,) of the same dtype, a permutation of the rows: the order in which rows are stored, see
            `with_row_order`. None means that rows are stored in their own order.
        check: whether to check all of this. The check reads the arrays, so it waits for a GPU. Pass False for arrays
            that are known to be right.

    Raises:
        TypeError: for index arrays that are not plain tensors, and for a number of columns that is no integer.
        ValueError: that names the wrong value.

    These errors are raised if `check` is True. On the meta device there are no values to check.

    >>> import torch
    >>> pattern = Pattern(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1]), 3)
    >>> pattern.shape, pattern.nnz
    ((2, 3), 3)
    >>> pattern.row_indices
    tensor([0, 0, 1])
    """

    stored_indptr: Tensor
    stored_indices: Tensor
    columns: int
    row_order: Tensor | None
    # Found at first use, see `memoized`.
    _transpose: ClassVar[tuple[Pattern, Tensor] | None] = None
    _long_pieces: ClassVar[Tensor | None] = None
    _by_length: ClassVar[Tensor | None] = None
    _product_arrays: ClassVar[dict[tuple[bool, bool], list[Tensor]]]

    def __init__(
        self, indptr: Tensor, indices: Tensor, columns: int, row_order: Tensor | None = None, *, check: bool = True
    ) -> None:
        if check:
            arrays = {"indptr": indptr, "indices": indices} | ({} if row_order is None else {"row_order": row_order})
            for name, array in arrays.items():
                check_plain(name, array)
            if not is_stand_in(columns):
                check_count("columns", columns, 0)
            # While something is traced, tensors are instances of subclasses, which have no values to check.
            if all(type(array) is Tensor for array in arrays.values()) and not (indptr.is_meta and indices.is_meta):
                _check_csr(indptr, indices, columns, row_order)
        remember(
            self,
            stored_indptr=contiguous(indptr),
            stored_indices=contiguous(indices),
            columns=columns,
            row_order=contiguous(row_order),
            _transpose=None,
            _long_pieces=None,
            _by_length=None,
            _product_arrays={},
        )

    @classmethod
    def from_row_lengths(cls, lengths: Tensor, indices: Tensor, columns: int, *, check: bool = True) -> Pattern:
        """Make a pattern from the number of entries of each row, (rows,) of any integer dtype, instead of indptr.

        Indices become int64 if there are more than 2³¹ entries.

        >>> import torch
        >>> Pattern.from_row_lengths(torch.tensor([2, 1]), torch.tensor([0, 2, 1]), 3).indptr
        tensor([0, 2, 3])
        """
        if check:
            check_plain("lengths", lengths)
            check_plain("indices", indices)
        if lengths.ndim != 1 or lengths.is_floating_point():
            raise ValueError(f"row lengths should be 1-D integers, got {lengths.dtype} of {tuple(lengths.shape)}")
        indices = indices.long() if indices.numel() > MAX_INT32 else indices
        zero = indices.new_zeros(1)
        return cls(torch.cat([zero, lengths.cumsum(0).to(indices.dtype)]), indices, columns, check=check)

    @classmethod
    def from_mask(cls, mask: Tensor) -> Pattern:
        """Make the pattern of the entries that are True: mask (rows, columns) bool. It waits for a GPU.

        >>> import torch
        >>> Pattern.from_mask(torch.eye(3) > 0)
        Pattern(shape=(3, 3), nnz=3, device=cpu)
        """
        check_is_tensor("mask", mask)
        if mask.dtype != torch.bool or mask.ndim != 2:
            raise ValueError(f"mask should be bool of shape (rows, columns), got {mask.dtype} of {tuple(mask.shape)}")
        return cls.from_row_lengths(mask.sum(1), mask.nonzero()[:, 1], mask.shape[1], check=False)

    @classmethod
    def from_coo(cls, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> tuple[Pattern, Tensor]:
        """Make a pattern from the row and the column of each entry, (nnz,) int32 or int64 in any order.

        Returns the pattern, and the position of each of its entries in the arguments, (nnz,). Values move along as
        values[..., entries]. Raises ValueError for an entry outside of the shape, and for one that occurs twice.

        >>> import torch
        >>> pattern, entries = Pattern.from_coo(torch.tensor([1, 0]), torch.tensor([2, 1]), (2, 3))
        >>> pattern.row_indices, entries
        (tensor([0, 1]), tensor([1, 0]))
        """
        for name, array in (("rows", rows), ("columns", columns)):
            check_plain(name, array)
            check_index(name, array, None if array is rows else rows.shape, rows.device)
        if len(rows) > 0 and not 0 <= int(rows.min()) <= int(rows.max()) < shape[0]:
            raise ValueError(f"rows should be from 0 to {shape[0] - 1}, got {int(rows.min())} to {int(rows.max())}")
        entries = torch.argsort(rows.long() * shape[1] + columns)
        lengths = torch.bincount(rows, minlength=shape[0])
        return cls.from_row_lengths(lengths, columns[entries], shape[1]), entries

    @classmethod
    def window(cls, length: int, before: int, after: int = 0) -> Pattern:
        """Make the pattern (length, length) of a sliding window: row i has the columns i − before to i + after.

        `after=0` is causal.

        >>> Pattern.window(4, before=1).indices
        tensor([0, 0, 1, 1, 2, 2, 3])
        """
        for name, value in (("length", length), ("before", before), ("after", after)):
            check_count(name, value, 0)
        rows = torch.arange(length)
        first, end = (rows - before).clamp(min=0), (rows + after + 1).clamp(max=length)
        lengths = end - first
        starts = torch.repeat_interleave(first - lengths.cumsum(0) + lengths, lengths)
        return cls.from_row_lengths(lengths, starts + torch.arange(len(starts)), length, check=False)

    @classmethod
    def between(
        cls, lengths_a: Sequence[int], lengths_b: Sequence[int], device: torch.device | str | None = None
    ) -> Pattern:
        """Make the pattern in which each row of mesh p of batch a has all rows of mesh p of batch b.

        lengths_a, lengths_b: the rows of each mesh, such as `lengths` of `Operators`

        Attention on it is cross-attention between pairs of meshes, without a mask of all rows of both batches. Raises
        ValueError for other numbers of meshes, and for a length below 0.

        >>> Pattern.between([1, 2], [2, 1])
        Pattern(shape=(3, 3), nnz=4, device=cpu)
        """
        a, b = (torch.tensor(list(lengths), dtype=torch.int64, device=device) for lengths in (lengths_a, lengths_b))
        if len(a) != len(b) or min([0, *lengths_a, *lengths_b]) < 0:
            raise ValueError(
                f"lengths should be at least 0, one for each mesh of both, got {lengths_a} and {lengths_b}"
            )
        of_rows = b.repeat_interleave(a)  # entries of each row
        starts = (b.cumsum(0) - b).repeat_interleave(a) - (of_rows.cumsum(0) - of_rows)
        entries = torch.arange(int(a @ b), device=device)
        columns = entries + starts.repeat_interleave(of_rows)
        return cls.from_row_lengths(of_rows, columns, sum(lengths_b), check=False)

    @classmethod
    def random(cls, rows: int, columns: int, density: float, generator: torch.Generator | None = None) -> Pattern:
        """Make a pattern with random columns, of which each row has the same number, density · columns, rounded.

        Raises ValueError for a density that is not from 0 to 1.

        >>> Pattern.random(100, 50, 0.1)
        Pattern(shape=(100, 50), nnz=500, device=cpu)
        """
        check_count("rows", rows, 0)
        check_count("columns", columns, 0)
        if not 0 <= density <= 1:
            raise ValueError(f"density should be from 0 to 1, got {density}")
        count = round(density * columns)
        at_once = max(1, 2**22 // max(columns, 1))  # rows whose random numbers are in memory
        drawn = [
            torch.rand(min(at_once, rows - first), columns, generator=generator).topk(count).indices.sort().values
            for first in range(0, rows, at_once)
        ]
        indices = torch.cat([each.flatten() for each in drawn]) if drawn else torch.zeros(0, dtype=torch.int64)
        return cls.from_row_lengths(torch.full((rows,), count), indices, columns, check=False)

    @classmethod
    def vector(cls, indices: Tensor, size: int, *, check: bool = True) -> Pattern:
        """Make the pattern of a sparse vector of this size: a matrix of one row."""
        if check:
            check_plain("indices", indices)
        return cls(indices.new_tensor([0, indices.numel()]), indices, size, check=check)

    @property
    def indptr(self) -> Tensor:
        """(rows+1,); row i has the entries indptr[i]:indptr[i+1]. Raises ValueError for a pattern with a row order."""
        self._expect_own_order("indptr")
        return self.stored_indptr

    @property
    def indices(self) -> Tensor:
        """The column of each entry, (nnz,), row by row. Raises ValueError for a pattern with a row order."""
        self._expect_own_order("indices")
        return self.stored_indices

    def _expect_own_order(self, name: str) -> None:
        if self.row_order is not None:
            raise ValueError(
                f"the rows of this pattern are stored in the order row_order, so it has no .{name} in the order of the "
                "rows; read .row_indices and .column_indices, or convert with .with_row_order(None), to_torch or "
                f"to_scipy of the matrix. The array as it is stored is .stored_{name}"
            )

    def __repr__(self) -> str:
        return f"Pattern(shape={self.shape}, nnz={self.nnz}, device={self.device})"

    @property
    def device(self) -> torch.device:
        return self.stored_indices.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored_indptr.shape[0] - 1, self.columns

    @property
    def nnz(self) -> int:
        """The number of entries."""
        return self.stored_indices.shape[0]

    @property
    def row_lengths(self) -> Tensor:
        """The number of entries of each row, (rows,)."""
        return self._of_each_row(torch.diff(self.stored_indptr))

    @property
    def row_starts(self) -> Tensor:
        """The first entry of each row, (rows,)."""
        return self._of_each_row(self.stored_indptr[:-1])

    def _of_each_row(self, stored: Tensor) -> Tensor:
        return stored if self.row_order is None else stored[inverse_order(self.row_order)]

    @property
    def row_indices(self) -> Tensor:
        """The row of each entry, (nnz,)."""
        return row_of_each(self.stored_indptr, self.stored_indices, self.row_order)

    @property
    def column_indices(self) -> Tensor:
        """The column of each entry, (nnz,)."""
        return self.stored_indices

    @property
    def transpose(self) -> tuple[Pattern, Tensor]:
        """The transposed pattern, and the position in this pattern of each of its entries, (nnz,). Sorted once."""
        return memoized(self, "_transpose", _sort_transpose)

    @property
    def long_pieces(self) -> Tensor:
        """The pieces of all rows with more than PIECE entries, (P, 4) int64. Found once.

        The columns are the row, the place where it is stored, and the first entry and the end of the piece.
        """
        return memoized(self, "_long_pieces", _find_long_pieces)

    @property
    def rows_by_length(self) -> Tensor:
        """The rows sorted by length, (rows,), or (0,) if the lengths of neighboring rows are similar. Found once.

        They are similar on every mesh. `prepare` may find another order for them.
        """
        return memoized(self, "_by_length", _find_rows_by_length)

    def prepare(self, *, backward: bool = True) -> Pattern:
        """Find everything that products and their backward passes need now, instead of in the first step.

        Call it before a step that is compiled or captured in a CUDA graph, and for a pattern that is used again: if
        the rows of a large square pattern read distant rows of the dense factor, products take groups of neighbors
        together from then on, see `near_rows`. Results stay equal to the bit.

        backward: False if nothing will be differentiated or multiplied by the transpose, which is not sorted then
        """
        is_new = self._by_length is None and self.row_order is None and can_remember()
        if is_new and len(self.rows_by_length) == 0:
            order = near_rows(self.stored_indptr, self.stored_indices, self.columns)
            for each in (self, self.transpose[0]) if backward else (self,):
                if len(each.rows_by_length) == 0:
                    remember(each, _by_length=order)
        product_arrays(self, triton=True, transposed=backward)
        return self

    def with_row_order(self, order: Tensor | None, *, check: bool = True) -> tuple[Pattern, Tensor]:
        """Store the rows in another order. Rows keep their numbers, so products give the same results.

        Kernels take rows in the order in which they are stored. Rows computed at about the same time should read the
        same rows of the dense factor, which are then in the cache. If the vertices of a mesh are numbered at random, an
        order along the surface achieves that. The transpose of a square pattern is stored in the same order.

        Args:
            order: (rows,) integers, see `row_order`; None for the rows' own order
            check: see `Pattern`

        Returns:
            The pattern, and the previous position of each entry, (nnz,). Values move along as values[..., entries].
        """
        if order is not None:
            if check:
                check_plain("order", order)
            order = order.to(self.stored_indptr)
            if check:
                _check_permutation("row_order", order, self.stored_indptr)
        rows = torch.arange(self.shape[0], device=self.stored_indptr.device) if order is None else order
        stored, entries = rows_of(self, rows)
        return Pattern(stored.indptr, stored.indices, stored.columns, order, check=False), entries

    def with_known(
        self,
        *,
        transpose: tuple[Pattern, Tensor] | None = None,
        long_pieces: Tensor | None = None,
        rows_by_length: Tensor | None = None,
        check: bool = True,
    ) -> Pattern:
        """Return the same pattern, for which some properties are known already and need not be found.

        rows_by_length: also another order (rows,) in which products take rows, of the dtype of the indices. Unlike
            `with_row_order`, entries stay where they are.
        check: whether to check rows_by_length, which waits for a GPU

        Raises ValueError if rows_by_length is neither empty nor a permutation of the rows.
        """
        if check and rows_by_length is not None and len(rows_by_length) > 0:
            check_plain("rows_by_length", rows_by_length)
            _check_permutation("rows_by_length", rows_by_length, self.stored_indptr)
        return remember(
            Pattern(self.stored_indptr, self.stored_indices, self.columns, self.row_order, check=False),
            _transpose=self._transpose if transpose is None else transpose,
            _long_pieces=self._long_pieces if long_pieces is None else long_pieces,
            _by_length=self._by_length if rows_by_length is None else rows_by_length,
        )

    def to(self, device: torch.device | str | None, *, non_blocking: bool = False) -> Pattern:
        """Move the pattern to a device, along with everything that it has already found.

        non_blocking: see `torch.Tensor.to`
        """
        indices = self.stored_indices.to(device=device, non_blocking=non_blocking)
        if indices is self.stored_indices:
            return self
        return self.map_tensors(
            lambda x: indices if x is self.stored_indices else x.to(device=device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> Pattern:
        """Copy the pattern to pinned memory, along with everything that it has already found."""
        return self.map_tensors(Tensor.pin_memory)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Pattern:
        """Apply a function to all index arrays, also to those that the pattern has already found.

        function: returns an array with the same values, such as a copy on another device
        """
        row_order, pieces, by_length = (
            None if x is None else function(x) for x in (self.row_order, self._long_pieces, self._by_length)
        )
        indptr, indices = function(self.stored_indptr), function(self.stored_indices)
        mapped = Pattern(indptr, indices, self.columns, row_order, check=False)
        transpose = None
        if self._transpose is not None:
            pattern, order = self._transpose
            transpose = pattern.map_tensors(function), function(order)
        return remember(mapped, _transpose=transpose, _long_pieces=pieces, _by_length=by_length)


def contiguous(array: Any) -> Any:
    """An index array with stride 1, as kernels read it. None and stand-ins of torch.compile stay."""
    return array.contiguous() if isinstance(array, Tensor) and not array.is_contiguous() else array


def check_is_pattern(pattern: Any, name: str = "pattern", hint: str = "") -> None:
    """Check that an argument is a CSR pattern. Raises TypeError, whose text ends in a hint."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{name} should be a Pattern, got {type(pattern).__name__}{hint}")


def check_square(name: str, pattern: Pattern, size: int, device: torch.device) -> None:
    """Check that a pattern, or that of a matrix, has shape (size, size) and is on a device. Raises ValueError."""
    if pattern.shape != (size, size):
        raise ValueError(f"{name} should have shape {(size, size)}, shape is {pattern.shape}")
    if pattern.device != device:
        raise ValueError(f"{name} should be on {device}, it is on {pattern.device}")


def check_plain(name: str, array: Any) -> None:
    """Check that an index array is a tensor and no parameter. Raises TypeError that says what to write instead."""
    if isinstance(array, torch.nn.Parameter):
        raise TypeError(f"{name} should be a plain tensor, got Parameter; write {name}.data")
    if not isinstance(array, Tensor) and not is_stand_in(array):
        raise not_a_tensor(name, array)


def _check_csr(indptr: Tensor, indices: Tensor, columns: int, row_order: Tensor | None) -> None:
    """Check that arrays form a CSR pattern, see `Pattern`. Raises ValueError that names the value."""
    for name, array in (("indices", indices), ("indptr", indptr)):
        if array.ndim != 1 or array.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} should be 1-D int32 or int64, got {array.dtype} of shape {tuple(array.shape)}")
    if indptr.dtype != indices.dtype or indptr.device != indices.device:
        raise ValueError(
            f"indptr and indices should have one dtype and device, got {indptr.dtype} on {indptr.device} "
            f"and {indices.dtype} on {indices.device}"
        )
    if len(indptr) == 0:
        raise ValueError("indptr should have one value more than there are rows, got none")
    first, last = indptr[[0, -1]].tolist()
    if first != 0:
        raise ValueError(f"indptr should start at 0, got {first}")
    if last != len(indices):
        raise ValueError(f"indptr should end at the number of indices, {len(indices)}, got {last}")
    descents = torch.diff(indptr) < 0
    if descents.any():
        row = int(descents.nonzero()[0])
        raise ValueError(f"indptr should not descend, got {indptr[row]} then {indptr[row + 1]} at row {row}")
    if row_order is not None:
        _check_permutation("row_order", row_order, indptr)
    outside = (indices < 0) | (indices >= columns)
    if outside.any():
        entry = int(outside.nonzero()[0])
        raise ValueError(f"indices should be from 0 to {columns - 1}, got {indices[entry]} at entry {entry}")
    rows = row_of_each(indptr, indices)
    wrong = (rows[1:] == rows[:-1]) & (indices[1:] <= indices[:-1])
    if wrong.any():
        entry = int(wrong.nonzero()[0])
        before, after = indices[entry : entry + 2].tolist()
        problem = f"column {after} twice" if before == after else f"{before} before {after}"
        row = int(rows[entry] if row_order is None else row_order[rows[entry]])
        raise ValueError(f"indices should ascend within a row, got {problem} in row {row}")


def _check_permutation(name: str, order: Tensor, indptr: Tensor) -> None:
    """Check that `order` is a permutation of the rows of a pattern. Raises ValueError that names the row."""
    rows = len(indptr) - 1
    if order.shape != (rows,) or order.dtype != indptr.dtype or order.device != indptr.device:
        raise ValueError(
            f"{name} should have shape ({rows},), dtype {indptr.dtype} and be on {indptr.device}, "
            f"got {order.dtype} of shape {tuple(order.shape)} on {order.device}"
        )
    missing = (order.sort().values != torch.arange(rows, device=order.device)).nonzero()
    if len(missing) > 0:
        raise ValueError(f"{name} should have each row once, row {int(missing[0])} is missing or twice")


def csr_arrays(pattern: Pattern, triton: bool, *, by_length: bool = False) -> CsrArrays:
    """Return the arrays of a pattern. Only Triton's kernels need the pieces of long rows.

    by_length: whether kernels may take rows by length, as those of products do
    """
    none, order = pattern.stored_indices.new_empty(0), pattern.row_order
    return CsrArrays(
        pattern.stored_indptr,
        pattern.stored_indices,
        pattern.long_pieces if triton else none,
        none if order is None else order,
        pattern.rows_by_length if by_length and triton and order is None else none,
    )


def product_arrays(pattern: Pattern, triton: bool, long: bool = False, *, transposed: bool = True) -> list[Tensor]:
    """Return the arrays that `spmm_operator` and `sddmm_operator` take.

    They are the arrays of the pattern, the arrays of its transpose, and the position in the pattern of each entry of
    the transpose.

    long: whether the pattern's own arrays are int64
    transposed: False if neither the product nor a derivative reads the transpose. Its arrays have no meaning then.
    """
    if not transposed and pattern._transpose is None:
        with torch.inference_mode(False):  # training may use what the pattern finds, too
            csr = csr_arrays(pattern, triton, by_length=True)
        return [*csr, *csr, csr.indices]
    if torch.compiler.is_compiling():
        return _find_product_arrays(pattern, triton, long)
    arrays = pattern._product_arrays.get((triton, long))
    if arrays is None:
        with torch.inference_mode(False):  # training may use the arrays, too
            arrays = _find_product_arrays(pattern, triton, long)
        if all(type(array) is Tensor for array in arrays):  # not while something is traced
            pattern._product_arrays[triton, long] = arrays
    return arrays


def _find_product_arrays(pattern: Pattern, triton: bool, long: bool) -> list[Tensor]:
    transposed, order = pattern.transpose
    csr = csr_arrays(pattern, triton, by_length=True)
    same_arrays = (
        transposed.stored_indptr is pattern.stored_indptr and transposed.stored_indices is pattern.stored_indices
    )
    if same_arrays and can_remember():
        remember(transposed, _long_pieces=pattern._long_pieces, _by_length=pattern._by_length)
    return [*(map(Tensor.long, csr) if long else csr), *csr_arrays(transposed, triton, by_length=True), order]


def rows_of(pattern: Pattern, rows: Tensor) -> tuple[Pattern, Tensor]:
    """Return the pattern of some rows, one below the other, and the position of each of its entries in `pattern`."""
    lengths = pattern.row_lengths[rows]
    starts = torch.repeat_interleave(pattern.row_starts[rows] - (lengths.cumsum(0) - lengths), lengths)
    entries = starts + torch.arange(len(starts), device=starts.device)
    return Pattern.from_row_lengths(lengths, pattern.stored_indices[entries], pattern.columns, check=False), entries


def block_diagonal_pattern(patterns: Sequence[Pattern]) -> Pattern:
    """Put patterns along the diagonal of one pattern. Remembered values that all of them have are combined, too.

    Indices become int64 if rows, columns or entries exceed 2³¹ together.

    Raises ValueError for no patterns, and for patterns that differ in dtype or device.
    """
    check_blocks(patterns)
    if len(patterns) == 1:
        return patterns[0]
    if max(sum(sizes) for sizes in zip(*((*p.shape, p.nnz) for p in patterns), strict=True)) > MAX_INT32:
        patterns = [p.map_tensors(Tensor.long) for p in patterns]
    packed = _pack(patterns)
    transposes = [p._transpose for p in patterns if p._transpose is not None]
    if len(transposes) < len(patterns):
        return packed
    order = cat_shifted([order for _, order in transposes], row_offsets([p.nnz for p in patterns]))
    return remember(packed, _transpose=(_pack([pattern for pattern, _ in transposes]), order))


def check_blocks(patterns: Sequence[Pattern]) -> None:
    """Check that patterns can be the blocks of one pattern. Raises ValueError, see `block_diagonal_pattern`."""
    if len(patterns) == 0:
        raise ValueError("block_diagonal needs one block or more, got none")
    if len({(p.stored_indices.dtype, p.stored_indices.device) for p in patterns}) > 1:
        kinds = sorted({f"{p.stored_indices.dtype} on {p.stored_indices.device}" for p in patterns})
        raise ValueError(f"blocks should have indices of one dtype on one device, got {', '.join(kinds)}")


def split_diagonal_pattern(pattern: Pattern, lengths: Sequence[int]) -> list[tuple[Pattern, slice]]:
    """Split a pattern into square diagonal blocks with these numbers of rows, the inverse of `block_diagonal_pattern`.

    A transpose that the pattern has found is split, too.

    Returns the pattern of each block and the slice of its entries.

    Raises ValueError if an entry lies outside of the blocks, the lengths don't add up to the rows, or rows aren't
    stored block by block.
    """
    rows, columns = pattern.shape
    if rows != columns or sum(lengths) != rows or any(n < 0 for n in lengths):
        raise ValueError(
            f"lengths should be at least 0 and add up to both the rows and the columns of the pattern, "
            f"{rows} and {columns}, got {list(lengths)}"
        )
    if pattern.stored_indptr.is_meta:
        raise ValueError("a pattern on the meta device has no values to split by; split it before .to('meta')")
    bounds = list(accumulate(lengths, initial=0))
    entries = pattern.stored_indptr[bounds].tolist()
    order = pattern.row_order
    _check_extents(pattern, bounds, entries)
    # If no row of the pattern is long, none of a block is. If neighboring rows are similar, those of a block are, too,
    # as a rule; products are right in any case.
    facts = {
        name: value
        for name in ("_long_pieces", "_by_length")
        if (value := getattr(pattern, name)) is not None and len(value) == 0
    }
    parts = []
    for lo, hi, first, last in zip(bounds, bounds[1:], entries, entries[1:], strict=False):
        row_order = None if order is None else order[lo:hi] - lo
        indptr, indices = pattern.stored_indptr[lo : hi + 1] - first, pattern.stored_indices[first:last] - lo
        part = remember(Pattern(indptr, indices, hi - lo, row_order, check=False), **facts)
        parts.append((part, slice(first, last)))
    if pattern._transpose is not None:
        transposed, position = pattern._transpose
        for (part, mine), (other, _) in zip(parts, split_diagonal_pattern(transposed, lengths), strict=True):
            remember(part, _transpose=(other, position[mine] - mine.start))
    return parts


def _check_extents(pattern: Pattern, bounds: Sequence[int], entries: Sequence[int]) -> None:
    """Check that the rows of each block, and all of their entries, lie within the block.

    bounds, entries: the first row and the first entry of each block, and the ends
    """
    arrays = [(pattern.stored_indices, entries)]
    if pattern.row_order is not None:
        arrays.append((pattern.row_order, bounds))
    outside = []
    for array, ends in arrays:
        limits = torch.tensor([bounds[:-1], bounds[1:], _differences(ends)]).to(array.device)
        lo, hi = torch.repeat_interleave(limits[:2], limits[2], dim=1, output_size=len(array))
        outside.append((array < lo) | (array >= hi))
    if not torch.stack([each.any() for each in outside]).any():  # one read-back for both
        return
    if len(outside) == 2 and outside[1].any():
        at = int(outside[1].nonzero()[0])
        b = next(b for b, end in enumerate(bounds[1:]) if at < end)
        raise ValueError(
            f"rows {bounds[b]} to {bounds[b + 1] - 1} form a block, but rows of other blocks are stored among them"
        )
    entry = int(outside[0].nonzero()[0])
    row, column = int(pattern.row_indices[entry]), int(pattern.stored_indices[entry])
    raise ValueError(f"lengths should cut no entry, got {_differences(bounds)}, which cut entry ({row}, {column})")


def _differences(bounds: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(bounds)]


def _pack(patterns: Sequence[Pattern]) -> Pattern:
    rows = row_offsets([p.shape[0] for p in patterns])
    columns = [p.columns for p in patterns]
    entries = row_offsets([p.nnz for p in patterns])
    *first, last = (p.stored_indptr for p in patterns)
    indptr = cat_shifted([*(each[:-1] for each in first), last], entries)
    indices = cat_shifted([p.stored_indices for p in patterns], row_offsets(columns))
    long_pieces = [p._long_pieces for p in patterns if p._long_pieces is not None]
    pieces = _pack_pieces(long_pieces, rows, entries) if len(long_pieces) == len(patterns) else None
    order = _pack_orders([p.row_order for p in patterns], patterns, rows)
    by_length = [p._by_length for p in patterns if p._by_length is not None]
    uneven = None
    if len(by_length) == len(patterns):
        uneven = _pack_orders([o if len(o) > 0 else None for o in by_length], patterns, rows)
        uneven = indptr[:0] if uneven is None else uneven
    packed = Pattern(indptr, indices, sum(columns), order, check=False)
    return remember(packed, _long_pieces=pieces, _by_length=uneven)


def _pack_pieces(pieces: Sequence[Tensor], rows: Sequence[int], entries: Sequence[int]) -> Tensor:
    if all(len(each) == 0 for each in pieces):
        return pieces[0]
    # Rows and their places are shifted by the rows before, the entries by the entries before.
    return torch.cat(
        [torch.cat([each[:, :2] + r, each[:, 2:] + e], 1) for each, r, e in zip(pieces, rows, entries, strict=True)]
    )


def _pack_orders(orders: Sequence[Tensor | None], patterns: Sequence[Pattern], offsets: Sequence[int]) -> Tensor | None:
    """Concatenate the row orders of several patterns; None stands for a pattern's own order."""
    if all(order is None for order in orders):
        return None
    permutations = [
        torch.arange(p.shape[0], dtype=p.stored_indptr.dtype, device=p.stored_indptr.device) if order is None else order
        for order, p in zip(orders, patterns, strict=True)
    ]
    return cat_shifted(permutations, offsets)


def transposed_entries(pattern: Pattern) -> Tensor:
    """Return the position in a pattern of each entry of its transpose, (nnz,). It doesn't wait for a GPU."""
    (rows, columns), row_order = pattern.shape, pattern.row_order
    if row_order is None:
        return torch.sort(pattern.stored_indices, stable=True).indices
    column = pattern.stored_indices.long()
    if rows == columns:
        column = inverse_order(row_order)[column]
    return torch.sort(column * rows + pattern.row_indices).indices


@at_first_use
def _sort_transpose(pattern: Pattern) -> tuple[Pattern, Tensor]:
    (rows, columns), row_order = pattern.shape, pattern.row_order
    if pattern.stored_indices.is_meta:
        counts = torch.zeros(columns, dtype=torch.int64, device="meta")  # bincount is not implemented there
    else:
        counts = torch.bincount(pattern.stored_indices, minlength=columns)
    order = transposed_entries(pattern)
    if rows != columns:
        row_order = None
    if row_order is not None:
        counts = counts[row_order]
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(pattern.stored_indptr.dtype)
    return Pattern(indptr, pattern.row_indices[order], rows, row_order, check=False), order


@at_first_use
def _find_long_pieces(pattern: Pattern) -> Tensor:
    indptr = pattern.stored_indptr.long()
    lengths = torch.diff(indptr)
    if lengths.numel() == 0 or lengths.is_meta or lengths.max() <= PIECE:
        return lengths.new_empty(0, 4)
    long = torch.nonzero(lengths > PIECE)[:, 0]
    counts = (lengths[long] + PIECE - 1) // PIECE
    at = torch.repeat_interleave(long, counts)
    number = torch.arange(len(at), device=at.device) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first = indptr[at] + number * PIECE
    rows = at if pattern.row_order is None else pattern.row_order.long()[at]
    return torch.stack([rows, at, first, torch.minimum(first + PIECE, indptr[at + 1])], dim=1)


@at_first_use
def _find_rows_by_length(pattern: Pattern) -> Tensor:
    lengths = torch.diff(pattern.stored_indptr)
    similar = pattern.stored_indices.new_empty(0)
    if lengths.numel() == 0 or lengths.is_meta:
        return similar
    added, longest, entries = -len(lengths) % ROWS_TOGETHER, int(lengths.max()), int(lengths.sum())
    # On most meshes, even groups that all take as long as the longest row are similar enough. This check takes a third
    # of the time of the next one.
    if longest <= PIECE and (len(lengths) + added) * longest <= MAX_UNEVENNESS * entries:
        return similar
    short = torch.where(lengths > PIECE, 0, lengths)  # long rows are computed in pieces
    groups = torch.nn.functional.pad(short, (0, added)).reshape(-1, ROWS_TOGETHER)
    if ROWS_TOGETHER * groups.amax(1).sum() <= MAX_UNEVENNESS * short.sum():
        return similar
    return torch.sort(lengths, stable=True).indices.to(pattern.stored_indptr)
