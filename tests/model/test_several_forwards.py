"""Several forward passes before one backward pass, as siamese networks and consistency losses need them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trimesh
from float64 import DEVICE

from diffnet import DiffusionNet, Operators, collate, precompute


@pytest.fixture(scope="module")
def operators() -> Operators:
    batch = collate([precompute(trimesh.creation.icosphere(0), k=8) for _ in range(2)])
    return batch.with_gradient_evecs().to(DEVICE)


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        pytest.param({}, "torch", id="spectral-torch"),
        pytest.param({}, "triton", id="spectral-triton"),
        pytest.param({"gradient": "sparse"}, "torch", id="sparse-gradient-torch"),
        pytest.param({"gradient": "sparse"}, "triton", id="sparse-gradient-triton"),
        pytest.param({"diffusion": "implicit"}, "torch", id="implicit-torch"),
        pytest.param({"diffusion": "implicit"}, "triton", id="implicit-triton", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_two_forwards_add_up(operators: Operators, options: dict[str, Any], backend: Any) -> None:
    """One backward of a sum of two losses gives the sum of the gradients of two backwards, in training mode."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=8, blocks=1, dropout=0.0, backend=backend, **options).to(DEVICE)
    x = torch.randn(operators.num_vertices, 3, device=DEVICE)
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.copy_(torch.linspace(-0.1, 0.1, 8))  # the first forward sets some times to 0
    (model(x, operators).mean() + model(x, operators).square().mean()).backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x, operators).mean().backward()
    model(x, operators).square().mean().backward()
    for grad, parameter in zip(together, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-6)
    assert all((block.diffusion.time >= 0).all() for block in model.blocks)


def test_two_compiled_forwards(operators: Operators) -> None:
    torch.manual_seed(0)
    model = DiffusionNet(3, 4, width=8, blocks=1, dropout=0.0, backend="torch").to(DEVICE)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(operators.num_vertices, 3, device=DEVICE)
    (compiled(x, operators).mean() + compiled(x, operators).square().mean()).backward()
    assert all(p.grad is not None for p in model.parameters())
