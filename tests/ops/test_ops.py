"""The operations of a block against formulas written out, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from diffnet.ops import (
    SparseMatrix,
    diffuse,
    from_spectral,
    gradient_features,
    segment_mean,
    spectral_gradient_features,
    spmm,
    to_spectral,
)

LENGTHS = (7, 0, 1, 12)  # one mesh is empty
K, C = 5, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ptr() -> Tensor:
    return torch.tensor([0, *np.cumsum(LENGTHS)])


def dense(ptr: Tensor, evecs: Tensor) -> Tensor:
    """Φ as one block-diagonal matrix (V, B·K)."""
    meshes = evecs.split(torch.diff(ptr).tolist())
    return torch.block_diag(*meshes)


def test_to_and_from_spectral(ptr: Tensor) -> None:
    x, evecs, mass = random(20, C), random(20, K, seed=1), random(20, seed=2).abs()
    spectrum = to_spectral(x, evecs, mass, ptr)
    expected = dense(ptr, evecs).T @ (mass[:, None] * x)
    torch.testing.assert_close(spectrum, expected.reshape(len(LENGTHS), K, C))
    torch.testing.assert_close(from_spectral(spectrum, evecs, ptr), dense(ptr, evecs) @ expected)
    torch.testing.assert_close(to_spectral(x, evecs, mass, ptr, LENGTHS), spectrum)


def test_one_mesh_is_a_batch_of_one() -> None:
    x, evecs, mass, ptr = random(7, C), random(7, K, seed=1), random(7, seed=2).abs(), torch.tensor([0, 7])
    spectrum = to_spectral(x, evecs, mass, ptr)
    torch.testing.assert_close(spectrum[0], evecs.T @ torch.diag(mass) @ x)
    torch.testing.assert_close(from_spectral(spectrum, evecs, ptr), evecs @ spectrum[0])


def test_diffuse() -> None:
    spectrum, evals, time = random(4, K, C), random(4, K, seed=1).abs(), random(C, seed=2).abs()
    out = diffuse(spectrum, evals, time)
    for b in range(4):
        for c in range(C):
            torch.testing.assert_close(out[b, :, c], torch.exp(-evals[b] * time[c]) * spectrum[b, :, c])


@pytest.mark.parametrize("rotation", [True, False])
def test_gradient_features(rotation: bool) -> None:
    """Complex arithmetic says the same as the real formulas."""
    g = random(2, 20, C)
    a_re, a_im = random(C, C, seed=1), random(C, C, seed=2) if rotation else None
    z = torch.complex(g[0], g[1])
    a = torch.complex(a_re, a_im if a_im is not None else torch.zeros_like(a_re))
    expected = torch.tanh((z.conj() * (z @ a.T)).real)
    torch.testing.assert_close(gradient_features(g, a_re, a_im), expected)


def test_gradient_features_of_large_gradients_are_finite() -> None:
    g = 1e4 * random(2, 20, C).float()
    out = gradient_features(g, torch.eye(C), torch.zeros(C, C))
    torch.testing.assert_close(out, torch.ones(20, C))


def test_spectral_gradient_features(ptr: Tensor) -> None:
    """(GΦ) D is G (Φ D)."""
    coefficients, pushed = random(len(LENGTHS), K, C), random(2, 20, K, seed=1)
    a_re, a_im = random(C, C, seed=2), random(C, C, seed=3)
    gradients = torch.stack([dense(ptr, g) @ coefficients.reshape(-1, C) for g in pushed])
    out = spectral_gradient_features(coefficients, pushed, a_re, a_im, ptr)
    torch.testing.assert_close(out, gradient_features(gradients, a_re, a_im))


def test_segment_mean(ptr: Tensor) -> None:
    x, weights = random(20, C), random(20, seed=1).abs()
    out = segment_mean(x, weights, ptr)
    for b, (lo, hi) in enumerate(zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)):
        expected = np.average(x[lo:hi], weights=weights[lo:hi], axis=0) if hi > lo else np.zeros(C)
        np.testing.assert_allclose(out[b], expected)


def test_every_operation_is_differentiable(ptr: Tensor) -> None:
    def leaf(*shape: int, seed: int) -> Tensor:
        return random(*shape, seed=seed).abs().requires_grad_()

    x, evecs, mass, evals = leaf(20, C, seed=0), leaf(20, K, seed=1), leaf(20, seed=2), leaf(4, K, seed=3)
    time, pushed, a_re, a_im = leaf(C, seed=4), leaf(2, 20, K, seed=5), leaf(C, C, seed=6), leaf(C, C, seed=7)

    def block(*inputs: Tensor) -> Tensor:
        x, evecs, mass, evals, time, pushed, a_re, a_im = inputs
        d = diffuse(to_spectral(x, evecs, mass, ptr), evals, time)
        features = spectral_gradient_features(d, pushed, a_re, a_im, ptr)
        return segment_mean(from_spectral(d, evecs, ptr) + features, mass, ptr)

    assert torch.autograd.gradcheck(block, (x, evecs, mass, evals, time, pushed, a_re, a_im))


@pytest.mark.gpu
def test_operations_agree_on_the_gpu(ptr: Tensor) -> None:
    dense = random(2, 20, 20, seed=8) * (random(20, 20, seed=9) > 0.5)
    pattern = SparseMatrix.from_torch((dense[0] != 0).double().to_sparse_csr()).pattern
    sampled = dense[:, pattern.row_indices, pattern.indices]
    x, evecs, mass, evals = random(20, C), random(20, K, seed=1), random(20, seed=2).abs(), random(4, K, seed=3).abs()
    time, a_re, a_im = random(C, seed=4).abs(), random(C, C, seed=6), random(C, C, seed=7)

    def block(device: str) -> list[Tensor]:
        inputs = [t.to(device).requires_grad_() for t in (x, evecs, mass, evals, time, a_re, a_im, sampled)]
        x_, evecs_, mass_, evals_, time_, a_re_, a_im_, values = inputs
        p = ptr.to(device)
        diffused = from_spectral(diffuse(to_spectral(x_, evecs_, mass_, p), evals_, time_), evecs_, p)
        out = gradient_features(spmm(pattern.to(device), values, diffused), a_re_, a_im_)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    for a, b in zip(block("cpu"), block("cuda"), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-10, atol=1e-12)
