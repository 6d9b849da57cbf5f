"""Functional maps from features, for many pairs of shapes at once.

Shapes: P pairs of shapes a and b, K_a and K_b eigenpairs, C features. A regularizer (P, K_b, K_a) says how strongly
each entry of a map is held back: entry (i, j) is small where eigenvalue i of b is close to eigenvalue j of a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_finite, check_integer, check_tensor, readable
from diffnet.ops.common.precision import sum_dtype
from diffnet.ops.functional_maps.rows import solve_rows

Regularizer: TypeAlias = Literal["resolvent", "squared_difference"]

# The weights of the papers.
WEIGHTS: dict[str, float] = {"resolvent": 100.0, "squared_difference": 1e-3}


def functional_map(
    a: Tensor,
    b: Tensor,
    evals_a: Tensor,
    evals_b: Tensor,
    *,
    regularizer: Regularizer = "resolvent",
    weight: float | Tensor | None = None,
    gamma: float | Tensor = 0.5,
    k_a: Sequence[int] | None = None,
    k_b: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the maps C from functions on shape a to functions on shape b that take features to features, C A ≈ B.

    C minimizes ‖C A − B‖² + weight · Σ_ij d_ij C_ij². Row i solves (A Aᵀ + weight · diag(d_i)) c_i = A b_i. The
    regularizer d_ij is small where eigenvalue i of b is close to eigenvalue j of a, so C almost commutes with the
    Laplacians.

    It is computed in float64. It is differentiable in a, b and the eigenvalues, and in weight and gamma if they are
    tensors. Memory beyond the arguments and the result is about 1.5 GB at most on a GPU, forward and backward.

    Args:
        a: (P, K_a, C) floating point, coefficients of features in the eigenbasis, as `to_spectral` returns them
        b: (P, K_b, C) floating point, the same features on the other shape
        evals_a, evals_b: (P, K_a) and (P, K_b) floating point, the eigenvalues
        regularizer: "resolvent" (Ren et al. 2019), which doesn't depend on the scale of the shapes, or
            "squared_difference" (λᵃ_j − λᵇ_i)² (Donati et al. 2020), which is meant for shapes of area 1
        weight: at least 0; by default 100 for "resolvent" and 1e-3 for "squared_difference"
        gamma: above 0, the power of the eigenvalues in "resolvent"
        k_a, k_b: how many eigenpairs of each pair count, P integers from 1 to K_a or K_b. The others are padding. By
            default all count.
        backend: see `ops.common.backend.use_kernels`, for the dtypes of a and b

    Returns:
        (P, K_b, K_a) in the promoted dtype of a and b, and in float32 for lower precision. Rows and columns of padding
        are 0.

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes, devices, regularizers and numbers of eigenpairs. On the CPU and in debug mode also
            for values that are not finite, for a weight or gamma out of range, and if the features don't determine a
            row, as with weight 0 and C < K_a. On a GPU such rows are NaN.

    Sources: Ovsjanikov et al. 2012, Functional Maps; and see `regularizer`.

    >>> a = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> b = torch.tensor([[[1.0, 0.0], [0.0, -1.0]]])  # the second eigenvector has another sign
    >>> evals = torch.tensor([[0.0, 1.0]])
    >>> functional_map(a, b, evals, evals, weight=1.0)
    tensor([[[ 1.,  0.],
             [ 0., -1.]]])
    """
    check_tensor("a", a, ("P", "K_a", "C"))
    (pairs, columns, channels), device = a.shape, a.device
    check_tensor("b", b, (pairs, "K_b", channels), device)
    rows = b.shape[1]
    check_tensor("evals_a", evals_a, (pairs, columns), device)
    check_tensor("evals_b", evals_b, (pairs, rows), device)
    if columns == 0 or rows == 0:
        raise ValueError(f"a and b should have eigenpairs, shapes are {tuple(a.shape)} and {tuple(b.shape)}")
    live_a, live_b = eigenpair_mask("k_a", k_a, evals_a), eigenpair_mask("k_b", k_b, evals_b)
    if regularizer not in get_args(Regularizer):
        raise ValueError(f"regularizer should be one of {', '.join(get_args(Regularizer))}, got {regularizer!r}")
    weight = checked_number("weight", WEIGHTS[regularizer] if weight is None else weight, device, positive=False)
    gamma = checked_number("gamma", gamma, device, positive=True)
    triton = use_kernels(backend, a, b)
    dtype = sum_dtype(a, b)
    # Autocast leaves float64 as it is.
    a, b, evals_a, evals_b = (x.double() for x in (a, b, evals_a, evals_b))
    if live_a is not None:
        a, evals_a = a.where(live_a[:, :, None], 0), _without_padding(evals_a, live_a)
    if live_b is not None:
        b, evals_b = b.where(live_b[:, :, None], 0), _without_padding(evals_b, live_b)
    for name, x in {"a": a, "b": b, "evals_a": evals_a, "evals_b": evals_b}.items():
        check_finite(name, x)
    if regularizer == "resolvent":
        penalty = weight * resolvent(evals_a, evals_b, gamma)
    else:
        penalty = weight * squared_difference(evals_a, evals_b)
    # Any positive number keeps padding from making a system singular. Its right-hand side is 0, and so is its map.
    if live_a is not None:
        penalty = penalty.where(live_a[:, None, :], 1)
    if live_b is not None:
        penalty = penalty.where(live_b[:, :, None], 1)
    c = solve_rows(a @ a.mT, penalty, b @ a.mT, triton)
    if readable(c) and not c.isfinite().all():
        pair, row = (~c.isfinite()).any(2).nonzero()[0].tolist()
        raise ValueError(
            f"the features don't determine row {row} of functional map {pair}: its system is singular. "
            "Give a larger weight, or features with at least as many channels as there are eigenpairs"
        )
    return c.to(dtype)


def eigenpair_mask(name: str, counts: Sequence[int] | None, evals: Tensor) -> Tensor | None:
    """A mask (P, K) bool of the eigenvalues that count, given their number in each pair. None if all count.

    Raises TypeError for numbers that are not integers, ValueError for another count or a number out of range.
    """
    if counts is None:
        return None
    pairs, k = evals.shape
    numbers = [check_integer(name, count) for count in counts]
    if len(numbers) != pairs or not all(1 <= number <= k for number in numbers):
        raise ValueError(f"{name} should be {pairs} integers from 1 to {k}, got {numbers}")
    return torch.arange(k, device=evals.device) < torch.tensor(numbers, device=evals.device)[:, None]


def checked_number(name: str, value: Any, device: torch.device, *, positive: bool) -> float | Tensor:
    """Check a number or a tensor of shape (): finite, and above 0 or at least 0. Return it as a float or in float64.

    Tensors on a GPU are checked in debug mode only. Raises TypeError or ValueError that names the value.
    """
    if isinstance(value, Tensor):
        check_tensor(name, value, (), device)
    elif isinstance(value, bool) or not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise TypeError(f"{name} should be a number or a tensor of shape (), got {value!r} of type {kind}")
    if not isinstance(value, Tensor) or readable(value):
        number = value.item() if isinstance(value, Tensor) else float(value)
        if not (number > 0 if positive else number >= 0) or number == float("inf"):
            raise ValueError(f"{name} should be finite and {'above' if positive else 'at least'} 0, got {number:g}")
    return value.double() if isinstance(value, Tensor) else float(value)


def _without_padding(evals: Tensor, live: Tensor) -> Tensor:
    """Put the largest eigenvalue of a pair in place of its padding. At 0, powers may have infinite derivatives."""
    return evals.where(live, evals.where(live, 0).amax(1, keepdim=True))


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
