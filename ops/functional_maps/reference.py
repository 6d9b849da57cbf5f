"""Plain PyTorch forms: systems that differ in their diagonals, and inverse Cholesky factors of small matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_rows(gram: Tensor, penalty: Tensor, right: Tensor) -> Tensor:
    """Solve (G_p + diag(d_pi)) x_pi = r_pi. It stores the matrices of all rows.

    gram: (P, K, K) the matrices G_p
    penalty, right: (P, R, K) the rows d_pi and r_pi

    Returns (P, R, K).
    """
    matrices = gram[:, None] + torch.diag_embed(penalty)
    return torch.linalg.solve(matrices, right[..., None])[..., 0]


def inverse_factors(panel: Tensor) -> Tensor:
    """The inverses of the Cholesky factors of the first rows of a panel: (N, at least S, S) → (N, S, S).

    NaN for matrices that are not positive definite.
    """
    size = panel.shape[2]
    factors, failed = torch.linalg.cholesky_ex(panel[:, :size])
    identity = torch.eye(size, dtype=panel.dtype, device=panel.device)
    inverses = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False)
    return torch.where((failed > 0)[:, None, None], torch.nan, inverses)
