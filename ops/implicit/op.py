"""Diffusion by one implicit Euler step: (M + t L) u = M x, solved rather than expanded in a basis."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable
from diffnet.ops.common.ragged import row_lengths
from diffnet.ops.implicit.conjugate_gradients import conjugate_gradients
from diffnet.ops.sparse import SparseMatrix, reference
from diffnet.ops.sparse.op import _sddmm, _spmm, diagonal
from diffnet.ops.sparse.pattern import CsrArrays, csr_arrays

TOLERANCE = 1e-6
MAX_ITERATIONS = 1000
CHECK_EVERY = 8


def implicit_diffusion(
    x: Tensor,
    time: Tensor,
    laplacian: SparseMatrix,
    mass: Tensor,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_iterations: int = MAX_ITERATIONS,
    check_every: int = CHECK_EVERY,
    backend: Backend = "auto",
) -> Tensor:
    """Diffuse each channel for its own time by one implicit Euler step, (M + t_c L) u_c = M x_c.

    x (V, C), time (C,) ≥ 0, laplacian (V, V) symmetric positive semi-definite and block-diagonal over the meshes, mass
    (V,), ptr (B+1,) int → (V, C) in the dtype of x. Low precision is computed in float32.

    Vertices without mass take no part, as in `geometry.eigenbasis`: they keep their x, and pass nothing on.

    Differentiable in x, time, mass and the values of the Laplacian, whose gradient takes it as symmetric; the backward
    is one more solve with the same matrix (the implicit function theorem), whatever the number of iterations.

    tolerance, max_iterations, check_every: see `conjugate_gradients`, which warns where they don't suffice. The error
    of u is about √κ times the tolerance, where κ, the condition number, is about 1 + t λ with the largest eigenvalue
    λ ~ 1/(edge length)²; iterations grow as √κ.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, laplacian.values.dtype), torch.float32)
    wide, mass = x.to(dtype), mass.to(dtype)
    live = mass[:, None] > 0
    values = laplacian.values.to(dtype)
    triton = use_kernels(backend, values, wide)
    pattern = laplacian.pattern
    solution: Tensor = _solve(
        list(csr_arrays(pattern, triton)),
        ptr,
        diagonal(pattern, values.detach()),
        values,
        torch.where(live[:, 0], mass, 0),
        time.to(dtype),
        torch.where(live, mass[:, None] * wide, 0),
        row_lengths(ptr, lengths),
        tolerance,
        max_iterations,
        check_every,
        triton,
    )
    return torch.where(live, solution, wide).to(x.dtype)


def _solve_kernel(
    structure: Sequence[Tensor],
    ptr: Tensor,
    diagonal: Tensor,
    values: Tensor,
    mass: Tensor,
    time: Tensor,
    b: Tensor,
    lengths: Sequence[int],
    tolerance: float,
    max_iterations: int,
    check_every: int,
    triton: bool,
) -> Tensor:
    """(M + t_c L)⁻¹ b_c on the vertices that have mass, 0 on the others."""
    csr = CsrArrays(*structure)
    iteration = None
    if triton:
        from diffnet.ops.implicit.kernels import iteration as fused
        from diffnet.ops.sparse import kernels

        iteration = functools.partial(fused, csr, values, mass, diagonal, time, ptr)

        def multiply(u: Tensor) -> Tensor:
            return kernels.spmm(csr, values[None], u[None])[0]
    else:
        size = (len(mass), len(mass))
        laplacian = torch.sparse_csr_tensor(csr.indptr, csr.indices, values, size, check_invariants=False)

        def multiply(u: Tensor) -> Tensor:
            with torch.autocast(u.device.type, enabled=False):
                return reference.in_row_order(csr, (laplacian @ u)[None])[0]

    live, weights = mass > 0, mass[:, None]

    def apply(u: Tensor) -> Tensor:
        return torch.addcmul(weights * u, multiply(u), time)

    # Both are 0 at vertices without mass, which keeps these out. L is semi-definite up to rounding.
    inverse_mass = torch.where(live, 1 / mass, 0)[:, None]
    inverse_diagonal = torch.where(live[:, None], 1 / (weights + time * diagonal[:, None].clamp(min=0)), 0)
    b = (b * live[:, None]).contiguous()  # kernels take it row by row
    return conjugate_gradients(
        apply,
        b,
        b * inverse_mass,  # the solution for t = 0
        inverse_diagonal,
        ptr,
        lengths,
        tolerance=tolerance,
        max_iterations=max_iterations,
        check_every=check_every,
        iteration=iteration,
    )


def _solve_fake(
    structure: Sequence[Tensor],
    ptr: Tensor,
    diagonal: Tensor,
    values: Tensor,
    mass: Tensor,
    time: Tensor,
    b: Tensor,
    *settings: Any,
) -> Tensor:
    return torch.empty_like(b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, *tensors, _, lengths, tolerance, max_iterations, check_every, triton = inputs
    ctx.settings = lengths, tolerance, max_iterations, check_every, triton
    ctx.save_for_backward(*structure, *tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("implicit_diffusion can't be differentiated twice")
    *structure, ptr, diagonal, values, mass, time, u = ctx.saved_tensors
    *_, triton = ctx.settings
    need_values, need_mass, need_time, need_b = ctx.needs_input_grad[3:7]
    w = _solve(structure, ptr, diagonal, values, mass, time, grad, *ctx.settings)
    # No transpose is needed where nothing more is differentiated.
    both = [*structure, *structure, ptr.new_empty(0)]
    grad_values = grad_mass = grad_time = None
    if need_values:
        grad_values = -_sddmm(both, (w * time)[None], u[None], triton)[0]
    if need_mass:
        grad_mass = -(w * u).sum(1)
    if need_time:
        grad_time = -(w * _spmm(both, values[None], u[None], False, False, triton)[0]).sum(0)
    return [None] * len(structure), None, None, grad_values, grad_mass, grad_time, w if need_b else None, *[None] * 5


_solve = differentiable("diffnet::implicit_solve", _solve_kernel, _solve_fake, _save, _backward)
