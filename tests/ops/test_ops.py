"""The dense operations of a block together: derivatives in float64, agreement on a GPU, means and offsets of meshes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_accuracy import feature_inputs, normal, pointer
from torch import Tensor

from diffnet.ops import (
    SparseMatrix,
    diffuse,
    from_spectral,
    gradient_features,
    row_offsets,
    segment_mean,
    spectral_gradient_features,
    spmm,
    to_spectral,
)

LENGTHS = (7, 0, 1, 12)
K, C = 5, 3


def test_segment_mean() -> None:
    x, weights, ptr = normal(20, C), normal(20).abs(), pointer(LENGTHS)
    out = segment_mean(x, weights, ptr)
    for b, (lo, hi) in enumerate(pairwise(ptr.tolist())):
        expected = np.average(x[lo:hi], weights=weights[lo:hi], axis=0) if hi > lo else np.zeros(C)
        np.testing.assert_allclose(out[b], expected)
    torch.testing.assert_close(segment_mean(x, weights, ptr, LENGTHS), out)
    assert (segment_mean(x, torch.zeros(20), ptr) == 0).all()


def test_derivatives_are_difference_quotients() -> None:
    _, evecs, gradient_evecs, a_re, a_im, ptr = feature_inputs(LENGTHS, K, C)
    x, mass = normal(20, C), normal(20).abs()
    evals, time = normal(4, K).abs(), normal(C).abs()
    leaves = [t.requires_grad_() for t in (x, evecs, mass, evals, time, gradient_evecs, a_re, a_im)]

    def block(*inputs: Tensor) -> Tensor:
        x, evecs, mass, evals, time, gradient_evecs, a_re, a_im = inputs
        d = diffuse(to_spectral(x, evecs, mass, ptr), evals, time)
        features = spectral_gradient_features(d, gradient_evecs, a_re, a_im, ptr)
        return segment_mean(from_spectral(d, evecs, ptr) + features, mass, ptr)

    assert torch.autograd.gradcheck(block, leaves)


@pytest.mark.gpu
def test_plain_operations_agree_on_a_gpu() -> None:
    dense = normal(2, 20, 20) * (normal(20, 20) > 0.5)
    pattern = SparseMatrix.from_torch((dense[0] != 0).double().to_sparse_csr()).pattern
    sampled = dense[:, pattern.row_indices, pattern.column_indices]
    x, evecs, mass, evals = normal(20, C), normal(20, K), normal(20).abs(), normal(4, K).abs()
    time, a_re, a_im, ptr = normal(C).abs(), normal(C, C), normal(C, C), pointer(LENGTHS)

    def block(device: str) -> list[Tensor]:
        inputs = [t.to(device).requires_grad_() for t in (x, evecs, mass, evals, time, a_re, a_im, sampled)]
        x_, evecs_, mass_, evals_, time_, a_re_, a_im_, values = inputs
        p = ptr.to(device)
        diffused = from_spectral(diffuse(to_spectral(x_, evecs_, mass_, p), evals_, time_), evecs_, p)
        out = gradient_features(spmm(pattern.to(device), values, diffused), a_re_, a_im_)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    for a, b in zip(block("cpu"), block("cuda"), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-10, atol=1e-12)


def test_row_offsets_take_integers() -> None:
    assert row_offsets([3, 0, 2]) == [0, 3, 3]
    for wrong in ([1.0, 2.0], "302", [[3, 0]]):
        with pytest.raises(TypeError, match="lengths should be integers"):
            row_offsets(wrong)
