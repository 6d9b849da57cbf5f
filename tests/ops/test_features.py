"""Gradient features, alone and with diffusion: formulas in float64, kernels against plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kernel_accuracy import Place, at_places, check, feature_inputs, normal, pointer, single_vertex_disturbance, sizes
from refusals import refused
from torch import Tensor

from diffnet.ops import (
    diffuse,
    diffusion_and_gradient_features,
    from_spectral,
    gradient_features,
    spectral_gradient_features,
    to_spectral,
    values_and_gradient_features,
)
from diffnet.ops.common import checks
from diffnet.ops.definition import BlockArguments
from diffnet.ops.diffusion_features.op import check_arguments, diffused_with_features

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

ROTATIONS = {"rotation": True, "no-rotation": False, "swapped": "swapped"}
EACH_ROTATION = at_places("rotation", ROTATIONS, ["rotation"])


@pytest.mark.parametrize("rotation", ROTATIONS.values(), ids=ROTATIONS)
def test_formula_in_complex_numbers(rotation: bool | str) -> None:
    g, a_re, a_im = normal(2, 20, 3), normal(3, 3), normal(3, 3) if rotation else None
    if rotation == "swapped":
        assert a_im is not None
        re, im = g[0] @ a_re.T, g[1] @ a_im.T
        expected = torch.tanh(g[0] * (re - im) + g[1] * (re + im))
        torch.testing.assert_close(gradient_features(g, a_re, a_im, swapped=True), expected)
        return
    z = torch.complex(g[0], g[1])
    a = torch.complex(a_re, a_im if a_im is not None else torch.zeros_like(a_re))
    expected = torch.tanh((z.conj() * (z @ a.T)).real)
    torch.testing.assert_close(gradient_features(g, a_re, a_im), expected)


def test_gradients_in_the_eigenbasis_are_gradients_of_values() -> None:
    """(GΦ) D is G (Φ D)."""
    coefficients, evecs, gradient_evecs, a_re, a_im, ptr = feature_inputs((7, 0, 1, 12), 5, 3)
    gradients = torch.stack([from_spectral(coefficients, g, ptr) for g in gradient_evecs])
    expected = gradient_features(gradients, a_re, a_im)
    torch.testing.assert_close(spectral_gradient_features(coefficients, gradient_evecs, a_re, a_im, ptr), expected)
    values, features = values_and_gradient_features(coefficients, evecs, gradient_evecs, a_re, a_im, ptr)
    torch.testing.assert_close(values, from_spectral(coefficients, evecs, ptr))
    torch.testing.assert_close(features, expected)


@EACH_ROTATION
@pytest.mark.parametrize("values", [True, False], ids=["values", "features"])
def test_features_in_the_eigenbasis(place: Place, rotation: bool | str, values: bool) -> None:
    """The basis is constant: where it needs gradients, kernels don't compute."""
    swapped = rotation == "swapped"

    def operation(d: Tensor, a_re: Tensor, a_im: Tensor | None, ptr: Tensor, *basis: Tensor, backend: Any) -> Any:
        if values:
            return values_and_gradient_features(d, *basis, a_re, a_im, ptr, backend=backend, swapped=swapped)
        return spectral_gradient_features(d, basis[1], a_re, a_im, ptr, backend=backend, swapped=swapped)

    cases = sizes(place)
    if not values:
        cases = cases[-1:] if place.device == "cpu" else cases[:3]
    for lengths, k, c in cases:

        def draw() -> list[Tensor | None]:
            d, evecs, gradient_evecs, *rest = feature_inputs(lengths, k, c, bool(rotation))  # noqa: B023
            return [d, *rest, evecs, gradient_evecs]

        disturbance = single_vertex_disturbance(lengths)
        check(place, operation, draw, [(sum(lengths), c)] * (1 + values), 2, disturbance)


@EACH_ROTATION
def test_gradient_features(place: Place, rotation: bool | str) -> None:
    operation = partial(gradient_features, swapped=rotation == "swapped")
    for lengths, _, c in sizes(place):
        shape = sum(lengths), c

        def draw() -> list[Tensor | None]:
            c = shape[1]  # noqa: B023
            gradients = normal(2, *shape, scale=c**-0.25)  # noqa: B023
            return [gradients, normal(c, c), normal(c, c) if rotation else None]

        check(place, operation, draw, [shape])


def test_swapped_features_need_rotations() -> None:
    d, _, gradient_evecs, a_re, _, ptr = feature_inputs((5,), 3, 4)
    for operation, arguments in (
        (gradient_features, (normal(2, 3, 4), a_re, None)),
        (spectral_gradient_features, (d, gradient_evecs, a_re, None, ptr)),
    ):
        refused(ValueError, "swapped gradient features need a_im", operation, *arguments, swapped=True)


