"""Spatial gradient features on packed ragged batches.

Source: Sharp et al. 2022, "DiffusionNet: Discretization Agnostic Learning on Surfaces", section "Spatial Gradient
Features".

Shapes: V packed vertices, B meshes, K eigenpairs, C channels; see `ops.spectral.op`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops import definition
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor
from diffnet.ops.common.dispatch import differentiable, opaque, save_settings
from diffnet.ops.common.precision import compute_dtype, empty_table
from diffnet.ops.definition import matrices
from diffnet.ops.spectral.op import check_coefficients


def gradient_features(
    gradients: Tensor, a_re: Tensor, a_im: Tensor | None, backend: Backend = "auto", *, swapped: bool = False
) -> Tensor:
    """Compute f = tanh(Re(ḡ ∘ A g)), inner products of learned tangent vectors.

    g = g_x + i g_y are the gradients and A = A_re + i A_im is a learned matrix. In real numbers, b_x = g_x A_reᵀ −
    g_y A_imᵀ, b_y = g_y A_reᵀ + g_x A_imᵀ and f = tanh(g_x ∘ b_x + g_y ∘ b_y). It is differentiable in all arguments.

    Args:
        gradients: (2, V, C) floating point, the X and Y components of the tangent gradients of C channels
        a_re: (C, C) floating point, applied from the left
        a_im: (C, C) floating point, or None to leave out rotations
        backend: see `ops.common.backend.use_kernels`
        swapped: whether b_y = g_x A_reᵀ + g_y A_imᵀ instead. This form is not equivariant to rotations of the tangent
            frames. Published networks of unsupervised shape matching have it (Cao et al. 2023).

    Returns:
        (V, C) in the promoted dtype, or in autocast's dtype

    Raises:
        TypeError: for arguments that are not tensors or not floating point.
        ValueError: for other shapes or devices, and for swapped without a_im.

    >>> gradients = torch.tensor([[[0.6]], [[0.8]]])
    >>> gradient_features(gradients, torch.ones(1, 1), None)
    tensor([[0.7616]])
    """
    check_tensor("gradients", gradients, (2, "V", "C"))
    check_matrices(a_re, a_im, gradients.shape[2], gradients.device, swapped)
    if use_kernels(backend, gradients, *matrices(a_re, a_im), matrix=True):
        dtype = compute_dtype(gradients, *matrices(a_re, a_im))
        return _direct_operator(gradients, a_re.to(dtype), None if a_im is None else a_im.to(dtype), swapped)
    return definition.gradient_features(gradients, a_re, a_im, swapped)


def spectral_gradient_features(
    coefficients: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
    *,
    swapped: bool = False,
) -> Tensor:
    """Compute the gradient features of x = Φ D in the eigenbasis: gradients are (G Φ) D, without a sparse product.

    It is differentiable in all floating-point arguments. Where the gradient_evecs need a gradient, `definition`
    computes it, because the kernels have none.

    Args:
        coefficients: (B, K, C) floating point, D
        gradient_evecs: (2, V, K) floating point, the X and Y components of the gradients of the eigenvectors, G Φ
        a_re, a_im, swapped: see `gradient_features`
        ptr, lengths, backend: see `to_spectral`

    Returns (V, C) in the dtype of the gradient_evecs, or in autocast's dtype. Errors are those of `to_spectral`.
    """
    ptr = _check_features(coefficients, gradient_evecs, a_re, a_im, ptr, lengths, swapped)
    tensors = coefficients, gradient_evecs, *matrices(a_re, a_im)
    if use_kernels(backend, *tensors, matrix=True) and not gradient_evecs.requires_grad:
        gradient_evecs = gradient_evecs.to(compute_dtype(gradient_evecs))
        return features_operator(coefficients.float(), a_re, a_im, None, gradient_evecs, ptr, swapped)[1]
    return definition.spectral_gradient_features(coefficients, gradient_evecs, a_re, a_im, ptr, lengths, swapped)


def values_and_gradient_features(
    coefficients: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
    *,
    swapped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `from_spectral` and `spectral_gradient_features` of the same coefficients in one kernel.

    Where the evecs or the gradient_evecs need a gradient, `definition` computes it.

    Args:
        evecs: (V, K) floating point
        coefficients, gradient_evecs, a_re, a_im, ptr, lengths, backend, swapped: see `spectral_gradient_features`

    Returns two tensors (V, C) in the promoted dtype of evecs and gradient_evecs, or in autocast's dtype. Errors are
    those of `spectral_gradient_features`.
    """
    ptr = _check_features(coefficients, gradient_evecs, a_re, a_im, ptr, lengths, swapped)
    check_tensor("evecs", evecs, gradient_evecs.shape[1:], gradient_evecs.device)
    constant = not (evecs.requires_grad or gradient_evecs.requires_grad)
    tensors = coefficients, evecs, gradient_evecs, *matrices(a_re, a_im)
    if use_kernels(backend, *tensors, matrix=True) and constant:
        dtype = compute_dtype(evecs, gradient_evecs)
        values, features, _ = features_operator(
            coefficients.float(), a_re, a_im, evecs.to(dtype), gradient_evecs.to(dtype), ptr, swapped
        )
        return values, features
    return definition.values_and_gradient_features(
        coefficients, evecs, gradient_evecs, a_re, a_im, ptr, lengths, swapped
    )


