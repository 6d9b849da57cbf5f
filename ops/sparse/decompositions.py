"""The operators of sparse matrices as operations of PyTorch, for exported files that run without this package.

They gather a row for each entry, which takes memory for entries × channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.sparse import op, reference, softmax  # noqa: F401 (they register the operators)
from diffnet.ops.sparse.csr import CsrArrays, row_of_each


def decompositions() -> dict[Any, Callable[..., Tensor]]:
    """The argument of `ExportedProgram.run_decompositions`. Patterns have no row order, and products no transpose."""
    operators = torch.ops.diffnet
    return {
        operators.spmm.default: _spmm,
        operators.sddmm.default: _sddmm,
        operators.sparse_softmax.default: _softmax,
    }


def _spmm(
    structure: Sequence[Tensor], values: Tensor, x: Tensor, transpose: bool, reduce: bool, triton: bool
) -> Tensor:
    assert not transpose
    assert not reduce
    indptr, indices = structure[:2]
    sums = x.new_zeros(values.shape[0], indptr.shape[0] - 1, x.shape[2])
    return sums.index_add(1, row_of_each(indptr, indices), values[..., None] * x[:, indices])


def _sddmm(structure: Sequence[Tensor], a: Tensor, b: Tensor, triton: bool) -> Tensor:
    indptr, indices = structure[:2]
    return (a[:, row_of_each(indptr, indices)] * b[:, indices]).sum(-1)


def _softmax(structure: Sequence[Tensor], scores: Tensor, mask: Tensor | None, scale: float, triton: bool) -> Tensor:
    return reference.softmax(CsrArrays(*structure), scores, mask, scale)