def test_every_part_of_the_sum_is_there(place: Place) -> None:
    """Sums of ones change if a kernel leaves out or repeats any part: spans, tiles of K, tiles of C.

    With D constant, g = 1 and A = 0, the features are 0 and every entry of dA counts the vertices.
    """
    v, k, c = (60, 17, 17) if place.device == "cpu" else (50_000, 300, 200)
    ptr, ones = pointer((v,)).to(place.device), place.put(torch.ones(v, k))
    d = torch.full((1, k, c), 1 / k, device=place.device)
    gradient_evecs = torch.stack([ones, torch.zeros_like(ones)])
    a_re = torch.zeros(c, c, device=place.device, requires_grad=True)
    spectral_gradient_features(d, gradient_evecs, a_re, None, ptr, backend="triton").sum().backward()
    bound = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}[place.dtype]
    assert a_re.grad is not None
    torch.testing.assert_close(a_re.grad, torch.full_like(a_re, v), rtol=max(bound, place.bound), atol=0)


def test_weight_gradients_are_not_transposed(place: Place) -> None:
    """A gradient of A with few nonzero entries shows where they stand."""
    ptr = pointer((1,)).to(place.device)
    d = torch.zeros(1, 1, 4)
    d[0, 0, 1], d[0, 0, 2] = 0.5, 2.0  # the gradient is 0 in channels 0 and 3
    gradient_evecs = torch.tensor([[[1.0]], [[0.0]]])
    a_re = torch.zeros(4, 4, device=place.device, dtype=place.dtype, requires_grad=True)
    f = spectral_gradient_features(place.put(d), place.put(gradient_evecs), a_re, None, ptr, backend="triton")
    (grad,) = torch.autograd.grad(f[0, 1], a_re)  # f₁ = tanh(g₁ Σⱼ A₁ⱼ gⱼ), so dA₁ⱼ = g₁ gⱼ
    expected = torch.zeros(4, 4)
    expected[1, 1], expected[1, 2] = 0.25, 1.0
    torch.testing.assert_close(grad.cpu().float(), expected, rtol=place.bound, atol=0)


@pytest.mark.parametrize("size", [45.0, 1e4])
def test_features_of_large_gradients_are_finite(place: Place, size: float) -> None:
    """(e²ᶻ − 1)/(e²ᶻ + 1) is NaN from z ≈ 45. Here z = ± size."""
    ptr = pointer((1,)).to(place.device)
    a = place.put(torch.diag(torch.tensor([1.0, -1.0]))).requires_grad_()
    gradient = place.put(torch.tensor([[[size**0.5]], [[0.0]]]))
    d = place.put(torch.ones(1, 1, 2)).requires_grad_()
    for backend in ("torch", "triton"):
        in_basis = spectral_gradient_features(d, gradient, a, None, ptr, backend=backend)
        direct = gradient_features(gradient.expand(2, 1, 2), a, None, backend=backend)
        for f in (in_basis, direct):
            torch.testing.assert_close(f.cpu().float(), torch.tensor([[1.0, -1.0]]))
            grads = torch.autograd.grad(f.sum(), (d, a), allow_unused=True)
            assert all(g is None or g.isfinite().all() for g in grads)


def test_tanh_of_small_arguments_keeps_its_digits() -> None:
    """1 − e⁻²ᶻ has lost all digits at z = 1e-7."""
    z = torch.tensor([1e-12, 1e-7, 1e-4, 0.01, 0.2, 0.249, 0.251, 0.5, 3.0])
    root = z.sqrt()
    gradients = torch.stack([root, torch.zeros_like(root)])[:, :, None]
    f = gradient_features(gradients, torch.ones(1, 1), None, backend="triton")
    expected = torch.tanh(root.double() ** 2)
    torch.testing.assert_close(f[:, 0].double() / expected, torch.ones_like(expected), rtol=0, atol=1e-6)


