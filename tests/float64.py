"""Comparison of an operation and its gradients with a reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from seeds import shifted
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shifted(seed)))


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖"""
    return float(torch.linalg.norm(a.double() - b) / torch.linalg.norm(b).clamp(min=1e-30))


def check(
    ours: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: list[Tensor],
    dtype: torch.dtype,
    device: str = DEVICE,
) -> None:
    """Compare the value and the gradient for every input with float64.

    The reference starts from the same rounded inputs, so only the arithmetic differs.
    """
    rounded = [x.to(dtype) for x in inputs]
    results = []
    for function, leaves in (
        (ours, [x.detach().to(device).requires_grad_() for x in rounded]),
        (reference, [x.detach().double().requires_grad_() for x in rounded]),
    ):
        out = function(*leaves)
        weights = random(*out.shape, seed=99).to(dtype).to(out)
        results.append([out.detach().cpu(), *(g.cpu() for g in torch.autograd.grad((out * weights).sum(), leaves))])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert a.dtype == dtype
        assert a.shape == b.shape
        error = relative(a, b)
        assert error <= TOLERANCE[dtype], ("value" if i == 0 else f"gradient {i - 1}", error)
