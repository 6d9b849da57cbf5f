"""The first half of a block in the eigenbasis: learned diffusion, and the gradient features of its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops import definition
from diffnet.ops.common.backend import Backend, use_cpu_form, use_definition, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor
from diffnet.ops.common.precision import compute_dtype, in_dtype
from diffnet.ops.definition import BlockArguments
from diffnet.ops.diffusion_features import cpu
from diffnet.ops.gradient_features.op import check_matrices, gradient_features, values_and_gradient_features
from diffnet.ops.sparse.op import spmm
from diffnet.ops.spectral.op import diffuse, from_spectral, to_spectral


def diffusion_and_gradient_features(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    backend: Backend = "auto",
    *,
    swapped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `to_spectral`, `diffuse` and `values_and_gradient_features` one after the other.

    It is differentiable in all floating-point arguments.

    Args:
        x: (V, C) floating point
        mass, evals, evecs, gradient_evecs: (V,), (B, K), (V, K) and (2, V, K) floating point, the operators
        time: (C,) floating point, in squared units of the positions. A negative time counts as 0 and has gradient 0.
        a_re, a_im, swapped: see `gradient_features`
        ptr: (B+1,) int32 or int64, the extents of the meshes, ascending from 0 to V
        lengths: the rows of each mesh as Python integers, or None
        backend: see `ops.common.backend.use_kernels`

    Returns:
        x, and the diffused function and its gradient features, (V, C) each. The latter two have the promoted dtype of x
        and evecs, or autocast's dtype.

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes, devices or extents.
    """
    arguments = BlockArguments(
        mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr, lengths=lengths, swapped=swapped
    )
    return diffused_with_features(x, check_arguments(x, arguments), backend)


def diffused_with_features(x: Tensor, o: BlockArguments, backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
    """x, x_d and f from checked arguments, in the form that `backend` asks for. Use the returned x.

    On a CPU, the gradients of both uses of x are then summed in one pass.
    """
    kernels = use_kernels(backend, x, *o.operators, matrix=True)
    if use_definition(backend) or (o.pattern is None and not kernels):
        return x, *definition.diffusion_and_gradient_features(x, o)
    if _fast_on_cpu(backend, x, o):
        return cpu.diffused_with_features(x, o._replace(evecs=in_dtype(o.evecs, compute_dtype(x, o.evecs))))
    return x, *_stepwise(x, o, backend)


def _stepwise(x: Tensor, o: BlockArguments, backend: Backend) -> tuple[Tensor, Tensor]:
    """x_d and f, an operation after the other."""
    d = diffuse(to_spectral(x, o.evecs, o.mass, o.ptr, o.lengths, backend), o.evals, o.time.clamp(min=0), backend)
    if o.pattern is None:
        dtype = compute_dtype(x, o.evecs)
        basis, learned = (in_dtype(o.evecs, dtype), in_dtype(o.gradient, dtype)), (o.a_re, o.a_im)
        return values_and_gradient_features(d, *basis, *learned, o.ptr, o.lengths, backend, swapped=o.swapped)
    diffused = from_spectral(d, o.evecs, o.ptr, o.lengths, backend)
    gradients = spmm(o.pattern, o.gradient, diffused, backend=backend)
    return diffused, gradient_features(gradients, o.a_re, o.a_im, backend, swapped=o.swapped)


def _fast_on_cpu(backend: Backend, x: Tensor, o: BlockArguments) -> bool:
    """Whether `cpu` computes this: sparse gradients in float32, perhaps under autocast to bfloat16."""
    if o.pattern is None or o.pattern.row_order is not None or o.a_im is None or o.swapped:
        return False
    if any(operator.requires_grad for operator in o.operators):
        return False
    always = o.mass, o.evals, o.gradient, o.time, o.a_re, o.a_im
    if not use_cpu_form(backend, x, o.evecs, *always):
        return False
    allowed = [torch.float32, torch.bfloat16] if torch.is_autocast_enabled("cpu") else [torch.float32]
    return x.dtype in allowed and o.evecs.dtype in allowed and all(t.dtype == torch.float32 for t in always)


def check_arguments(x: Tensor, o: BlockArguments) -> BlockArguments:
    """Check the arguments of `diffusion_and_gradient_features`, and return them with contiguous ptr."""
    check_tensor("x", x, ("V", "C"))
    (rows, channels), device = x.shape, x.device
    check_tensor("evecs", o.evecs, (rows, "K"), device)
    k = o.evecs.shape[1]
    check_tensor("mass", o.mass, (rows,), device)
    if o.pattern is None:
        check_tensor("gradient_evecs", o.gradient, (2, rows, k), device)
    else:
        check_tensor("gradient", o.gradient, (2, o.pattern.nnz), device)
    ptr = check_ptr(o.ptr, rows, o.lengths, device)
    check_tensor("evals", o.evals, (ptr.shape[0] - 1, k), device)
    check_tensor("time", o.time, (channels,), device)
    check_matrices(o.a_re, o.a_im, channels, device, o.swapped)
    return o._replace(ptr=ptr)
