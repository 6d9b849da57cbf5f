"""Spatial gradient features (Sharp et al. 2022, "Spatial Gradient Features")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque, save_inputs
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.spectral.op import _evaluate, from_spectral


def gradient_features(gradients: Tensor, a_re: Tensor, a_im: Tensor | None, backend: Backend = "auto") -> Tensor:
    """f = tanh(Re(ḡ ∘ A g)) with g = g_x + i g_y and A = A_re + i A_im: inner products of learned tangent vectors.

    gradients (2, V, C): the X and Y components of the tangent gradients of C channels
    a_re, a_im (C, C): the complex matrix, applied from the left; a_im = None leaves rotations out
    → (V, C)

    Written out: b_x = g_x A_reᵀ − g_y A_imᵀ, b_y = g_y A_reᵀ + g_x A_imᵀ, f = tanh(g_x ∘ b_x + g_y ∘ b_y).
    """
    if use_kernels(backend, gradients, a_re, matrix=True):
        dtype = compute_dtype(gradients, a_re)
        out: Tensor = _direct(gradients, a_re.to(dtype), None if a_im is None else a_im.to(dtype))
        return out
    gx, gy = gradients
    bx, by = F.linear(gx, a_re), F.linear(gy, a_re)
    if a_im is not None:
        bx, by = bx - F.linear(gy, a_im), by + F.linear(gx, a_im)
    return torch.tanh(gx * bx + gy * by)


def spectral_gradient_features(
    coefficients: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Gradient features of x = Φ D taken on the basis, (G Φ) D, with no sparse product.

    coefficients (B, K, C), gradient_evecs (2, V, K), a_re, a_im (C, C), ptr (B+1,) int → (V, C)
    """
    if use_kernels(backend, coefficients, gradient_evecs, a_re, matrix=True):
        return _reassociated(coefficients, None, gradient_evecs, a_re, a_im, ptr)[1]
    gradients = torch.stack([from_spectral(coefficients, g, ptr, lengths, backend) for g in gradient_evecs])
    return gradient_features(gradients, a_re, a_im, backend)


