"""The first half of a block in the eigenbasis: learned diffusion, and the gradient features of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.common.precision import compute_dtype, in_dtype
from diffnet.ops.diffusion_features import reference
from diffnet.ops.gradient_features.op import check_matrices, features_operator
from diffnet.ops.gradient_features.table import empty_table
from diffnet.ops.spectral.op import diffuse_operator, project_operator


class BlockArguments(NamedTuple):
    """Tensors of a block: the operators, the parameters of its diffusion and of its gradient features."""

    mass: Tensor
    evals: Tensor
    evecs: Tensor
    gradient_evecs: Tensor
    time: Tensor
    a_re: Tensor
    a_im: Tensor | None
    ptr: Tensor


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
    """Compute `to_spectral`, `diffuse` and `values_and_gradient_features` one after the other, in few kernels.

    To reuse x, use the returned x; both its gradients are then summed in one kernel.

    It is differentiable in all floating-point arguments. The fused kernels have gradients of x, time and A only; if an
    operator needs a gradient, the three steps run one by one.

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
    given = BlockArguments(mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr)
    ptr = check_arguments(x, given, lengths, swapped).ptr
    operators = (mass, evals, evecs, gradient_evecs)
    if not use_kernels(backend, x, *operators, matrix=True):
        return reference.diffusion_and_gradient_features(
            x, mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr, lengths, swapped
        )
    dtype = compute_dtype(x, evecs)
    evecs, gradient_evecs = in_dtype(evecs, dtype), in_dtype(gradient_evecs, dtype)
    if any(operator.requires_grad for operator in operators):
        coefficients = diffuse_operator(project_operator(x.to(dtype), evecs, mass, ptr), evals, time.clamp(min=0))
        diffused, features, _ = features_operator(coefficients, a_re, a_im, evecs, gradient_evecs, ptr, swapped)
        return x, diffused, features
    passed, diffused, features, *_ = _operator(
        in_dtype(x, dtype), mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr, swapped
    )
    return passed if x.dtype == dtype else x, diffused, features


def check_arguments(x: Tensor, given: BlockArguments, lengths: Sequence[int] | None, swapped: bool) -> BlockArguments:
    """Check the arguments of `diffusion_and_gradient_features`, and return them with contiguous ptr."""
    check_tensor("x", x, ("V", "C"))
    (rows, channels), device = x.shape, x.device
    check_tensor("evecs", given.evecs, (rows, "K"), device)
    k = given.evecs.shape[1]
    check_tensor("mass", given.mass, (rows,), device)
    check_tensor("gradient_evecs", given.gradient_evecs, (2, rows, k), device)
    ptr = check_ptr(given.ptr, rows, lengths, device)
    check_tensor("evals", given.evals, (ptr.shape[0] - 1, k), device)
    check_tensor("time", given.time, (channels,), device)
    check_matrices(given.a_re, given.a_im, channels, device, swapped)
    return given._replace(ptr=ptr)


def diffusion_features_forward(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    swapped: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_d and f (V, C); for the backward S and D (B, K, C) float32 and their table, see `coefficient_kernels.table`"""
    from diffnet.ops.gradient_features.coefficient_kernels import table
    from diffnet.ops.gradient_features.kernels import forward
    from diffnet.ops.spectral.diffusion_kernels import sum_and_diffuse
    from diffnet.ops.spectral.kernels import project_spans

    spectrum, d = sum_and_diffuse(*project_spans(x, evecs, mass, ptr), ptr, evals, time)
    coefficients = table(d, a_re, a_im, gradient_evecs)
    return *forward(coefficients, evecs, gradient_evecs, ptr, swapped=swapped), spectrum, d, coefficients


def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, _, _, evecs, _, _, _, a_im, ptr, _ = arguments
    shape = len(ptr) - 1, evecs.shape[1], x.shape[1]
    diffused = evecs.new_empty(x.shape)
    spectrum = x.new_empty(shape, dtype=torch.float32)
    coefficients = empty_table(evecs, spectrum, a_im is not None)
    return diffused, torch.empty_like(diffused), spectrum, torch.empty_like(spectrum), coefficients


def _gradients(
    diffused_grad: Tensor,
    features_grad: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    spectrum: Tensor,
    d: Tensor,
    table: Tensor,
    passed_grad: Tensor | None,
    swapped: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (V, C) plus passed_grad; dt (C,), dA_re (C, C) and dA_im (empty without rotations) in float32"""
    from diffnet.ops.gradient_features.kernels import backward

    sums = backward(features_grad, table, gradient_evecs, ptr, swapped=swapped, values_grad=diffused_grad, evecs=evecs)
    given = BlockArguments(mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr)
    x_grad, time_grad, re_grad, im_grad = gradients_of_sums(sums, given, spectrum, d, passed_grad)
    return x_grad, time_grad, re_grad, re_grad.new_empty(0, 0) if im_grad is None else im_grad


def gradients_of_sums(
    sums: Tensor, given: BlockArguments, spectrum: Tensor, d: Tensor, passed_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dx (V, C) plus passed_grad, and dt (C,), dA_re and dA_im (C, C) in float32; sums: dD, dP, dQ and Φᵀ dx_d"""
    from diffnet.ops.gradient_features.coefficient_kernels import backward
    from diffnet.ops.spectral.kernels import evaluate

    of_diffusion = spectrum, given.evals, given.time
    spectrum_grad, re_grad, im_grad, time_grad = backward(sums, d, given.a_re, given.a_im, of_diffusion)
    return evaluate(spectrum_grad, given.evecs, given.mass, given.ptr, added=passed_grad), time_grad, re_grad, im_grad


def _gradients_fake(diffused_grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, a_im, _, _, d, _, _, _ = arguments
    c, rotations = d.shape[2], 0 if a_im is None else d.shape[2]
    x_grad = torch.empty_like(diffused_grad, memory_format=torch.contiguous_format)
    return x_grad, d.new_empty(c), d.new_empty(c, c), d.new_empty(rotations, rotations)


_gradients_operator = opaque("diffnet::diffusion_features_backward", _gradients, _gradients_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *tensors, ctx.swapped = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, passed_grad: Tensor | None, diffused_grad: Tensor | None, features_grad: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    _, _, evecs, _, time, a_re, a_im, *_ = saved

    def given(grad: Tensor | None) -> Tensor:
        return evecs.new_zeros(len(evecs), len(time)) if grad is None else in_dtype(grad, evecs.dtype)

    x_grad, time_grad, re_grad, im_grad = _gradients_operator(
        given(diffused_grad), given(features_grad), *saved, passed_grad, ctx.swapped
    )
    im_grad = None if a_im is None else in_dtype(im_grad, a_im.dtype)
    of_parameters = in_dtype(time_grad, time.dtype), in_dtype(re_grad, a_re.dtype), im_grad
    return x_grad, None, None, None, None, *of_parameters, None, None


_operator = differentiable(
    "diffnet::diffusion_features",
    diffusion_features_forward,
    _fake,
    _save,
    _backward,
    returns_input=True,
)
