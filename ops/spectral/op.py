"""Spectral diffusion and means on packed ragged batches.

Source: Sharp et al. 2022, "DiffusionNet: Discretization Agnostic Learning on Surfaces", section "Learned Diffusion",
spectral acceleration.

Shapes: V packed vertices, B meshes, K eigenpairs, C channels; mesh b owns the rows ptr[b]:ptr[b+1]. `lengths` are the
same extents as Python integers. They save a read-back of `ptr` in plain PyTorch if B > 1; the kernels don't need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops import definition
from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor, nonnegative
from diffnet.ops.common.dispatch import differentiable, empty_like, opaque, save_inputs
from diffnet.ops.common.precision import compute_dtype


def to_spectral(
    x: Tensor, evecs: Tensor, mass: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None, backend: Backend = "auto"
) -> Tensor:
    """Project functions onto the eigenbasis of each mesh: S = Φᵀ (m ∘ x).

    It is differentiable any number of times in x, evecs and mass.

    Args:
        x: (V, C) floating point
        evecs: (V, K) floating point, the eigenvectors Φ
        mass: (V,) floating point, the areas of the vertices
        ptr: (B+1,) int32 or int64, the extents of the meshes, ascending from 0 to V
        lengths: the rows of each mesh as Python integers, or None
        backend: see `ops.common.backend.use_kernels`

    Returns:
        (B, K, C), in float32 from the kernels and in the promoted dtype from plain PyTorch

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes, devices or extents.

    >>> to_spectral(torch.ones(3, 2), torch.eye(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 3]))
    tensor([[[1., 1.],
             [2., 2.],
             [3., 3.]]])
    """
    check_tensor("x", x, ("V", "C"))
    rows, device = x.shape[0], x.device
    check_tensor("evecs", evecs, (rows, "K"), device)
    check_tensor("mass", mass, (rows,), device)
    ptr = check_ptr(ptr, rows, lengths, device)
    if use_kernels(backend, x, evecs, mass, matrix=True):
        dtype = compute_dtype(x, evecs)
        return project_operator(x.to(dtype), evecs.to(dtype), mass, ptr)
    return definition.to_spectral(x, evecs, mass, ptr, lengths)


def from_spectral(
    coefficients: Tensor, evecs: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None, backend: Backend = "auto"
) -> Tensor:
    """Evaluate coefficients at the vertices: Φ D for each mesh.

    It is differentiable any number of times in the coefficients and the evecs.

    Args:
        coefficients: (B, K, C) floating point
        evecs: (V, K) floating point, the eigenvectors Φ
        ptr, lengths, backend: see `to_spectral`

    Returns (V, C) in the dtype of the evecs, or in autocast's dtype. Errors are those of `to_spectral`.

    >>> from_spectral(torch.ones(1, 2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 2]))
    tensor([[3.],
            [7.]])
    """
    check_tensor("evecs", evecs, ("V", "K"))
    ptr = check_ptr(ptr, evecs.shape[0], lengths, evecs.device)
    check_coefficients(coefficients, evecs, ptr)
    if use_kernels(backend, coefficients, evecs, matrix=True):
        return evaluate_operator(coefficients.float(), evecs.to(compute_dtype(evecs)), None, ptr)
    return definition.from_spectral(coefficients, evecs, ptr, lengths)


def check_coefficients(coefficients: Tensor, evecs: Tensor, ptr: Tensor) -> None:
    """Check the shape (B, K, C), dtype and device of coefficients, given evecs (…, K) and a checked ptr."""
    check_tensor("coefficients", coefficients, (len(ptr) - 1, evecs.shape[-1], "C"), evecs.device)


def diffuse(spectrum: Tensor, evals: Tensor, time: Tensor, backend: Backend = "auto") -> Tensor:
    """Diffuse heat in the eigenbasis, with one time per channel: D = exp(−λ tᵀ) ∘ S.

    It is differentiable in all arguments.

    Args:
        spectrum: (B, K, C) floating point
        evals: (B, K) floating point, the eigenvalues λ
        time: (C,) floating point, finite and at least 0, in squared units of the positions
        backend: see `to_spectral`

    Returns (B, K, C), in float32 from the kernels and in the promoted dtype from plain PyTorch. Errors are those of
    `to_spectral`. On the CPU and in debug mode, a time that is negative or not finite raises ValueError. Elsewhere a
    negative time gives NaN in its channel.

    >>> diffuse(torch.ones(1, 2, 1), torch.tensor([[0.0, 1.0]]), torch.tensor([0.5]))
    tensor([[[1.0000],
             [0.6065]]])
    """
    check_tensor("spectrum", spectrum, ("B", "K", "C"))
    check_tensor("evals", evals, spectrum.shape[:2], spectrum.device)
    check_tensor("time", time, spectrum.shape[2:], spectrum.device)
    return decay(spectrum, evals, nonnegative("time", time), backend)


def decay(spectrum: Tensor, evals: Tensor, time: Tensor, backend: Backend) -> Tensor:
    """`diffuse` of checked arguments."""
    if use_kernels(backend, spectrum, evals, time):
        return diffuse_operator(spectrum.float(), evals, time)
    return definition.diffuse(spectrum, evals, time)


def segment_mean(
    x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None, backend: Backend = "auto"
) -> Tensor:
    """Return the weighted mean of x over each mesh. It is differentiable in x and the weights.

    Args:
        x: (V, C) floating point
        weights: (V,) floating point, at least 0
        ptr, lengths, backend: see `to_spectral`

    Returns (B, C) in the dtype of x. A mesh without weight gives zeros. Errors are those of `to_spectral`.

    >>> x = torch.tensor([[1.0], [3.0], [5.0]])
    >>> segment_mean(x, torch.ones(3), torch.tensor([0, 2, 3]))
    tensor([[2.],
            [5.]])
    """
    check_tensor("x", x, ("V", "C"))
    check_tensor("weights", weights, (x.shape[0],), x.device)
    ptr = check_ptr(ptr, x.shape[0], lengths, x.device)
    if use_kernels(backend, x, weights) and len(ptr) > 2:
        # The sums are projections onto the constant function.
        ones = torch.ones(x.shape[0], 1, device=x.device)
        total = project_operator(x.float(), ones, weights, ptr)[:, 0]
        weight = project_operator(weights.float()[:, None], ones, None, ptr)[:, 0, 0]
    else:
        total, weight = _plain_sums(x, weights, ptr, lengths)
    # `where` passes a gradient to both branches, so the division must be finite in both.
    mean: Tensor = total / torch.where(weight > 0, weight, 1.0)[:, None]
    return mean.to(x.dtype)


def _plain_sums(x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The sums over each mesh of weights · x, (B, C), and of the weights, (B,), in the dtype of x."""
    weights = weights.to(x.dtype)
    if torch.compiler.is_compiling() and lengths is None:  # sizes of parts would depend on the values of ptr
        meshes = len(ptr) - 1
        row = torch.repeat_interleave(torch.arange(meshes, device=x.device), torch.diff(ptr), output_size=len(x))
        total = x.new_zeros(meshes, x.shape[1]).index_add(0, row, weights[:, None] * x)
        return total, x.new_zeros(meshes).index_add(0, row, weights)
    parts = [definition.by_mesh(t, ptr, lengths) for t in (weights, x)]
    sums = [(w @ rows, w.sum()) for w, rows in zip(*parts, strict=True)]
    total, weight = (torch.stack(each)[: len(ptr) - 1] for each in zip(*sums, strict=True))
    return total, weight


