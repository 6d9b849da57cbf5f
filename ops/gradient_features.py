"""Spatial gradient features (Sharp et al. 2022, "Spatial Gradient Features")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops.spectral import from_spectral


def gradient_features(gradients: Tensor, a_re: Tensor, a_im: Tensor | None) -> Tensor:
    """f = tanh(Re(ḡ ∘ A g)) with g = g_x + i g_y and A = A_re + i A_im: inner products of learned tangent vectors.

    gradients (2, V, C): the X and Y components of the tangent gradients of C channels
    a_re, a_im (C, C): the complex matrix, applied from the left; a_im = None leaves rotations out
    → (V, C)

    Written out: b_x = g_x A_reᵀ − g_y A_imᵀ, b_y = g_y A_reᵀ + g_x A_imᵀ, f = tanh(g_x ∘ b_x + g_y ∘ b_y).
    """
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
) -> Tensor:
    """Gradient features of x = Φ D taken on the basis, (G Φ) D, with no sparse product.

    coefficients (B, K, C), gradient_evecs (2, V, K), a_re, a_im (C, C), ptr (B+1,) int → (V, C)
    """
    gradients = torch.stack([from_spectral(coefficients, g, ptr, lengths) for g in gradient_evecs])
    return gradient_features(gradients, a_re, a_im)