def values_and_gradient_features(
    coefficients: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """`from_spectral` and `spectral_gradient_features` of the same coefficients: (V, C) each, from one kernel."""
    if use_kernels(backend, coefficients, evecs, gradient_evecs, a_re, matrix=True):
        return _reassociated(coefficients, evecs, gradient_evecs, a_re, a_im, ptr)
    values = from_spectral(coefficients, evecs, ptr, lengths, backend)
    return values, spectral_gradient_features(coefficients, gradient_evecs, a_re, a_im, ptr, lengths, backend)


def _reassociated(
    d: Tensor, evecs: Tensor | None, gradient_evecs: Tensor, a_re: Tensor, a_im: Tensor | None, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """A applied to the coefficients rather than to gradients: (GΦ D) Aᵀ = GΦ (D Aᵀ), where D has K rows and not V."""
    dtype = compute_dtype(gradient_evecs)
    evecs = None if evecs is None else evecs.to(dtype)
    values, features, _ = _features(d.float(), a_re, a_im, evecs, gradient_evecs.to(dtype), ptr)
    return values, features


# ---- of given gradients ----


def _direct_kernel(gradients: Tensor, a_re: Tensor, a_im: Tensor | None) -> Tensor:
    """f in the dtype of A; gradients may have another, and are rounded to A's for the products only."""
    from diffnet.ops.gradient_features.direct_kernels import forward

    return forward(gradients, a_re, a_im)


def _direct_fake(gradients: Tensor, a_re: Tensor, a_im: Tensor | None) -> Tensor:
    return a_re.new_empty(gradients.shape[1:])


def _direct_pointwise_backward_kernel(grad: Tensor, gradients: Tensor, a_re: Tensor, a_im: Tensor | None) -> Tensor:
    """df/dg_x and df/dg_y with b held fast, and df/db_x and df/db_y: (4, V, C)."""
    from diffnet.ops.gradient_features.direct_kernels import pointwise_backward

    return pointwise_backward(grad, gradients, a_re, a_im)


def _direct_pointwise_backward_fake(grad: Tensor, gradients: Tensor, a_re: Tensor, a_im: Tensor | None) -> Tensor:
    return a_re.new_empty(4, *gradients.shape[1:])


_direct_pointwise_backward = opaque(
    "diffnet::gradient_features_pointwise_backward", _direct_pointwise_backward_kernel, _direct_pointwise_backward_fake
)


def _direct_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients, a_re, a_im = ctx.saved_tensors
    need_gradients, need_re, need_im = ctx.needs_input_grad
    dgx, dgy, dbx, dby = _direct_pointwise_backward(grad.to(a_re.dtype), gradients, a_re, a_im)
    gradients_grad = re_grad = im_grad = None
    if need_gradients:
        dgx, dgy = torch.addmm(dgx, dbx, a_re), torch.addmm(dgy, dby, a_re)
        if a_im is not None:
            dgx, dgy = torch.addmm(dgx, dby, a_im), torch.addmm(dgy, dbx, a_im, alpha=-1)
        gradients_grad = torch.stack([dgx, dgy]).to(gradients.dtype)
    gx, gy = gradients.to(a_re.dtype)
    if need_re:
        re_grad = torch.addmm(dbx.mT @ gx, dby.mT, gy)
    if need_im:
        im_grad = torch.addmm(dby.mT @ gx, dbx.mT, gy, alpha=-1)
    return gradients_grad, re_grad, im_grad


_direct = differentiable("diffnet::gradient_features", _direct_kernel, _direct_fake, save_inputs, _direct_backward)


# ---- on a basis ----


def _features_kernel(
    d: Tensor, a_re: Tensor, a_im: Tensor | None, basis: Tensor | None, gradient_basis: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Φ D (empty without a basis), tanh(g_x ∘ b_x + g_y ∘ b_y), and the table of coefficients for the backward."""
    from diffnet.ops.gradient_features.coefficient_kernels import table
    from diffnet.ops.gradient_features.kernels import forward

    coefficients = table(d, a_re, a_im, gradient_basis.dtype)
    return *forward(coefficients, basis, gradient_basis, ptr), coefficients


def _features_fake(
    d: Tensor, a_re: Tensor, a_im: Tensor | None, basis: Tensor | None, gradient_basis: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, c = gradient_basis.shape[1], d.shape[2]
    values = gradient_basis.new_empty(0 if basis is None else rows, c)
    return values, values.new_empty(rows, c), values.new_empty(2 if a_im is None else 3, *d.shape)


def _features_backward_kernel(
    values_grad: Tensor | None,
    features_grad: Tensor,
    d: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    table: Tensor,
    basis: Tensor | None,
    gradient_basis: Tensor,
    ptr: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """dD (B, K, C), dA_re (C, C) and dA_im (empty without rotations), float32"""
    from diffnet.ops.gradient_features.coefficient_kernels import backward as coefficients_backward
    from diffnet.ops.gradient_features.kernels import backward
    from diffnet.ops.spectral.kernels import project

    projected = None if basis is None or values_grad is None else project(values_grad, basis, None, ptr)
    sums = backward(features_grad, table, gradient_basis, ptr)
    d_grad, re_grad, im_grad, _ = coefficients_backward(projected, sums, d, a_re, a_im)
    return d_grad, re_grad, d_grad.new_empty(0, 0) if im_grad is None else im_grad


def _features_backward_fake(
    values_grad: Tensor | None,
    features_grad: Tensor,
    d: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    table: Tensor,
    basis: Tensor | None,
    gradient_basis: Tensor,
    ptr: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    c, rotations = d.shape[2], 0 if a_im is None else d.shape[2]
    d_grad = torch.empty_like(d, memory_format=torch.contiguous_format)
    return d_grad, d_grad.new_empty(c, c), d_grad.new_empty(rotations, rotations)


_features_gradients = opaque(
    "diffnet::spectral_gradient_features_backward", _features_backward_kernel, _features_backward_fake
)


def _features_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.set_materialize_grads(False)


def _features_backward(
    ctx: Any, values_grad: Tensor | None, features_grad: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    d, a_re, a_im, basis, gradient_basis, ptr, table = ctx.saved_tensors
    need_d, need_re, need_im, need_basis, need_gradient_basis, _ = ctx.needs_input_grad
    d_grad = re_grad = im_grad = basis_grad = gradient_basis_grad = None
    if features_grad is None:
        features_grad = gradient_basis.new_zeros(gradient_basis.shape[1], d.shape[2])
    features_grad = features_grad.to(gradient_basis.dtype)
    values_grad = values_grad if values_grad is None else values_grad.to(gradient_basis.dtype)
    if need_d or need_re or need_im:
        d_grad, re_grad, im_grad = _features_gradients(
            values_grad, features_grad, d, a_re, a_im, table, basis, gradient_basis, ptr
        )
        re_grad = re_grad.to(a_re.dtype)
        im_grad = None if a_im is None else im_grad.to(a_im.dtype)
    if need_basis and values_grad is not None:
        basis_grad = _evaluate(d.mT.contiguous(), values_grad, None, ptr)
    if need_gradient_basis:
        gradient_basis_grad = _operator_gradient(features_grad, d, a_re, a_im, gradient_basis, ptr)
    return d_grad, re_grad, im_grad, basis_grad, gradient_basis_grad, None


def _operator_gradient(
    grad: Tensor, d: Tensor, a_re: Tensor, a_im: Tensor | None, gradient_basis: Tensor, ptr: Tensor
) -> Tensor:
    """The gradient in gradient_basis (2, V, K), which training doesn't ask for: plain PyTorch between two products."""
    # D, P and, with rotations, Q, as exact as the rest: PyTorch would take them in tf32 where that is allowed.
    rows = d.flatten(0, 1)
    all_rows = len(rows) * torch.arange(2, device=d.device)
    given = [a.float().mT.contiguous()[None] for a in (a_re, a_im) if a is not None]
    parts = [d] + [_evaluate(a, rows, None, all_rows).view_as(d) for a in given]
    table = torch.cat(parts, dim=2)
    values = [_evaluate(table, basis, None, ptr).float() for basis in gradient_basis]
    (gx, px, *qx), (gy, py, *qy) = (v.chunk(len(parts), dim=1) for v in values)
    bx, by = (px - qy[0], py + qx[0]) if qx else (px, py)
    ds = grad.float() * (1 - torch.tanh(gx * bx + gy * by) ** 2)
    terms = ([bx, gx, gy], [by, gy, -gx]) if qx else ([bx, gx], [by, gy])
    back, dtype = table.mT.contiguous(), gradient_basis.dtype
    return torch.stack([_evaluate(back, torch.cat([ds * t for t in ts], dim=1).to(dtype), None, ptr) for ts in terms])


# What is saved has V rows only where operators do.
_features = differentiable(
    "diffnet::spectral_gradient_features", _features_kernel, _features_fake, _features_setup, _features_backward
)
