"""Inverse Cholesky factors of small matrices in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_factors(panel: Tensor) -> Tensor:
    """The inverses of the Cholesky factors of the first rows of a panel: (N, at least S, S) → (N, S, S).

    NaN for matrices that are not positive definite.
    """
    size = panel.shape[2]
    factors, failed = torch.linalg.cholesky_ex(panel[:, :size])
    identity = torch.eye(size, dtype=panel.dtype, device=panel.device)
    inverses = torch.linalg.solve_triangular(factors, identity.expand_as(factors), upper=False)
    return torch.where((failed > 0)[:, None, None], torch.nan, inverses)
