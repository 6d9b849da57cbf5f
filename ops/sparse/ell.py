"""`EllPattern`: the structure of a sparse matrix with a fixed number of places in every row.

Operations run on the CSR pattern of the used places. Unused places are never read, neither their values nor the rows
of the dense factor that they might point to, so an inf or NaN there has no effect.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend
from diffnet.ops.common.checks import check_count, check_integer, check_operand
from diffnet.ops.common.compiler import is_stand_in
from diffnet.ops.common.memo import memoized, remember
from diffnet.ops.sparse.op import sddmm, spmm
from diffnet.ops.sparse.pattern import Pattern, at_first_use, check_is_pattern, contiguous
from diffnet.ops.sparse.softmax import check_broadcast, sparse_softmax


@dataclass(frozen=True, eq=False)
class EllPattern:
    """The structure of a sparse matrix with the same number of places in every row.

    Values have shape (…, rows, width). Values at unused places are ignored, and their gradients are 0.

    Args:
        indices: (rows, width) int32 or int64, the column of each entry. Columns ascend within a row and occur at most
            once. Unused places come last and hold −1. A non-contiguous array is copied.
        columns: the number of columns
        check: whether to check all of this. The check reads the indices, so it waits for a GPU. Pass False for indices
            that are known to be right.

    Raises:
        TypeError: if `indices` is no tensor or `columns` is no integer.
        ValueError: that names the wrong value.

    >>> import torch
    >>> pattern = EllPattern(torch.tensor([[0, 2], [1, -1]]), 3)
    >>> pattern.matmul(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.eye(3))
    tensor([[1., 0., 2.],
            [0., 3., 0.]])
    """

    indices: Tensor
    columns: int
    check: InitVar[bool] = field(default=True, kw_only=True)
    # Found at first use, see `memoized`.
    _csr: ClassVar[tuple[Pattern, Tensor | None] | None] = None
    _transpose: ClassVar[tuple[EllPattern, Tensor] | None] = None

    def __post_init__(self, check: bool) -> None:
        if check:
            _check_ell(self.indices, self.columns)
        remember(self, indices=contiguous(self.indices), _csr=None, _transpose=None)

    @classmethod
    def from_pattern(cls, pattern: Pattern, width: int | None = None) -> tuple[EllPattern, Tensor]:
        """Convert a CSR pattern. The default width is the length of the longest row. It is read, which waits for a GPU.

        Returns the ELL pattern, and `entries` (rows, width) int64: the position of each entry in the values of the CSR
        pattern, −1 at unused places.

        Raises TypeError if `pattern` is no `Pattern` or `width` is no integer, ValueError if a row is longer.
        """
        check_is_pattern(pattern)
        lengths = pattern.row_lengths
        longest = int(lengths.max()) if len(lengths) else 0
        width = longest if width is None else check_integer("width", width)
        if width < longest:
            raise ValueError(f"width should be at least the longest row's length, {longest}, got {width}")
        place = torch.arange(width, device=pattern.device)
        there = place < lengths[:, None]
        entries = torch.where(there, pattern.row_starts[:, None] + place, -1)
        if pattern.nnz == 0:
            return cls(entries.to(pattern.column_indices.dtype), pattern.columns, check=False), entries
        indices = torch.where(there, pattern.column_indices[entries.clamp(min=0)], -1)
        return cls(indices, pattern.columns, check=False), entries

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.indices), self.columns

    @property
    def there(self) -> Tensor:
        """Whether each place is used, (rows, width) bool."""
        return self.indices >= 0

    @property
    def csr(self) -> tuple[Pattern, Tensor | None]:
        """The CSR pattern of the used places, and where they are, made once. The first use waits for a GPU.

        The second is the position of each entry in the flattened places, (nnz,) int64; None if all places are used.
        Values move along as values[…, there].
        """
        return memoized(self, "_csr", _find_used)

    @property
    def transpose(self) -> tuple[EllPattern, Tensor]:
        """The transposed pattern, and where its entries come from, made once. The first use waits for a GPU.

        The second is the position of each entry in the flattened places of this pattern, (columns, width of the
        transposed pattern) int64, −1 at unused places. Values move along as
        values.flatten(-2)[…, entries.clamp(min=0)].
        """
        return memoized(self, "_transpose", _transpose)

    def prepare(self, *, backward: bool = True) -> EllPattern:
        """Find everything that operations need now, see `Pattern.prepare`."""
        self.csr[0].prepare(backward=backward)
        return self

    def matmul(self, values: Tensor, x: Tensor, *, transpose: bool = False, backend: Backend = "auto") -> Tensor:
        """Multiply sparse by dense: values (…, rows, width), x (…, columns, C) → (…, rows, C); see `spmm`.

        With `transpose`, multiply by the transposed matrix: x (…, rows, C) → (…, columns, C).
        """
        check_operand("values", values, tuple(self.indices.shape), self.indices.device)
        return spmm(self.csr[0], self._used(values), x, transpose=transpose, backend=backend)

    def sddmm(self, a: Tensor, b: Tensor, *, backend: Backend = "auto") -> Tensor:
        """Multiply A Bᵀ at the entries: a (…, rows, C), b (…, columns, C) → (…, rows, width); see `sddmm`.

        Unused places are 0.

        >>> import torch
        >>> pattern = EllPattern(torch.tensor([[0, 2], [1, -1]]), 3)
        >>> pattern.sddmm(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0], [5.0]]))
        tensor([[3., 5.],
                [8., 0.]])
        """
        return self._placed(sddmm(self.csr[0], a, b, backend=backend))

    def softmax(
        self,
        scores: Tensor,
        *,
        scale: float | Tensor = 1.0,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """Compute the softmax of scale · scores + bias over the entries of each row, see `sparse_softmax`.

        Scores, and the bias and the mask that broadcast to them, are (…, rows, width).

        Returns the shape and dtype of the scores. Unused places are 0.

        >>> import torch
        >>> pattern = EllPattern(torch.tensor([[0, 2], [1, -1]]), 3)
        >>> pattern.softmax(torch.tensor([[1.0, 1.0], [5.0, 7.0]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
        """
        check_operand("scores", scores, tuple(self.indices.shape), self.indices.device, floating=True)
        weights = sparse_softmax(
            self.csr[0],
            self._used(scores),
            scale=scale,
            bias=self._spread("bias", bias, scores),
            mask=self._spread("mask", mask, scores),
            backend=backend,
        )
        return self._placed(weights)

    def _spread(self, name: str, tensor: Tensor | None, scores: Tensor) -> Tensor | None:
        """Return a bias or mask that broadcasts to the scores at the used places, (…, nnz).

        `sparse_softmax` refuses one that is no tensor, or of a wrong dtype or device.
        """
        if not isinstance(tensor, Tensor) or tensor.device != scores.device:
            return tensor
        if tensor.ndim == 0:
            raise ValueError(f"{name} should broadcast to {tuple(scores.shape)}, shape is ()")
        check_broadcast(name, tensor.shape, scores.shape)
        return self._used(tensor.expand(*tensor.shape[:-2], *self.indices.shape))

    def _used(self, values: Tensor) -> Tensor:
        """Return values (…, rows, width) at the used places, (…, nnz)."""
        places = self.csr[1]
        flat = values.flatten(-2)
        return flat if places is None else flat.index_select(-1, places)

    def _placed(self, values: Tensor) -> Tensor:
        """Return values (…, nnz) in their places, (…, rows, width), with 0 at unused ones."""
        places = self.csr[1]
        if places is not None:
            flat = values.new_zeros(*values.shape[:-1], self.indices.numel())
            values = flat.index_copy(-1, places, values)
        return values.reshape(*values.shape[:-1], *self.indices.shape)


def _check_ell(indices: Any, columns: Any) -> None:
    """Check the arguments of an `EllPattern`. While something is traced, there are no values to read."""
    if is_stand_in(indices):
        return
    if not isinstance(indices, Tensor) or isinstance(indices, torch.nn.Parameter):
        raise TypeError(f"indices should be a plain tensor, got {type(indices).__name__}")
    check_count("columns", columns, 0)
    if indices.ndim != 2 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices should be 2-D int32 or int64, got {indices.dtype} of shape {tuple(indices.shape)}")
    if type(indices) is not Tensor or indices.is_meta:
        return
    outside = (indices < -1) | (indices >= columns)
    if outside.any():
        row, place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"indices should be below columns, {columns}, and −1 at unused places, "
            f"got {indices[row, place]} at place {place} of row {row}"
        )
    before, after = indices[:, :-1], indices[:, 1:]
    wrong = (after >= 0) & (after <= before) | (after >= 0) & (before < 0)
    if wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        a, b = indices[row, place : place + 2].tolist()
        if a < 0:
            raise ValueError(f"unused places should come last in a row, got −1 before {b} in row {row}")
        problem = f"column {a} twice" if a == b else f"{a} before {b}"
        raise ValueError(f"indices should ascend within a row, got {problem} in row {row}")


@at_first_use
def _find_used(ell: EllPattern) -> tuple[Pattern, Tensor | None]:
    there = ell.there
    places = there.flatten().nonzero()[:, 0]
    indices = ell.indices.flatten()[places]
    pattern = Pattern.from_row_lengths(there.sum(1), indices, ell.columns, check=False)
    return pattern, None if len(places) == there.numel() else places


@at_first_use
def _transpose(ell: EllPattern) -> tuple[EllPattern, Tensor]:
    pattern, places = ell.csr
    transposed, order = pattern.transpose
    result, entries = EllPattern.from_pattern(transposed)
    if len(order) == 0:
        return result, entries
    sources = order if places is None else places[order]
    return result, torch.where(entries >= 0, sources[entries.clamp(min=0)], -1)
