"""Wrong extents of meshes, which nothing checks on a GPU: kernels read and write no rows outside of their tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_accuracy import normal
from torch import Tensor

pytest.importorskip("triton")

from diffnet.ops import Pattern
from diffnet.ops.gradient_features import kernels as gradient_features
from diffnet.ops.gradient_features.coefficient_kernels import table
from diffnet.ops.implicit.kernels import iteration
from diffnet.ops.implicit.reference import System
from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients
from diffnet.ops.sparse.pattern import csr_arrays
from diffnet.ops.spectral import kernels as spectral
from diffnet.ops.spectral.diffusion_kernels import sum_and_diffuse

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, C = 40, 16  # as many eigenpairs as channels, so that one launch computes weight gradients and a projection
BORDER = 100  # rows
EXTENTS = ([0, V + 90], [0, 7, V + 90], [-90, 7, V], [0, V + 30, V + 60, V], [0, 30, 10, V], [V + 20, V, 5, -20])


def bordered(dtype: torch.dtype, *shape: int) -> Tensor:
    """The rows of a (…, V, C) tensor in the middle of a larger one, whose other rows are NaN."""
    wide = torch.full((*shape[:-1], V + 2 * BORDER, shape[-1]), float("nan"), device=DEVICE, dtype=dtype)
    inner = wide[..., BORDER : BORDER + V, :]
    return inner.copy_(normal(*inner.shape))


def project(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x, evecs, mass = bordered(dtype, C), bordered(dtype, C), bordered(torch.float32, 1)[:, 0].fill_(1)
    ones = torch.ones(len(ptr) - 1, C, device=DEVICE)
    spectrum = sum_and_diffuse(*spectral.project_spans(x, evecs, mass, ptr), ptr, ones, ones[0])
    return [spectral.project(x, evecs, mass, ptr), *spectrum]


def evaluate(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    coefficients = torch.ones(len(ptr) - 1, C, C, device=DEVICE)
    return [spectral.evaluate(coefficients, bordered(dtype, C), None, ptr, added=bordered(dtype, C))]


def features(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    a, d = torch.eye(C, device=DEVICE), torch.ones(len(ptr) - 1, C, C, device=DEVICE)
    x, evecs, gradients = bordered(dtype, C), bordered(dtype, C), bordered(dtype, 2, C)
    coefficients = table(d, a, a, evecs)
    sums = gradient_features.backward(x, coefficients, gradients, ptr, values_grad=x, evecs=evecs)
    return [sums, *gradient_features.forward(coefficients, evecs, gradients, ptr)]


def weights(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = bordered(dtype, C)
    found = weight_gradients([x], [], [x], projection=Projection(x, x, ptr))
    return [*found.weights, *([] if found.projected is None else [found.projected[0]])]


def solve(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    indices = torch.arange(V, dtype=torch.int32, device=DEVICE)
    pattern = Pattern.from_row_lengths(torch.ones_like(indices), indices, V)
    ones = bordered(torch.float32, 1)[:, 0].fill_(1)
    system = System(csr_arrays(pattern, True), ones, ones, ones, torch.ones(C, device=DEVICE), ptr)
    u, r, p = (bordered(torch.float32, C) for _ in range(3))
    left = torch.ones(len(ptr) - 1, C, device=DEVICE)  # is below the bound, so all steps have length 0
    iteration(system, u, r, p, torch.full_like(left, torch.inf))(left)
    return [u, r, p]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The memory before and after each tensor that is made empty. The memory and the tensor hold zeros."""
    around: list[Tensor] = []

    def guard(tensor: Tensor) -> Tensor:
        size, border = tensor.numel(), 2 * BORDER * C
        memory = torch.zeros(size + 2 * border, dtype=tensor.dtype, device=tensor.device)
        around.extend((memory[:border], memory[border + size :]))
        return memory[border : border + size].view(tensor.shape)

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, original=original, **k: guard(original(*a, **k)))
    return around


@pytest.mark.parametrize(
    ("run", "dtype"),
    [(run, torch.float32) for run in (project, evaluate, features, solve)]
    + [(run, torch.float16) for run in (features, weights)],
)
def test_no_row_outside(
    run: Callable[[Tensor, torch.dtype], list[Tensor]], dtype: torch.dtype, guarded: list[Tensor]
) -> None:
    for extents in EXTENTS:
        for out in run(torch.tensor(extents, device=DEVICE), dtype):
            assert out.isfinite().all(), extents
    assert len(guarded) > 0
    assert not any(memory.any() for memory in guarded)
