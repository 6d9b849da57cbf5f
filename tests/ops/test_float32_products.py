"""Float32 products where tf32 isn't allowed: errors, the largest numbers, infinities, and the GPUs that have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_accuracy import feature_inputs, normal, outputs_and_gradients, pointer, relative
from torch import Tensor

from diffnet import ops
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.matmul import operands
from diffnet.ops.common.precision import dot_precision

pytestmark = [
    pytest.mark.usefixtures("one_thread", "poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # NumPy's, about NaN in Triton's interpreter
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LARGEST = torch.finfo(torch.float32).max


def sizes(device: str) -> tuple[int, int, int]:
    return (20_000, 128, 128) if device == "cuda" else (50, 18, 17)


def calls(v: int, k: int, c: int) -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Operations with products, and their floating-point inputs in float64."""
    d, evecs, gradient_evecs, a_re, a_im, _ = feature_inputs((v,), k, c)
    assert a_im is not None
    x, mass, evals, time = normal(v, c), normal(v).abs() / v, normal(1, k).abs(), normal(c).abs()
    # One layer: with more, a unit near 0 may have a gradient in one arithmetic and none in the other.
    weights = [normal(c, 3 * c, scale=(3 * c) ** -0.5)]

    def block(x: Tensor, t: Tensor, a: Tensor, b: Tensor, backend: Any) -> tuple[Tensor, ...]:
        constants = (y.to(x) for y in (mass, evals, evecs, gradient_evecs))
        out = ops.diffusion_and_gradient_features(x, *constants, t, a, b, pointer((v,)).to(x.device), backend=backend)
        return out[1:]

    def mlp(*tensors: Tensor, backend: Any) -> Tensor:
        return ops.mlp(tensors[:3], tensors[3:], backend=backend)

    def spectral(f: Callable[..., Tensor], *tensors: Tensor, backend: Any) -> Tensor:
        return f(*tensors, pointer((v,)).to(tensors[0].device), backend=backend)

    return {
        "to_spectral": (partial(spectral, ops.to_spectral), [x, evecs, mass]),
        "from_spectral": (partial(spectral, ops.from_spectral), [d, evecs]),
        "gradient_features": (ops.gradient_features, [normal(2, v, c), a_re, a_im]),
        "diffusion_and_gradient_features": (block, [x, time, a_re, a_im]),
        "mlp": (mlp, [x, normal(v, c), normal(v, c), *weights]),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", calls(1, 1, 1))
def test_the_error_is_at_most_twice_that_of_pytorch(device: str, name: str) -> None:
    """For outputs and gradients, against float64. No float32 result has an error far below half a unit in the last
    place, so a smaller error of PyTorch counts as that."""
    operation, inputs = calls(*sizes(device))[name]
    inputs = [x.float().to(device) for x in inputs]
    exact = [x.detach().double() for x in inputs]
    outs = operation(*exact, backend="torch")
    cotangents = [normal(*out.shape).float().to(device) for out in ([outs] if isinstance(outs, Tensor) else outs)]
    wide = [x.double() for x in cotangents]
    expected = outputs_and_gradients(partial(operation, backend="torch"), exact, wide)
    errors = []
    for backend in ("torch", "triton"):
        leaves = [x.clone() for x in inputs]
        found = outputs_and_gradients(partial(operation, backend=backend), leaves, cotangents)
        errors.append([relative(a, b.detach()) for a, b in zip(found, expected, strict=True)])
    plain, ours = errors
    assert all(b <= 2 * max(a, 2**-24) for a, b in zip(plain, ours, strict=True)), (plain, ours)


@pytest.mark.parametrize("device", DEVICES)
def test_three_parts_are_the_number(device: str) -> None:
    """Down to 2⁻¹⁰³. The last bit of a smaller number may be too small for bfloat16."""
    x = (1 + torch.rand(2000)) * 2.0 ** torch.randint(-103, 127, (2000,))
    edges = torch.tensor([0.0, 1.0, LARGEST, -LARGEST, 1 - 2**-24, 1 + 2**-23, 2**-103 * (1 + 2**-23), -255.99998])
    x = torch.cat([x, edges]).to(device)
    (parts,) = operands([x], torch.float32, "bf16x6")
    assert parts.shape == (3, len(x))
    assert torch.equal(parts.double().sum(0), x.double())


@pytest.mark.parametrize("device", DEVICES)
def test_products_with_the_largest_numbers_and_infinities(device: str) -> None:
    """Each row has one strange number; 1 and 2⁻¹⁰⁰ have parts that are 0, and 1.3 has parts of both signs."""
    strange = torch.tensor([LARGEST, -LARGEST, torch.inf, -torch.inf, torch.nan, 2.0**-140])
    rows = torch.diag(strange).to(device)
    for factor in (1.0, 1.3, -0.7, 2.0**-100, 0.0, 2.0):
        weight = torch.full((4, len(strange)), factor, device=device)
        expected = ops.mlp([rows], [weight], backend="torch")
        torch.testing.assert_close(
            ops.mlp([rows], [weight], backend="triton"), expected, rtol=1e-6, atol=1e-38, equal_nan=True
        )


# The compute capability and, for "highest" and "high", whether kernels multiply float32, and in which arithmetic.
@pytest.mark.parametrize(
    ("major", "kernels", "precisions"),
    [
        (7, (False, False), ("ieee", "bf16x3")),
        (8, (False, True), ("bf16x6", "bf16x3")),
        (9, (True, True), ("bf16x6", "bf16x3")),
        (12, (False, True), ("bf16x6", "bf16x3")),
    ],
)
def test_gpus_on_which_parts_are_faster_take_the_kernels(
    monkeypatch: pytest.MonkeyPatch, major: int, kernels: tuple[bool, bool], precisions: tuple[str, str]
) -> None:
    pytest.importorskip("triton")
    properties = SimpleNamespace(multi_processor_count=1, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    # Properties are remembered by the number of the device, so each case has its own.
    device = torch.device("cuda", 100 + major)
    tensor: Any = SimpleNamespace(is_cuda=True, is_meta=False, dtype=torch.float32, device=device)
    before = torch.get_float32_matmul_precision()
    try:
        for setting, takes, precision in zip(("highest", "high"), kernels, precisions, strict=True):
            torch.set_float32_matmul_precision(setting)
            assert use_kernels("auto", tensor, matrix=True) == takes
            assert use_kernels("auto", tensor)
            assert not use_kernels("torch", tensor, matrix=True)
            assert dot_precision(tensor) == precision
    finally:
        torch.set_float32_matmul_precision(before)
    tensor.dtype = torch.float64
    assert not use_kernels("auto", tensor, matrix=True)
