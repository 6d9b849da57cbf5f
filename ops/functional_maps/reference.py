"""Systems that differ in their diagonals, in plain PyTorch: the reference for `rows.solve_rows`."""

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
