"""Gradient features on a CPU: the reference with fewer matrix products and fewer passes over memory.

With rotations, b = A g is a product of complex numbers. It takes three real products instead of four (Gauss):

    b_x = A_re (g_x + g_y) − (A_re + A_im) g_y
    b_y = A_re (g_x + g_y) − (A_re − A_im) g_x

The backward has two more products of this kind. A few thousand vertices are computed at a time, so that intermediate
results stay in the cache. Arguments are as in `ops.gradient_features.op`. Second derivatives are those of the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.cpu import add_product, derivatives, largest_chunk, row_chunks, tanh_
from diffnet.ops.common.precision import compute_dtype, promoted_dtype, without_autocast
from diffnet.ops.gradient_features import reference

# In 16 bits, sums before and after a product would lose digits, so there it takes four real products.
EXACT = (torch.float32, torch.float64)


def gradient_features(gradients: Tensor, a_re: Tensor, a_im: Tensor | None) -> Tensor:
    """tanh(g_x ∘ b_x + g_y ∘ b_y) with b = A g, in the promoted dtype."""
    given = reference.matrices(a_re, a_im)
    promoted = promoted_dtype(gradients, *given)
    # Under autocast, only matrix products are computed in its dtype.
    g, matrices = gradients.to(promoted), [a.to(compute_dtype(gradients, *given)) for a in given]
    with without_autocast(g):
        if torch.is_grad_enabled() and any(t.requires_grad for t in (g, *matrices)):
            out: Tensor = _GradientFeatures.apply(g, *matrices)  # type: ignore[no-untyped-call]
            return out
        return _forward(g, matrices, None)


class _GradientFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Tensor, *matrices: Tensor) -> Tensor:
        b = matrices[0].new_empty(gradients.shape)
        out = _forward(gradients, matrices, b)
        ctx.save_for_backward(gradients, b, out, *matrices)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, b, out, *matrices = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivative will be differentiated
            return tuple(derivatives(_plain, [gradients, *matrices], ctx.needs_input_grad, grad))
        with without_autocast(grad):
            return _backward(grad, gradients, b, out, matrices, ctx.needs_input_grad)


def _forward(gradients: Tensor, matrices: Sequence[Tensor], b: Tensor | None) -> Tensor:
    """The features (V, C). b_x and b_y are written to `b` (2, V, C), in the dtype of the matrices."""
    rows = gradients.shape[1]
    factors = [a.mT for a in matrices]
    dtype = matrices[0].dtype
    out = gradients.new_empty(gradients.shape[1:])
    scratch = matrices[0].new_empty(2, largest_chunk(rows), gradients.shape[2]) if b is None else b
    for chunk in row_chunks(rows):
        gx, gy = gradients[:, chunk]
        bx, by = scratch[:, : chunk.stop - chunk.start] if b is None else scratch[:, chunk]
        three = dtype in EXACT
        _write_features(gx, gy, bx, by, factors, three, out[chunk])
        if three and out[chunk].sum().isnan():  # sums of infinite gradients are NaN where single ones have a result
            _write_features(gx, gy, bx, by, factors, False, out[chunk])
    return out


def _write_features(
    gx: Tensor, gy: Tensor, bx: Tensor, by: Tensor, factors: Sequence[Tensor], three: bool, out: Tensor
) -> None:
    """Write b and the features of some vertices."""
    _complex_product(gx.to(bx.dtype), gy.to(bx.dtype), factors, three, bx, by)
    tanh_(torch.mul(gx, bx, out=out).addcmul_(gy, by.to(gy.dtype)))


def _complex_product(
    x: Tensor, y: Tensor, matrices: Sequence[Tensor], three: bool, out_x: Tensor, out_y: Tensor
) -> None:
    """Write (x + i y) (A_re + i A_im) to out_x + i out_y, by three or four real products."""
    re = matrices[0]
    if len(matrices) == 1:
        torch.mm(x, re, out=out_x)
        torch.mm(y, re, out=out_y)
        return
    im = matrices[1]
    if three:
        torch.mm(x + y, re, out=out_x)
        torch.addmm(out_x, x, re - im, alpha=-1, out=out_y)
        out_x.addmm_(y, re + im, alpha=-1)
    else:
        torch.mm(x, re, out=out_x).addmm_(y, im, alpha=-1)
        torch.mm(y, re, out=out_y).addmm_(x, im)


def _add_weight_products(sums: Sequence[Tensor], p: Tensor, q: Tensor, x: Tensor, y: Tensor) -> None:
    """Add pᵀx + qᵀy to the first sum, and qᵀx − pᵀy to the second if there is one."""
    if len(sums) == 1 or p.dtype not in EXACT:
        add_product(sums[0], p.mT, x)
        add_product(sums[0], q.mT, y)
        for im in sums[1:]:
            add_product(im, q.mT, x)
            add_product(im, p.mT, y, -1)
        return
    re, im = sums
    both = (p + q).mT @ x
    re.add_(both).addmm_(q.mT, x - y, alpha=-1)
    im.add_(both).addmm_(p.mT, x + y, alpha=-1)


def _backward(
    grad: Tensor,
    gradients: Tensor,
    b: Tensor,
    out: Tensor,
    matrices: Sequence[Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    dtype = matrices[0].dtype
    rows, c = gradients.shape[1:]
    # df/dg has the terms ds ∘ b and (p + i q) (A_re − i A_im), where p + i q = ds ∘ g is the gradient of b.
    factors = [*matrices[:1], *(-a for a in matrices[1:])]
    g_grad = torch.empty_like(gradients) if needed[0] else None
    need_matrices = any(needed[1:])
    sums = [matrices[0].new_zeros(c, c, dtype=torch.promote_types(dtype, torch.float32)) for _ in matrices]
    scratch = gradients.new_empty(3, largest_chunk(rows), c)
    products = matrices[0].new_empty(2, largest_chunk(rows), c)
    for chunk in row_chunks(rows):
        n = chunk.stop - chunk.start
        ds, p, q = scratch[:, :n]
        gx, gy = gradients[:, chunk]
        torch.ops.aten.tanh_backward.grad_input(grad[chunk], out[chunk], grad_input=ds)
        torch.mul(ds, gx, out=p)
        torch.mul(ds, gy, out=q)
        low_p, low_q = p.to(dtype), q.to(dtype)
        if need_matrices:
            _add_weight_products(sums, low_p, low_q, gx.to(dtype), gy.to(dtype))
        if g_grad is not None:
            x, y = products[:, :n]
            _complex_product(low_p, low_q, factors, dtype in EXACT, x, y)
            bx, by = b[:, chunk]
            torch.addcmul(x.to(ds.dtype), ds, bx.to(ds.dtype), out=g_grad[0, chunk])
            torch.addcmul(y.to(ds.dtype), ds, by.to(ds.dtype), out=g_grad[1, chunk])
    return g_grad, *(a_grad.to(dtype) if need else None for a_grad, need in zip(sums, needed[1:], strict=True))


def _plain(gradients: Tensor, *matrices: Tensor) -> Tensor:
    return reference.gradient_features(gradients, matrices[0], matrices[1] if len(matrices) == 2 else None)