def check_matrices(
    a_re: Tensor, a_im: Tensor | None, channels: int, device: torch.device, swapped: bool = False
) -> None:
    """Check that A_re and, with rotations, A_im are (C, C). Swapped features need A_im."""
    check_tensor("a_re", a_re, (channels, channels), device)
    if a_im is not None:
        check_tensor("a_im", a_im, (channels, channels), device)
    elif swapped:
        raise ValueError("swapped gradient features need a_im (C, C), got None")


def _check_features(
    coefficients: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None,
    swapped: bool,
) -> Tensor:
    """Check the arguments that both functions of coefficients share, and return ptr contiguous."""
    check_tensor("gradient_evecs", gradient_evecs, (2, "V", "K"))
    ptr = check_ptr(ptr, gradient_evecs.shape[1], lengths, gradient_evecs.device)
    check_coefficients(coefficients, gradient_evecs, ptr)
    check_matrices(a_re, a_im, coefficients.shape[2], gradient_evecs.device, swapped)
    return ptr


# ---- given gradients ----


def _direct_forward(gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool) -> Tensor:
    """f in the dtype of A. The gradients may have another dtype and are rounded to A's for the products only."""
    from diffnet.ops.gradient_features.direct_kernels import forward

    return forward(gradients, a_re, a_im, swapped)


def _direct_fake(gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool) -> Tensor:
    return a_re.new_empty(gradients.shape[1:])


def _pointwise_gradients(grad: Tensor, gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool) -> Tensor:
    """df/dg_x and df/dg_y for constant b, and df/db_x and df/db_y: (4, V, C)"""
    from diffnet.ops.gradient_features.direct_kernels import pointwise_backward

    return pointwise_backward(grad, gradients, a_re, a_im, swapped)


def _pointwise_gradients_fake(grad: Tensor, gradients: Tensor, a_re: Tensor, *rest: Any) -> Tensor:
    return a_re.new_empty(4, *gradients.shape[1:])


_pointwise_gradients_operator = opaque(
    "diffnet::gradient_features_pointwise_backward", _pointwise_gradients, _pointwise_gradients_fake
)


