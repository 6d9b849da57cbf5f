"""`to_spectral`, `from_spectral` and `diffuse`: formulas in float64, and kernels against plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_accuracy import Place, check, normal, pointer, relative, sizes, spectral_inputs
from refusals import refused
from torch import Tensor

from diffnet.ops import diffuse, from_spectral, row_offsets, segment_mean, to_spectral

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

LENGTHS = (7, 0, 1, 12)
K, C = 5, 3


def block_diagonal(evecs: Tensor) -> Tensor:
    return torch.block_diag(*evecs.split(LENGTHS))


def test_to_and_from_spectral_are_products_with_block_diagonal_evecs() -> None:
    x, evecs, mass, ptr = spectral_inputs(LENGTHS, K, C)
    spectrum = to_spectral(x, evecs, mass, ptr)
    expected = block_diagonal(evecs).T @ (mass[:, None] * x)
    torch.testing.assert_close(spectrum, expected.reshape(len(LENGTHS), K, C))
    torch.testing.assert_close(from_spectral(spectrum, evecs, ptr), block_diagonal(evecs) @ expected)
    torch.testing.assert_close(to_spectral(x, evecs, mass, ptr, LENGTHS), spectrum)


def test_diffuse_decays_each_coefficient() -> None:
    spectrum, evals, time = normal(4, K, C), normal(4, K).abs(), normal(C).abs()
    out = diffuse(spectrum, evals, time)
    for b in range(4):
        for c in range(C):
            torch.testing.assert_close(out[b, :, c], torch.exp(-evals[b] * time[c]) * spectrum[b, :, c])


def test_to_spectral(place: Place) -> None:
    for lengths, k, c in [*sizes(place), ((150,), 3, 2)]:  # the last has several spans of several tiles each

        def draw() -> list[Tensor | None]:
            x, evecs, mass, ptr = spectral_inputs(lengths, k, c)  # noqa: B023
            mass = 100 * mass if place.dtype == torch.float16 else mass  # float16 itself would round small masses
            return [x, evecs, mass, ptr, None]

        # The gradient of the mass is computed from rounded results.
        check(place, to_spectral, draw, [(len(lengths), k, c)], disturbance=1 / 8)


def test_from_spectral(place: Place) -> None:
    for lengths, k, c in sizes(place):

        def draw() -> list[Tensor | None]:
            _, evecs, _, ptr = spectral_inputs(lengths, k, c)  # noqa: B023
            return [normal(len(lengths), k, c), evecs, ptr, None]  # noqa: B023

        check(place, from_spectral, draw, [(sum(lengths), c)])


def test_diffuse(place: Place) -> None:
    for lengths, k, c in sizes(place):
        shape = len(lengths), k, c

        def draw() -> list[Tensor]:
            return [normal(*shape), normal(*shape[:2]).abs(), normal(*shape[2:]).abs()]  # noqa: B023

        check(place, diffuse, draw, [shape])


def test_every_part_of_the_sum_is_there(place: Place) -> None:
    """Sums of ones change if a kernel leaves out or repeats any part: spans, tiles of K, tiles of C."""
    v, k, c = (100, 20, 18) if place.device == "cpu" else (50_000, 300, 200)
    x, evecs, mass = (place.put(torch.ones(*shape)) for shape in ((v, c), (v, k), (v,)))
    out = to_spectral(x, evecs, mass, pointer((v,)).to(place.device), backend="triton")
    assert (out == v).all(), out.unique()
    values = from_spectral(torch.ones_like(out), evecs, pointer((v,)).to(place.device), backend="triton")
    assert (values == k).all(), values.unique()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_areas_that_float16_cannot_hold(device: str) -> None:
    """A mesh of 10⁵ vertices and area 1e-2 has such areas. Without a scale they would round to 0."""
    v = 60
    x, evecs = normal(v, 5).half().to(device), normal(v, 4).half().to(device)
    mass, ptr = torch.full((v,), 1e-7, device=device), pointer((v,)).to(device)
    expected = to_spectral(x.double(), evecs.double(), mass.double(), ptr)
    for backend in ("torch", "triton"):
        assert relative(to_spectral(x, evecs, mass, ptr, backend=backend), expected) < 1e-2, backend


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_that_are_not_finite_stay_in_their_mesh(dtype: torch.dtype) -> None:
    x, evecs, mass, ptr = (t.to(dtype) if t.is_floating_point() else t for t in spectral_inputs((9, 12), 5, 3))
    mass[3] = float("nan")
    for backend in ("torch", "triton"):
        out = to_spectral(x, evecs, mass, ptr, backend=backend)
        assert out[0].isnan().all(), backend
        assert out[1].isfinite().all(), backend


def test_projections_can_be_differentiated_twice() -> None:
    ptr = pointer((9, 0, 8))
    inputs = [normal(17, 5).float(), normal(17, 3).float(), normal(17).abs().float()]

    def second(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out = to_spectral(*leaves, ptr, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))

    for a, b in zip(second("triton", torch.float32), second("torch", torch.float64), strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("c", [36, 200])
def test_to_spectral_of_large_meshes(c: int) -> None:
    """Large meshes have tiles of their own."""
    x, evecs, mass, ptr = spectral_inputs((300_007, 0, 200_001), 100, c)
    x, evecs, mass = (t.to("cuda", torch.bfloat16) for t in (x, evecs, mass))
    spectrum = to_spectral(x, evecs, mass, ptr.cuda(), backend="triton")
    expected = to_spectral(x.double(), evecs.double(), mass.double(), ptr.cuda(), backend="torch")
    assert relative(spectrum, expected.cpu()) <= 1e-2


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """V·C and V·K are 2.2e9 elements. Rows at the end are as right as rows at the start."""
    v, k, c, tail = 17_000_000, 128, 128, 1000
    x = torch.zeros(v, c, device="cuda", dtype=torch.bfloat16)
    evecs = torch.zeros(v, k, device="cuda", dtype=torch.bfloat16)
    x[-tail:].normal_()
    evecs[-tail:].normal_()
    ptr, mass = torch.tensor([0, v], device="cuda"), torch.ones(v, device="cuda")
    spectrum = to_spectral(x, evecs, mass, ptr, backend="triton")
    expected = evecs[-tail:].double().T @ x[-tail:].double()
    assert relative(spectrum[0], expected.cpu()) < 1e-2
    out = from_spectral(spectrum, evecs, ptr, backend="triton")
    assert relative(out[-tail:], (evecs[-tail:].double() @ expected).cpu()) < 1e-2
    assert (out[:-tail] == 0).all()


def test_segment_mean() -> None:
    x, weights, ptr = normal(20, C), normal(20).abs(), pointer(LENGTHS)
    out = segment_mean(x, weights, ptr)
    for b, (lo, hi) in enumerate(pairwise(ptr.tolist())):
        expected = np.average(x[lo:hi], weights=weights[lo:hi], axis=0) if hi > lo else np.zeros(C)
        np.testing.assert_allclose(out[b], expected)
    torch.testing.assert_close(segment_mean(x, weights, ptr, LENGTHS), out)
    assert (segment_mean(x, torch.zeros(20), ptr) == 0).all()


def test_segment_mean_compiles_with_trained_weights() -> None:
    ptr, leaves, results = pointer(LENGTHS), [normal(20, C).requires_grad_(), normal(20).abs().requires_grad_()], []
    for function in (segment_mean, torch.compile(segment_mean, fullgraph=True, backend="aot_eager")):
        out = function(*leaves, ptr)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


def test_row_offsets_take_integers() -> None:
    assert row_offsets([3, 0, 2]) == [0, 3, 3]
    for wrong in ([1.0, 2.0], "302", [[3, 0]]):
        refused(TypeError, "lengths should be integers", row_offsets, wrong)
