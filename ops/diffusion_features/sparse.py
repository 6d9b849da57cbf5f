"""The first half of a block with sparse gradients: learned diffusion, and the gradient features of its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor
from diffnet.ops.common.cpu import eager_on_cpu
from diffnet.ops.common.precision import compute_dtype, in_dtype
from diffnet.ops.common.ragged import row_lengths
from diffnet.ops.diffusion_features import cpu
from diffnet.ops.gradient_features.op import check_matrices, gradient_features
from diffnet.ops.sparse.op import spmm
from diffnet.ops.sparse.pattern import Pattern
from diffnet.ops.spectral.op import diffuse, from_spectral, to_spectral


def sparse_diffusion_and_gradient_features(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    pattern: Pattern,
    gradient: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
    *,
    swapped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `to_spectral`, `diffuse`, `from_spectral`, `spmm` and `gradient_features` one after the other.

    On the CPU, float32 is computed in fewer products of dense matrices. To reuse x, use the returned x; both its
    gradients are then summed in one pass.

    Args:
        pattern, gradient: (V, V) and (2, nnz) floating point, the X and Y components of the gradient
        x, mass, evals, evecs, time, a_re, a_im, ptr, lengths, backend, swapped: see `diffusion_and_gradient_features`

    Returns:
        x, and the diffused function and its gradient features, (V, C) each

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes, devices or extents.
    """
    operators = (mass, evals, evecs, gradient)
    kernels = use_kernels(backend, x, *operators, matrix=True)
    stepwise = a_im is None or swapped or kernels or pattern.row_order is not None
    if a_im is None or stepwise or not _fast_on_cpu(operators, x, time, a_re, a_im):
        coefficients = diffuse(to_spectral(x, evecs, mass, ptr, lengths, backend), evals, time.clamp(min=0), backend)
        diffused = from_spectral(coefficients, evecs, ptr, lengths, backend)
        gradients = spmm(pattern, gradient, diffused, backend=backend)
        return x, diffused, gradient_features(gradients, a_re, a_im, backend, swapped=swapped)
    check_tensor("x", x, ("V", "C"))
    (rows, channels), device = x.shape, x.device
    check_tensor("evecs", evecs, (rows, "K"), device)
    check_tensor("mass", mass, (rows,), device)
    check_tensor("gradient", gradient, (2, pattern.nnz), device)
    ptr = check_ptr(ptr, rows, lengths, device)
    check_tensor("evals", evals, (len(ptr) - 1, evecs.shape[1]), device)
    check_tensor("time", time, (channels,), device)
    check_matrices(a_re, a_im, channels, device)
    evecs = in_dtype(evecs, compute_dtype(x, evecs))
    parts = cpu.SparseOperators(mass, evals, evecs, pattern, gradient, ptr, row_lengths(ptr, lengths))
    return cpu.sparse_diffusion_and_gradient_features(x, time, a_re, a_im, parts)


def _fast_on_cpu(operators: Sequence[Tensor], x: Tensor, *parameters: Tensor) -> bool:
    """Whether `ops.diffusion_features.cpu` computes this: in float32, perhaps under autocast to bfloat16."""
    mass, evals, evecs, gradient = operators
    always = (mass, evals, gradient, *parameters)
    if not eager_on_cpu(x, evecs, *always) or any(operator.requires_grad for operator in operators):
        return False
    allowed = [torch.float32, torch.bfloat16] if torch.is_autocast_enabled("cpu") else [torch.float32]
    return x.dtype in allowed and evecs.dtype in allowed and all(t.dtype == torch.float32 for t in always)
