"""The update of Adam: its kernel against the plain form, and that one against PyTorch's optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from diffnet.ops.adam.kernels import BLOCK, GROUP, MAX_TENSORS, adam
from diffnet.ops.adam.reference import AdamOptions, AdamTensors, adam_reference

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (1,), (BLOCK,), (), (33, 2 * BLOCK + 7), (5, 0), (BLOCK + 1,), (3, 1))
DECAYS = pytest.mark.parametrize(
    ("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)], ids=["plain", "l2", "decoupled"]
)


def drawn(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]


def unaligned(x: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    return x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)


def doubled(tensors: AdamTensors) -> AdamTensors:
    return AdamTensors(*(x and [t.double() for t in x] for x in tensors))


@DECAYS
@pytest.mark.parametrize("averaged", [False, True], ids=["alone", "averaged"])
@pytest.mark.parametrize("count", [1, 8, 11, MAX_TENSORS + 2])  # parts of a group, whole groups, and two launches
@pytest.mark.parametrize("device", DEVICES)
def test_kernel(device: str, count: int, averaged: bool, weight_decay: float, decoupled: bool) -> None:
    torch.manual_seed(0)
    assert count != 8 or count == GROUP.value
    shapes = ((BLOCK + 3,), *SHAPES, *[(2,)] * MAX_TENSORS)[:count]
    values = [drawn(shapes, torch.float32, device) for _ in range(4)]
    steps = [torch.tensor(float(10 ** (i % 6) - 1), device=device) for i in range(count)]  # from 0 to 99,999
    squares = [x.square() for x in values[2]]
    found = AdamTensors(values[0], [], values[1], squares, steps, values[3] if averaged else None)
    exact = doubled(found)
    options = AdamOptions((0.9, 0.999), 1e-8, weight_decay, decoupled, 0.99)
    rate = torch.tensor(1e-2, device=device)
    for i in range(3):
        grads = drawn(shapes, torch.float32, device)
        adam(found._replace(grads=[unaligned(g) for g in grads] if i == 1 else grads), rate, options)
        adam_reference(exact._replace(grads=[g.double() for g in grads]), rate.double(), options)
    for some, those in zip(found, exact, strict=True):
        expected = those and [x.float() for x in those]
        torch.testing.assert_close(some, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.0), (0.5, 0.99999)], ids=str)
def test_first_updates(betas: tuple[float, float], device: str) -> None:
    """Bias corrections are small there. Gradients have one sign, so nothing cancels."""
    torch.manual_seed(0)
    zeros = [[torch.zeros((), device=device)] for _ in range(4)]
    found = AdamTensors(zeros[0], [], zeros[1], zeros[2], zeros[3])
    exact = doubled(found)
    options, rate = AdamOptions(betas, 1e-8, 0.0, False), torch.tensor(1e-3, device=device)
    for _ in range(12):
        grad = torch.rand((), device=device) + 0.1
        adam(found._replace(grads=[grad]), rate, options)
        adam_reference(exact._replace(grads=[grad.double()]), rate.double(), options)
        for x, y in zip(found[:1] + found[2:4], exact[:1] + exact[2:4], strict=True):
            torch.testing.assert_close(x[0].double(), y[0], rtol=2e-6, atol=0)


@DECAYS
def test_reference(weight_decay: float, decoupled: bool) -> None:
    torch.manual_seed(0)
    weights = [x.requires_grad_() for x in drawn(SHAPES, torch.float64, "cpu")]
    options = {"lr": 1e-2, "weight_decay": weight_decay, "fused": False, "foreach": False}
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)(weights, **options)
    parameters = [x.detach().clone() for x in weights]
    means, squares, averages = ([torch.zeros_like(x) for x in parameters] for _ in range(3))
    steps = [x.new_zeros(()) for x in parameters]
    average = [torch.zeros_like(x) for x in parameters]
    for _ in range(3):
        grads = drawn(SHAPES, torch.float64, "cpu")
        for p, grad in zip(weights, grads, strict=True):
            p.grad = grad
        optimizer.step()
        tensors = AdamTensors(parameters, grads, means, squares, steps, averages)
        rate = torch.tensor(1e-2, dtype=torch.float64)
        adam_reference(tensors, rate, AdamOptions((0.9, 0.999), 1e-8, weight_decay, decoupled, 0.75))
        average = [0.75 * a + 0.25 * w.detach() for a, w in zip(average, weights, strict=True)]
    torch.testing.assert_close([*parameters, *averages], [*(w.detach() for w in weights), *average])
    torch.testing.assert_close(squares, [optimizer.state[w]["exp_avg_sq"] for w in weights])


def test_updates_count_as_changes() -> None:
    """Autograd refuses to differentiate by values from before, as after a step of PyTorch."""
    weight = torch.ones(3, requires_grad=True)
    out = (weight * weight).sum()
    zeros = [[torch.zeros(3)] for _ in range(3)]
    tensors = AdamTensors([weight], zeros[0], zeros[1], zeros[2], [torch.zeros(())])
    adam(tensors, torch.tensor(1e-3), AdamOptions((0.9, 0.999), 1e-8, 0.1, True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
