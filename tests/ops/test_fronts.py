"""Solves with fronts: the kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from diffnet.ops.fronts import reference
from diffnet.ops.fronts.reference import FrontLevel

pytest.importorskip("triton")

from diffnet.ops.fronts import kernels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def level(width: int, height: int, rows: int, vertices: int) -> FrontLevel:
    """Fronts of all sizes up to width and height, with children in some places. Their own vertices come first."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.cartesian_prod(torch.tensor([1, width // 2, width]), torch.tensor([0, height // 2, height])).int()
    fronts = len(sizes)
    own = torch.arange(fronts * width).view(fronts, width)
    border = torch.randint(fronts * width, vertices, (fronts, height), generator=random)
    child_rows = torch.randint(-1, rows, (2, fronts, width + height), generator=random)
    inside = torch.arange(width) < sizes[:, :1], torch.arange(height) < sizes[:, 1:]
    child_rows[:, ~torch.cat(inside, 1)] = -1
    inverse = torch.randn(fronts, width, width, generator=random, dtype=torch.float64)
    inverse = torch.where(inside[0][:, :, None] & inside[0][:, None, :], inverse, torch.eye(width))
    coupling = torch.randn(fronts, height, width, generator=random, dtype=torch.float64)
    coupling = torch.where(inside[1][:, :, None] & inside[0][:, None, :], coupling, 0)
    own, border, child_rows = (t.int() for t in (own, border, child_rows))
    return FrontLevel(own, border, *sizes.T.contiguous(), child_rows, inverse, coupling)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "height", "count"), [(2, 2, 8), (21, 40, 8), (40, 17, 3)])
def test_against_the_reference(width: int, height: int, count: int, device: str) -> None:
    fronts = FrontLevel(*(tensor.to(device) for tensor in level(width, height, 50, 9 * width + 30)))
    right = torch.randn(9 * width + 30, count, dtype=torch.float64, device=device)
    updates = torch.randn(50, count, dtype=torch.float64, device=device)
    collected, passed = kernels.forward(fronts, right, updates)
    own, up = reference.forward(fronts, right, updates)
    filled = torch.arange(width, device=device) < fronts.own_size[:, None]
    torch.testing.assert_close(collected[filled], own[filled], rtol=1e-12, atol=1e-12)
    filled = (torch.arange(height, device=device) < fronts.border_size[:, None]).flatten()
    torch.testing.assert_close(passed[filled], up[filled], rtol=1e-12, atol=1e-12)

    x, expected = right.clone(), right.clone()
    kernels.backward(fronts, collected, x)
    reference.backward(fronts, own, expected)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