def test_sums_are_the_same_in_every_run(any_place: Place) -> None:
    lengths = (21, 0, 19) if any_place.device == "cpu" else (50_000, 0, 20_001)
    *leaves, ptr = (any_place.put(t) for t in feature_inputs(lengths, 17, 3))
    for leaf in leaves:
        leaf.requires_grad_()
    outs = values_and_gradient_features(*leaves, ptr, backend="triton")
    grads = [normal(sum(lengths), 3).to(out) for out in outs]
    first, second = (torch.autograd.grad(outs, leaves, grads, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def all_inputs(lengths: tuple[int, ...], k: int, c: int) -> list[Tensor]:
    """x, mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr"""
    _, evecs, gradient_evecs, a_re, a_im, ptr = feature_inputs(lengths, k, c)
    v = sum(lengths)
    mass, evals = normal(v).abs() * v**-0.5, normal(len(lengths), k).abs()
    return [normal(v, c), mass, evals, evecs, gradient_evecs, normal(c).abs(), a_re, a_im, ptr]


def test_steps_one_by_one_give_the_same() -> None:
    x, mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr = all_inputs((9, 0, 20), 5, 3)
    out = diffusion_and_gradient_features(x, mass, evals, evecs, gradient_evecs, time, a_re, a_im, ptr)
    coefficients = diffuse(to_spectral(x, evecs, mass, ptr), evals, time)
    expected = x, *values_and_gradient_features(coefficients, evecs, gradient_evecs, a_re, a_im, ptr)
    torch.testing.assert_close(out, expected)


def learned(*inputs: Any, backend: str, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """The diffused function and its features as networks compute them, in which a negative time counts as 0."""
    x, *operators, time, a_re, a_im, ptr = inputs
    arguments = check_arguments(x, BlockArguments(*operators, time, a_re, a_im, ptr, swapped=swapped))
    return diffused_with_features(x, arguments, backend)[1:]


@EACH_ROTATION
def test_diffusion_and_gradient_features(place: Place, rotation: bool | str) -> None:
    def both(
        x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor | None, ptr: Tensor, *operators: Any, backend: str
    ) -> Any:
        swapped = rotation == "swapped" and a_im is not None
        return learned(x, *operators, time, a_re, a_im, ptr, backend=backend, swapped=swapped)

    for lengths, k, c in sizes(place):
        v = sum(lengths)
        # On a single vertex the gradients of all channels have one direction. dA_im depends on the angles between them
        # and is almost 0.
        turns = rotation and v > 1

        def draw() -> list[Tensor | None]:
            x, mass, evals, evecs, gradient_evecs, _, a_re, a_im, ptr = all_inputs(lengths, k, c)  # noqa: B023
            time = normal(c)  # noqa: B023  (some of the times are negative)
            a_im = a_im if turns else None  # noqa: B023
            return [x, time, a_re, a_im, ptr, mass, evals, evecs, gradient_evecs]

        disturbance = single_vertex_disturbance(lengths)
        check(place, both, draw, [(v, c)] * 2, constants=4, disturbance=disturbance)


def test_operators_have_gradients_too() -> None:
    place = Place("cpu", torch.float32, 1e-5)
    check(place, diffusion_and_gradient_features, lambda: all_inputs((9, 0, 12), 17, 5), [(21, 5)] * 3)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stepwise"])
def test_negative_times_count_as_zero(any_place: Place, backend: str, fused: bool) -> None:
    """Their gradient is 0. At time 0 the gradient is the derivative to the right."""
    *inputs, ptr = (any_place.put(t) for t in all_inputs((9, 12), 17, 4))
    inputs[1].requires_grad_(not fused)  # an operator with a gradient makes the kernels run step by step

    def features(time: list[float]) -> tuple[Tensor, Tensor]:
        inputs[5] = torch.tensor(time, device=any_place.device, dtype=any_place.dtype, requires_grad=True)
        diffused, features = learned(*inputs, ptr, backend=backend)
        total = diffused.double().square().sum() + features.double().square().sum()
        return total, torch.autograd.grad(total, inputs[5])[0]

    total, grad = features([-1.0, -1e-3, 0.0, 0.25])
    same_total, right_grad = features([0.0, 0.0, 0.0, 0.25])
    assert total == same_total
    assert (right_grad != 0).all()
    torch.testing.assert_close(grad, right_grad * torch.tensor([0, 0, 1, 1]).to(grad), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_operations_refuse_negative_times(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without debug mode they give NaN, as implicit diffusion does."""
    x, mass, evals, evecs, gradient_evecs, _, a_re, a_im, ptr = all_inputs((9, 12), 5, 3)
    spectrum, time = normal(2, 5, 3).float(), torch.tensor([0.0, -0.5, 1.0])
    inputs = [t.float() for t in (x, mass, evals, evecs, gradient_evecs, time, a_re, a_im)]
    calls = partial(diffuse, spectrum, inputs[2]), partial(diffusion_and_gradient_features, *inputs[:5])
    for call, rest in zip(calls, ((), (*inputs[6:], ptr)), strict=True):
        with monkeypatch.context() as patch:
            refused(ValueError, "time should be .*, got -0.5 at index", call, time, *rest, backend=backend)
            patch.setattr(checks, "readable", lambda _: False)
            out = call(time, *rest, backend=backend)
        diffused = out.flatten(0, 1) if isinstance(out, Tensor) else out[1]
        assert diffused.isnan().all(0).tolist() == [False, True, False]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_time_that_is_nan_is_not_hidden(backend: str) -> None:
    *inputs, ptr = (t.float() if t.is_floating_point() else t for t in all_inputs((9, 12), 5, 3))
    inputs[5][1] = float("nan")
    diffused, _ = learned(*inputs, ptr, backend=backend)
    assert diffused.isnan().all(0).tolist() == [False, True, False]


def test_x_of_another_dtype_is_returned_unchanged() -> None:
    x, *others, ptr = all_inputs((29,), 17, 5)
    x = x.float()
    with torch.autocast("cpu", torch.float16):
        assert diffusion_and_gradient_features(x, *(t.half() for t in others), ptr, backend="triton")[0] is x
