"""The products on CSR patterns in plain PyTorch: what runs on the CPU, and what the kernels are compared with.

S sets of values share a pattern of `rows` × `columns` with `nnz` entries. Low precision is added up in float32.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from diffnet.ops.sparse.pattern import CsrArrays, row_of_each

# Said once a process at the first sparse tensor: nothing here depends on the parts that may change, and patterns are
# checked where they are made.
for _message in ("Sparse CSR tensor support is in beta state", "Sparse invariant checks are implicitly disabled"):
    warnings.filterwarnings("ignore", message=_message)


def spmm(csr: CsrArrays, values: Tensor, x: Tensor, reduce: bool = False) -> Tensor:
    """Aₛ xₛ for values (S, nnz) and x (S, columns, C), or (1, columns, C) for all; → (S, rows, C).

    With reduce the sum over the sets, (1, rows, C). All sets are one product with a taller matrix, or one with the
    matrices along the diagonal.
    """
    indptr, indices, *_ = csr
    sets, (rows, columns) = len(values), (len(indptr) - 1, x.shape[1])
    wide, apart = _wide(x.dtype), len(x) > 1
    shape = sets * rows, columns * (sets if apart else 1)
    shifts = torch.arange(sets, device=x.device, dtype=indices.dtype)[:, None]
    all_indices = (indices + shifts * columns if apart else indices.expand(sets, -1)).reshape(-1)
    # cuSPARSE reads values one after the other, whatever their stride is, which for gradients of sums is 0.
    flat, dense = values.to(wide).reshape(-1).contiguous(), x.to(wide).flatten(0, 1)
    if x.is_cuda:
        starts = (indptr[:-1] + shifts * len(indices)).reshape(-1)
        ends = torch.cat([starts, starts.new_tensor([sets * len(indices)])]) if sets > 1 else indptr
        matrix = torch.sparse_csr_tensor(ends, all_indices, flat, shape, check_invariants=False)
    else:
        # On the CPU the COO product adds up each row in order, as the original implementation does, so networks can
        # be compared with it to the last bit: float32 gradients of a deep ReLU network move by 1e-3 with the order.
        all_rows = (row_of_each(indptr, indices) + shifts * rows).reshape(-1)
        entries = torch.stack([all_rows, all_indices]).long()
        matrix = torch.sparse_coo_tensor(entries, flat, shape, check_invariants=False, is_coalesced=True)
    with torch.autocast(x.device.type, enabled=False):
        out = in_row_order(csr, (matrix @ dense).reshape(sets, rows, x.shape[2]))
    return (out.sum(0, keepdim=True) if reduce else out).to(x.dtype)


def in_row_order(csr: CsrArrays, stored: Tensor) -> Tensor:
    """(S, rows, C) with its rows, which are in the order in which the pattern's are stored, in their own."""
    order = csr.row_order
    return stored if len(order) == 0 else torch.empty_like(stored).index_copy(1, order.long(), stored)


def sddmm(csr: CsrArrays, a: Tensor, b: Tensor) -> Tensor:
    """(Aₛ Bₛᵀ) at the entries: a (S, rows, C) and b (S, columns, C), either (1, …) for all → (S, nnz)."""
    wide, rows = _wide(a.dtype), row_of_each(csr.indptr, csr.indices)
    if len(csr.row_order) > 0:
        rows = csr.row_order[rows]
    products = a.to(wide)[:, rows] * b.to(wide)[:, csr.indices]
    return products.sum(-1).to(a.dtype)


def softmax(csr: CsrArrays, scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """exp(scale · scores) over its sum in each row; scores (S, nnz), mask (1 or S, nnz) bool → (S, nnz)."""
    rows, count = row_of_each(csr.indptr, csr.indices).long(), len(csr.indptr) - 1
    wide = scores.to(_wide(scores.dtype)) * scale
    if mask is not None:
        wide = wide.masked_fill(~mask, -torch.inf)
    top = wide.new_full((len(scores), count), -torch.inf)
    top = top.scatter_reduce(1, rows.expand_as(wide), wide, "amax")
    top = top.masked_fill(top == -torch.inf, 0)  # rows with nothing in them
    weights = torch.exp(wide - top[:, rows])
    total = torch.zeros_like(top).index_add(1, rows, weights)
    return (weights / torch.where(total > 0, total, 1)[:, rows]).to(scores.dtype)


def softmax_backward(csr: CsrArrays, out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """scale · p ∘ (g − Σ p ∘ g), sums over each row; p, g (S, nnz) → (S, nnz)"""
    rows, count = row_of_each(csr.indptr, csr.indices).long(), len(csr.indptr) - 1
    p, g = out.to(_wide(out.dtype)), grad.to(_wide(out.dtype))
    total = p.new_zeros(len(p), count).index_add(1, rows, p * g)
    return (scale * p * (g - total[:, rows])).to(out.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