def _direct_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (gradients, a_re, a_im), (swapped,) = ctx.saved_tensors, ctx.settings
    need_gradients, need_re, need_im, _ = ctx.needs_input_grad
    dgx, dgy, dbx, dby = _pointwise_gradients_operator(grad.to(a_re.dtype), gradients, a_re, a_im, swapped)
    gradients_grad = re_grad = im_grad = None
    if swapped:  # b_x and b_y are A_re g_x ∓ A_im g_y
        of_re, of_im = dbx + dby, dby - dbx
        gx, gy = gradients.to(a_re.dtype)
        if need_gradients:
            gradients_grad = torch.stack([torch.addmm(dgx, of_re, a_re), torch.addmm(dgy, of_im, a_im)])
            gradients_grad = gradients_grad.to(gradients.dtype)
        return gradients_grad, of_re.mT @ gx if need_re else None, of_im.mT @ gy if need_im else None, None
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
    return gradients_grad, re_grad, im_grad, None


_direct_operator = differentiable(
    "diffnet::gradient_features", _direct_forward, _direct_fake, save_settings, _direct_backward
)


# ---- in the eigenbasis ----
#
# A is applied to the coefficients, not to the gradients: (GΦ D) Aᵀ = GΦ (D Aᵀ), because D has K rows and not V.


def _features_forward(
    d: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    evecs: Tensor | None,
    gradient_evecs: Tensor,
    ptr: Tensor,
    swapped: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Φ D (empty without evecs), the features, and the table of coefficients, which the backward needs"""
    from diffnet.ops.gradient_features.coefficient_kernels import table
    from diffnet.ops.gradient_features.kernels import forward

    coefficients = table(d, a_re, a_im, gradient_evecs)
    return *forward(coefficients, evecs, gradient_evecs, ptr, swapped=swapped), coefficients


def _features_fake(
    d: Tensor, a_re: Tensor, a_im: Tensor | None, evecs: Tensor | None, gradient_evecs: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, c = gradient_evecs.shape[1], d.shape[2]
    values = gradient_evecs.new_empty(0 if evecs is None else rows, c)
    return values, values.new_empty(rows, c), empty_table(gradient_evecs, d, a_im is not None)


def _features_gradients(
    values_grad: Tensor | None,
    features_grad: Tensor,
    d: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    evecs: Tensor | None,
    gradient_evecs: Tensor,
    ptr: Tensor,
    table: Tensor,
    swapped: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dD (B, K, C), dA_re (C, C) and dA_im (empty without rotations), float32"""
    from diffnet.ops.gradient_features.coefficient_kernels import backward as coefficients_backward
    from diffnet.ops.gradient_features.kernels import backward

    sums = backward(features_grad, table, gradient_evecs, ptr, swapped=swapped, values_grad=values_grad, evecs=evecs)
    d_grad, re_grad, im_grad, _ = coefficients_backward(sums, d, a_re, a_im)
    return d_grad, re_grad, d_grad.new_empty(0, 0) if im_grad is None else im_grad


def _features_gradients_fake(
    values_grad: Tensor | None, features_grad: Tensor, d: Tensor, a_re: Tensor, a_im: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    c, rotations = d.shape[2], 0 if a_im is None else d.shape[2]
    d_grad = torch.empty_like(d, memory_format=torch.contiguous_format)
    return d_grad, d_grad.new_empty(c, c), d_grad.new_empty(rotations, rotations)


_features_gradients_operator = opaque(
    "diffnet::spectral_gradient_features_backward", _features_gradients, _features_gradients_fake
)


def _features_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.swapped = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _features_backward(
    ctx: Any, values_grad: Tensor | None, features_grad: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    d, a_re, a_im, _, gradient_evecs, *_ = saved
    if features_grad is None:
        features_grad = gradient_evecs.new_zeros(gradient_evecs.shape[1], d.shape[2])
    features_grad = features_grad.to(gradient_evecs.dtype)
    values_grad = values_grad if values_grad is None else values_grad.to(gradient_evecs.dtype)
    d_grad, re_grad, im_grad = _features_gradients_operator(values_grad, features_grad, *saved, ctx.swapped)
    im_grad = None if a_im is None else im_grad.to(a_im.dtype)
    return d_grad, re_grad.to(a_re.dtype), im_grad, None, None, None, None


features_operator = differentiable(
    "diffnet::spectral_gradient_features", _features_forward, _features_fake, _features_save, _features_backward
)
