"""Gradient features in plain PyTorch: the reference for the kernels and for `cpu.py`.

Arguments are as in `ops.gradient_features.op`. Mixed dtypes are promoted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.common.precision import compute_dtype, promoted_dtype
from diffnet.ops.spectral.reference import from_spectral


def gradient_features(gradients: Tensor, a_re: Tensor, a_im: Tensor | None, swapped: bool = False) -> Tensor:
    """tanh(g_x ∘ b_x + g_y ∘ b_y) with b = A g, in the promoted dtype."""
    dtype = promoted_dtype(gradients, *matrices(a_re, a_im))
    gx, gy = gradients
    x, y, a_re = gx.to(dtype), gy.to(dtype), a_re.to(dtype)
    if swapped and a_im is not None:
        turned, other = F.linear(x, a_re), F.linear(y, a_im.to(dtype))
        return torch.tanh(gx * (turned - other) + gy * (turned + other))
    bx, by = F.linear(x, a_re), F.linear(y, a_re)
    if a_im is not None:
        a_im = a_im.to(dtype)
        bx, by = bx - F.linear(y, a_im), by + F.linear(x, a_im)
    return torch.tanh(gx * bx + gy * by)


def spectral_gradient_features(
    coefficients: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    swapped: bool = False,
) -> Tensor:
    """The gradient features of (G Φ) D, rounded to the dtype of the gradient_evecs."""
    gradients = torch.stack([from_spectral(coefficients, g, ptr, lengths) for g in gradient_evecs])
    features = gradient_features(gradients, a_re, a_im, swapped)
    if promoted_dtype(*matrices(a_re, a_im)) == gradient_evecs.dtype:
        return features
    return features.to(compute_dtype(gradient_evecs))


def values_and_gradient_features(
    coefficients: Tensor,
    evecs: Tensor,
    gradient_evecs: Tensor,
    a_re: Tensor,
    a_im: Tensor | None,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    swapped: bool = False,
) -> tuple[Tensor, Tensor]:
    """Φ D and its gradient features, in the promoted dtype of evecs and gradient_evecs."""
    dtype = promoted_dtype(evecs, gradient_evecs)
    values = from_spectral(coefficients, evecs.to(dtype), ptr, lengths)
    features = spectral_gradient_features(coefficients, gradient_evecs.to(dtype), a_re, a_im, ptr, lengths, swapped)
    return values, features


def matrices(a_re: Tensor, a_im: Tensor | None) -> tuple[Tensor, ...]:
    """A_re and, with rotations, A_im."""
    return (a_re,) if a_im is None else (a_re, a_im)
