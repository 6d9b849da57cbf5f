"""Losses of functional maps, as the unsupervised line uses them. Each is the mean over the pairs of a squared norm.

Source: Cao, Roetzer, Bernard 2023, Unsupervised Learning of Robust Spectral Shape Matching; Roufosse, Sharma,
Ovsjanikov 2019, Unsupervised Deep Learning for Structured Shape Matching.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_tensor
from diffnet.ops.common.precision import without_autocast
from diffnet.ops.functional_maps.op import eigenpair_mask


def orthogonality_loss(c: Tensor, k_a: Sequence[int] | None = None) -> Tensor:
    """Compute ‖CᵀC − I‖², averaged over pairs. It is 0 for maps that keep areas.

    Args:
        c: (P, K_b, K_a) floating point
        k_a: how many eigenpairs of a count in each pair, see `functional_map`. I has ones there only.

    Returns (), differentiable in c. Errors are those of `functional_map`.

    >>> orthogonality_loss(2 * torch.eye(3)[None])
    tensor(27.)
    """
    check_tensor("c", c, ("P", "K_b", "K_a"))
    return _distance_from_identity(c.mT, c, k_a)


def bijectivity_loss(c_ab: Tensor, c_ba: Tensor, k_a: Sequence[int] | None = None) -> Tensor:
    """Compute ‖C_ba C_ab − I‖², averaged over pairs: how far functions on a are from returning as they went.

    Args:
        c_ab: (P, K_b, K_a) floating point, maps from a to b
        c_ba: (P, K_a, K_b) floating point, maps from b to a
        k_a: see `orthogonality_loss`

    Returns (), differentiable in both maps. Errors are those of `functional_map`.

    >>> bijectivity_loss(2 * torch.eye(3)[None], torch.eye(3)[None] / 2)
    tensor(0.)
    """
    check_tensor("c_ab", c_ab, ("P", "K_b", "K_a"))
    pairs, rows, columns = c_ab.shape
    check_tensor("c_ba", c_ba, (pairs, columns, rows), c_ab.device)
    return _distance_from_identity(c_ba, c_ab, k_a)


def coupling_loss(c: Tensor, c_of_points: Tensor) -> Tensor:
    """Compute ‖C − Φ_b⁺ Π Φ_a‖², averaged over pairs: how far a functional map is from that of a map of points.

    Args:
        c: (P, K_b, K_a) floating point
        c_of_points: (P, K_b, K_a) floating point, the functional maps of maps of points. With the soft maps Π of the
            features they have gradients, see `soft_map`.

    Returns (), differentiable in both arguments. Errors are those of `functional_map`.

    >>> coupling_loss(torch.ones(2, 3, 3), torch.zeros(2, 3, 3))
    tensor(9.)
    """
    check_tensor("c", c, ("P", "K_b", "K_a"))
    check_tensor("c_of_points", c_of_points, c.shape, c.device)
    return _mean_square(c - c_of_points)


def _distance_from_identity(x: Tensor, y: Tensor, k_a: Sequence[int] | None) -> Tensor:
    with without_autocast(x):
        products = x @ y
    live = eigenpair_mask("k_a", k_a, products[:, 0])
    identity = torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)
    return _mean_square(products - (identity if live is None else identity * live[:, None]))


def _mean_square(x: Tensor) -> Tensor:
    return x.square().sum((1, 2)).mean()
