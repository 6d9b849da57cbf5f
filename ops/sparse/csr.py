"""The arrays of a CSR pattern as operators and kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.limits import LARGEST


class CsrArrays(NamedTuple):
    """The arrays of one pattern. An empty `long_pieces`, `row_order` or `by_length` means that there is none.

    The fields are described at the properties of `Pattern` with the same names; `by_length` is `rows_by_length`.
    """

    indptr: Tensor
    indices: Tensor
    long_pieces: Tensor
    row_order: Tensor
    by_length: Tensor


def row_of_each(indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the stored row of each entry, (nnz,)."""
    rows = torch.arange(len(indptr) - 1, dtype=indices.dtype, device=indices.device)
    return torch.repeat_interleave(rows, torch.diff(indptr), output_size=len(indices))


def shifted(numbers: Tensor, sets: int, size: int) -> Tensor:
    """Return the numbers (n,) plus s · size for each set s, (sets · n,).

    The result is int64 if sets · size exceeds 2³¹, else it has the dtype of the numbers.
    """
    dtype = torch.int64 if sets * size > LARGEST else numbers.dtype
    shifts = torch.arange(sets, device=numbers.device, dtype=dtype)[:, None] * size
    return (numbers + shifts).reshape(-1)


def inverse_order(order: Tensor) -> Tensor:
    """Return the inverse of a permutation of 0 to n − 1, (n,) int64."""
    places = torch.empty_like(order, dtype=torch.int64)
    places[order.long()] = torch.arange(len(order), device=order.device)
    return places
