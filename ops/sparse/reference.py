"""Products and softmax on CSR patterns in plain PyTorch: the CPU path, and the reference for the kernels.

S sets of values share a pattern of `rows` × `columns` with `nnz` entries. Low precision is added up in float32.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.cpu import row_chunks
from diffnet.ops.common.limits import MAX_INT32
from diffnet.ops.common.precision import in_dtype, sum_dtype, without_autocast
from diffnet.ops.sparse.csr import CsrArrays, csr_product, row_of_each, shifted


def spmm(csr: CsrArrays, values: Tensor, x: Tensor, reduce: bool = False) -> Tensor:
    """Multiply Aₛ xₛ: values (S, nnz), x (S, columns, C), or (1, columns, C) for all sets → (S, rows, C).

    With `reduce`, return the sum over the sets, (1, rows, C).

    All sets are computed by one product: with a taller matrix if they share x, with a block-diagonal matrix otherwise.
    """
    indptr, indices, *_ = csr
    sets, (rows, columns) = len(values), (len(indptr) - 1, x.shape[1])
    dtype, apart = sum_dtype(x), len(x) > 1
    # On the CPU, one product with the matrices side by side is the sum. Its speed on a GPU is not measured.
    side_by_side = reduce and apart and not x.is_cuda
    # cuSPARSE ignores the stride of values. The gradient of a sum has stride 0.
    flat = (values.T if side_by_side else values).to(dtype).reshape(-1).contiguous()
    dense = x.to(dtype).flatten(0, 1)
    if side_by_side:
        shape, ends = (rows, sets * columns), sets * (indptr.long() if len(flat) > MAX_INT32 else indptr)
        all_indices = shifted(indices, sets, columns).view(sets, -1).T.reshape(-1)
    else:
        shape = sets * rows, columns * (sets if apart else 1)
        starts, total = shifted(indptr[:-1], sets, len(indices)), sets * len(indices)
        ends = torch.cat([starts, starts.new_tensor([total])]) if sets > 1 else indptr
        all_indices = shifted(indices, sets, columns if apart else 0)
    # cuSPARSE counts in the dtype of the indices, which have one dtype.
    if ends.dtype != all_indices.dtype or max(*shape, len(flat)) * (x.shape[2] if x.is_cuda else 1) > MAX_INT32:
        ends, all_indices = ends.long(), all_indices.long()
    product = _product(ends, all_indices, flat, dense, shape)
    out = in_row_order(csr, product.reshape(1 if side_by_side else sets, rows, x.shape[2]))
    return (out.sum(0, keepdim=True) if reduce and not side_by_side else out).to(x.dtype)


def _product(indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, shape: tuple[int, int]) -> Tensor:
    if x.is_cpu and x.dtype == torch.float32:
        return csr_product(indptr, indices, values, x)
    matrix = csr_tensor(indptr, indices, values, shape)
    with without_autocast(x):
        # `matrix @ x` would fill zeros and copy its result once more.
        product = x.new_zeros(shape[0], x.shape[1])
        return torch.addmm(product, matrix, x, beta=0, out=product)


def in_row_order(csr: CsrArrays, stored: Tensor) -> Tensor:
    """Return rows (S, rows, C) in their own order, given in the order in which the pattern stores them."""
    order = csr.row_order
    return stored if len(order) == 0 else torch.empty_like(stored).index_copy(1, order.long(), stored)


def sddmm(csr: CsrArrays, a: Tensor, b: Tensor) -> Tensor:
    """Multiply Aₛ Bₛᵀ at the entries: a (S, rows, C), b (S, columns, C), each (1, …) for all sets → (S, nnz)."""
    entries = csr.indices.shape[0]
    if a.is_cpu and torch.backends.mkl.is_available() and entries > 0:  # type: ignore[no-untyped-call]
        return _sampled(csr, a, b)
    dtype, rows = sum_dtype(a), row_of_each(csr.indptr, csr.indices, csr.row_order)
    out = a.new_empty(max(len(a), len(b)), entries)
    for chunk in row_chunks(entries) if a.is_cpu else [slice(entries)]:  # the cache keeps what a chunk gathers
        products = a[:, rows[chunk]].to(dtype) * b[:, csr.indices[chunk]].to(dtype)
        out[:, chunk] = products.sum(-1).to(a.dtype)
    return out


def _sampled(csr: CsrArrays, a: Tensor, b: Tensor) -> Tensor:
    """Return what `sddmm` does without gathering rows. On the CPU, PyTorch needs MKL for this."""
    dtype, sets_a, sets_b = sum_dtype(a), a.shape[0], b.shape[0]
    out = a.new_zeros(max(sets_a, sets_b), csr.indices.shape[0], dtype=dtype)
    ordered, shape = csr.row_order.shape[0] > 0, (a.shape[1], b.shape[1])
    with without_autocast(a):
        for s, values in enumerate(out.unbind()):
            if s < sets_a:  # otherwise all sets share one factor
                left = in_dtype(a[s, csr.row_order] if ordered else a[s], dtype)
            if s < sets_b:
                right = in_dtype(b[s], dtype).mT
            matrix = csr_tensor(csr.indptr, csr.indices, values, shape)  # shares the memory of `out`
            torch.sparse.sampled_addmm(matrix, left, right, beta=0, out=matrix)
    return in_dtype(out, a.dtype)


def softmax(rows: Tensor, count: int, scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Divide exp(scale · scores) by its sum over each row: scores (S, nnz), mask (1 or S, nnz) bool → (S, nnz).

    rows: (nnz,), the row of each entry, below count

    If the sum is NaN, all visible entries of the row are NaN.
    """
    rows = rows.long().expand_as(scores)
    scaled = scores.to(sum_dtype(scores)) * scale
    if mask is not None:
        scaled = scaled.masked_fill(~mask, -torch.inf)
    top = scaled.new_full((len(scores), count), -torch.inf).scatter_reduce(1, rows, scaled.detach(), "amax")
    top = top.masked_fill(top == -torch.inf, 0)  # in rows without a visible entry
    weights = torch.exp(scaled - top.gather(1, rows))
    total = torch.zeros_like(top).scatter_add(1, rows, weights)
    out = weights / torch.where(total == 0, 1, total).gather(1, rows)
    return (out if mask is None else out.masked_fill(~mask, 0)).to(scores.dtype)


def softmax_gradients(structure: Sequence[Tensor], out: Tensor, grad: Tensor, scale: float) -> Tensor:
    """The gradient of `softmax` in the scores (S, nnz), for its result and its gradient."""
    csr, dtype = CsrArrays(*structure), sum_dtype(out)
    rows = row_of_each(csr.indptr, csr.indices).long().expand_as(out)  # as they are stored; a sum has no other order
    products = out.to(dtype) * grad.to(dtype)
    total = products.new_zeros(len(out), len(csr.indptr) - 1).scatter_add(1, rows, products)
    return (scale * (products - out.to(dtype) * total.gather(1, rows))).to(out.dtype)


def csr_tensor(indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Make a torch.sparse_csr tensor without PyTorch's warning about its beta state. Checks nothing."""
    _use_up_warning()
    return torch.sparse_csr_tensor(indptr, indices, values.contiguous(), shape, check_invariants=False)


@functools.cache
def _use_up_warning() -> None:
    """Make a first CSR tensor with warnings ignored. PyTorch gives this warning only once per process."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(zero, zero[:0], torch.zeros(0), (0, 0), check_invariants=False)


_LOCK = threading.Lock()  # catch_warnings isn't safe in several threads at once
