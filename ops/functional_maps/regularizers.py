"""How strongly each entry of a functional map is held back, from the eigenvalues of both shapes.

Both functions take the eigenvalues of P pairs of shapes, evals_a (P, K_a) and evals_b (P, K_b), and return
(P, K_b, K_a): entry (i, j) is small where eigenvalue i of b is close to eigenvalue j of a.
"""

from __future__ import annotations

import torch
from torch import Tensor


def squared_difference(evals_a: Tensor, evals_b: Tensor) -> Tensor:
    """The squared difference of two eigenvalues, (λᵃ_j − λᵇ_i)².

    Source: Donati, Sharma, Ovsjanikov 2020, Deep Geometric Functional Maps, section 4.1.
    """
    return (evals_a[:, None, :] - evals_b[:, :, None]).square()


def resolvent(evals_a: Tensor, evals_b: Tensor, gamma: float | Tensor) -> Tensor:
    """The squared distance of the resolvents of two eigenvalues. It doesn't depend on the scale of the pair.

    Negative eigenvalues, which are rounding errors of 0, count as 0.

    Source: Ren, Panine, Wonka, Ovsjanikov 2019, Structured Regularization of Functional Map Computations.
    """
    evals_a, evals_b = evals_a.clamp(min=0), evals_b.clamp(min=0)
    largest = torch.maximum(evals_a.amax(1, keepdim=True), evals_b.amax(1, keepdim=True))
    scale = torch.where(largest > 0, largest, 1)
    (re_a, im_a), (re_b, im_b) = _resolvent(evals_a / scale, gamma), _resolvent(evals_b / scale, gamma)
    return (re_b[:, :, None] - re_a[:, None, :]).square() + (im_b[:, :, None] - im_a[:, None, :]).square()


def _resolvent(evals: Tensor, gamma: float | Tensor) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part, up to sign, of 1 / (λ^γ − i)."""
    power = evals**gamma
    below = power.square() + 1
    return power / below, 1 / below
