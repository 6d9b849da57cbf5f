"""`diffusion_and_gradient_features`: kernels against plain PyTorch, the returned x, and negative times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_accuracy import (
    PLACES,
    Place,
    at_places,
    check,
    feature_inputs,
    first_columns,
    normal,
    relative,
    single_vertex_disturbance,
    sizes,
)
from torch import Tensor

from diffnet.ops import (
    diffuse,
    diffusion_and_gradient_features,
    to_spectral,
    values_and_gradient_features,
)

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


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
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a, b)


@at_places("rotation", {"rotation": True, "no-rotation": False, "swapped": "swapped"}, ["rotation"])
def test_diffusion_and_gradient_features(place: Place, rotation: bool | str) -> None:
    def both(
        x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor | None, ptr: Tensor, *operators: Any, backend: str
    ) -> Any:
        return diffusion_and_gradient_features(
            x, *operators, time, a_re, a_im, ptr, backend=backend, swapped=rotation == "swapped" and a_im is not None
        )[1:]

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
        _, diffused, features = diffusion_and_gradient_features(*inputs, ptr, backend=backend)
        total = diffused.double().square().sum() + features.double().square().sum()
        return total, torch.autograd.grad(total, inputs[5])[0]

    total, grad = features([-1.0, -1e-3, 0.0, 0.25])
    same_total, right_grad = features([0.0, 0.0, 0.0, 0.25])
    assert total == same_total
    assert (right_grad != 0).all()
    torch.testing.assert_close(grad, right_grad * torch.tensor([0, 0, 1, 1]).to(grad), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_time_that_is_nan_is_not_hidden(backend: str) -> None:
    *inputs, ptr = (t.float() if t.is_floating_point() else t for t in all_inputs((9, 12), 5, 3))
    inputs[5][1] = float("nan")
    _, diffused, _ = diffusion_and_gradient_features(*inputs, ptr, backend=backend)
    assert diffused.isnan().all(0).tolist() == [False, True, False]


# ---- the returned x ----


def test_x_of_another_dtype_is_returned_unchanged() -> None:
    x, *others, ptr = all_inputs((29,), 17, 5)
    x = x.float()
    with torch.autocast("cpu", torch.float16):
        assert diffusion_and_gradient_features(x, *(t.half() for t in others), ptr, backend="triton")[0] is x


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, first_columns])
@pytest.mark.parametrize("place", [PLACES[i] for i in (0, 3, 4, 5)], indirect=True)
def test_gradients_of_x_are_added(place: Place, layout: Callable[[Tensor], Tensor]) -> None:
    """The gradient of the returned x, in any memory layout, is added to the gradient of what is computed from x."""
    for lengths, k, c in sizes(place)[-1:]:
        x, *rest = (place.put(t) for t in all_inputs(lengths, k, c))
        x.requires_grad_()
        outs = diffusion_and_gradient_features(x, *rest, backend="triton")
        assert torch.equal(outs[0], x)
        grads = [layout(normal(sum(lengths), c).to(x)) for _ in outs]
        (apart,) = torch.autograd.grad(outs[1:], x, grads[1:], retain_graph=True)
        (together,) = torch.autograd.grad(outs, x, grads)
        assert relative(together, apart.detach().double() + grads[0].double()) <= place.bound
        assert not torch.equal(together, apart)
