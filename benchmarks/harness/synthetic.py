"""Operators of any size with random values."""

from __future__ import annotations

import torch

from diffnet import Operators
from diffnet.geometry.operators import blank
from diffnet.ops import Pattern, SparseMatrix


def synthetic_operators(v: int, k: int, device: torch.device) -> Operators:
    """Operators of one mesh of v vertices with k eigenpairs, in float32, with the gradient on the basis.

    The gradient has 7 entries per row, the average of a triangle mesh. Its columns are at the distances of a grid that
    is numbered row by row.
    """
    side = max(2, round(v**0.5))
    steps = torch.tensor([-side - 1, -side, -1, 0, 1, side, side + 1], device=device)
    columns = torch.sort((torch.arange(v, device=device)[:, None] + steps) % v, dim=1).values
    pattern = Pattern(torch.arange(0, 7 * v + 1, 7, device=device), columns.flatten(), v)
    values = torch.randn(2, 7 * v, device=device)
    operators = blank(
        v,
        k,
        device,
        mass=torch.rand(v, device=device) / v,
        evals=torch.linspace(0, 100, k, device=device)[None],
        evecs=torch.randn(v, k, device=device),
        laplacian=SparseMatrix(pattern, values[0]),
        gradient=SparseMatrix(pattern, values),
        frames=torch.eye(3, device=device).expand(v, 3, 3),
    )
    assert operators.lengths == (v,)  # looked up once here, so that compiled and captured steps need not wait for it
    return operators.with_gradient_evecs()
