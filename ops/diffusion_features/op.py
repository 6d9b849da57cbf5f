"""The first half of a block, in which all is taken on the basis: learned diffusion, and gradient features of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.dispatch import differentiable, opaque
from diffnet.ops.common.precision import compute_dtype
from diffnet.ops.gradient_features.op import values_and_gradient_features
from diffnet.ops.spectral.op import diffuse, to_spectral


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
) -> tuple[Tensor, Tensor, Tensor]:
    """`to_spectral`, `diffuse` and `values_and_gradient_features` one after the other, in as few kernels as may be.

    x (V, C), mass (V,), evals (B, K), evecs (V, K), gradient_evecs (2, V, K), time (C,), of which less than 0 is 0,
    a_re, a_im (C, C), ptr (B+1,) int → x, the diffused function and its gradient features, (V, C) each

    Who needs x further on should take the one that is returned: its gradient is then added to the other in the kernel
    that computes that one.
    Only x, time and A have gradients in these kernels; operators that want one are taken step by step.
    """
    operators = (mass, evals, evecs, gradient_evecs)
    if use_kernels(backend, x, *operators, matrix=True) and not any(operator.requires_grad for operator in operators):
        dtype = compute_dtype(x, evecs)
        passed, diffused, features, *_ = _diffusion_features(
            x.to(dtype), mass, evals, evecs.to(dtype), gradient_evecs.to(dtype), time, a_re, a_im, ptr
        )
        return passed if x.dtype == dtype else x, diffused, features
    coefficients = diffuse(to_spectral(x, evecs, mass, ptr, lengths, backend), evals, time.clamp(min=0), backend)
    return x, *values_and_gradient_features(coefficients, evecs, gradient_evecs, a_re, a_im, ptr, lengths, backend)


def _diffusion_features_kernel(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_d and f (V, C); for the backward S and D (B, K, C) float32, and their table, see `kernels.coefficients`."""
    from diffnet.ops.gradient_features.coefficient_kernels import sum_and_diffuse, table
    from diffnet.ops.gradient_features.kernels import forward
    from diffnet.ops.spectral.kernels import project_spans

    spectrum, d = sum_and_diffuse(*project_spans(x, evecs, mass, ptr), ptr, evals, time)
    coefficients = table(d, a_re, a_im, gradient_evecs.dtype)
    return *forward(coefficients, evecs, gradient_evecs, ptr), spectrum, d, coefficients


def _diffusion_features_fake(
    x: Tensor,
    mass: Tensor,
    evals: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    time: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = len(ptr) - 1, evecs.shape[1], x.shape[1]
    diffused = evecs.new_empty(x.shape)
    spectrum = x.new_empty(shape, dtype=torch.float32)
    coefficients = evecs.new_empty(2 if a_im is None else 3, *shape)
    return diffused, torch.empty_like(diffused), spectrum, torch.empty_like(spectrum), coefficients


def _gradients_kernel(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (V, C), to which passed_grad is added, dt (C,), dA_re (C, C) and dA_im (empty without rotations); but for dx
    float32"""
    from diffnet.ops.gradient_features.coefficient_kernels import backward as coefficients_backward
    from diffnet.ops.gradient_features.kernels import backward
    from diffnet.ops.spectral.kernels import evaluate, project

    sums = backward(features_grad, table, gradient_evecs, ptr)
    projected = project(diffused_grad, evecs, None, ptr)
    spectrum_grad, re_grad, im_grad, time_grad = coefficients_backward(
        projected, sums, d, a_re, a_im, (spectrum, evals, time)
    )
    x_grad = evaluate(spectrum_grad, evecs, mass, ptr, added=passed_grad)
    return x_grad, time_grad, re_grad, re_grad.new_empty(0, 0) if im_grad is None else im_grad


def _gradients_fake(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c, rotations = d.shape[2], 0 if a_im is None else d.shape[2]
    x_grad = torch.empty_like(diffused_grad, memory_format=torch.contiguous_format)
    return x_grad, d.new_empty(c), d.new_empty(c, c), d.new_empty(rotations, rotations)


_gradients = opaque("diffnet::diffusion_features_backward", _gradients_kernel, _gradients_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[1:], *output[2:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, passed_grad: Tensor | None, diffused_grad: Tensor | None, features_grad: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    _, _, evecs, _, time, a_re, a_im, *_ = saved

    def given(grad: Tensor | None) -> Tensor:
        return evecs.new_zeros(len(evecs), len(time)) if grad is None else grad.to(evecs.dtype)

    x_grad, time_grad, re_grad, im_grad = _gradients(given(diffused_grad), given(features_grad), *saved, passed_grad)
    im_grad = None if a_im is None else im_grad.to(a_im.dtype)
    return x_grad, None, None, None, None, time_grad.to(time.dtype), re_grad.to(a_re.dtype), im_grad, None


_diffusion_features = differentiable(
    "diffnet::diffusion_features", _diffusion_features_kernel, _diffusion_features_fake, _setup, _backward, passes=True
)