# `project` and `evaluate` are each other's gradients in every argument, so both can be differentiated any number of
# times.


def _project_forward(x: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    """Φᵀ (scale ∘ x) → (B, K, C) float32"""
    from diffnet.ops.spectral.kernels import project

    return project(x, evecs, scale, ptr)


def _project_fake(x: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    return x.new_empty(len(ptr) - 1, evecs.shape[1], x.shape[1], dtype=torch.float32)


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, evecs, scale, ptr = ctx.saved_tensors
    need_x, need_evecs, need_scale, _ = ctx.needs_input_grad
    grad = grad.float()
    return (
        evaluate_operator(grad, evecs, scale, ptr) if need_x else None,
        evaluate_operator(grad.mT.contiguous(), x, scale, ptr) if need_evecs else None,
        _row_dot(x, evaluate_operator(grad, evecs, None, ptr), scale) if need_scale else None,
        None,
    )


def _evaluate_forward(coefficients: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    """scale ∘ (Φ D) → (V, C) in the dtype of the evecs; the coefficients are float32"""
    from diffnet.ops.spectral.kernels import evaluate

    return evaluate(coefficients, evecs, scale, ptr)


def _evaluate_fake(coefficients: Tensor, evecs: Tensor, scale: Tensor | None, ptr: Tensor) -> Tensor:
    return evecs.new_empty(evecs.shape[0], coefficients.shape[2])


def _evaluate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    coefficients, evecs, scale, ptr = ctx.saved_tensors
    need_coefficients, need_evecs, need_scale, _ = ctx.needs_input_grad
    grad = grad.to(evecs.dtype)
    return (
        project_operator(grad, evecs, scale, ptr) if need_coefficients else None,
        evaluate_operator(coefficients.mT.contiguous(), grad, scale, ptr) if need_evecs else None,
        _row_dot(grad, evaluate_operator(coefficients, evecs, None, ptr), scale) if need_scale else None,
        None,
    )


def _row_dot(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(1).to(like.dtype)


def _diffuse_forward(spectrum: Tensor, evals: Tensor, time: Tensor) -> Tensor:
    """exp(−λ tᵀ) ∘ S, float32"""
    from diffnet.ops.spectral.kernels import diffuse

    return diffuse(spectrum, evals, time)


def _diffuse_gradients(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """dS (B, K, C) and dt (C,), float32"""
    from diffnet.ops.spectral.kernels import diffuse_backward

    return diffuse_backward(grad, spectrum, evals, time)


def _diffuse_gradients_fake(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(1)(grad, spectrum), spectrum.new_empty(len(time))


def _plain_diffuse_gradients(grad: Tensor, spectrum: Tensor, evals: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    spectrum_grad = definition.diffuse(grad, evals, time)
    return spectrum_grad, -(evals[..., None] * spectrum_grad * spectrum).sum((0, 1))


def _diffuse_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    spectrum, evals, time = ctx.saved_tensors
    need_evals = ctx.needs_input_grad[1]
    spectrum_grad, time_grad = _diffuse_gradients_operator(grad, spectrum, evals, time)
    evals_grad = -(spectrum_grad * spectrum * time).sum(-1).to(evals.dtype) if need_evals else None
    return spectrum_grad, evals_grad, time_grad.to(time.dtype)


_diffuse_gradients_operator = opaque(
    "diffnet::diffuse_backward", _diffuse_gradients, _diffuse_gradients_fake, _plain_diffuse_gradients
)
diffuse_operator = differentiable("diffnet::diffuse", _diffuse_forward, empty_like(0), save_inputs, _diffuse_backward)
project_operator = differentiable("diffnet::project", _project_forward, _project_fake, save_inputs, _project_backward)
evaluate_operator = differentiable(
    "diffnet::evaluate", _evaluate_forward, _evaluate_fake, save_inputs, _evaluate_backward
)
