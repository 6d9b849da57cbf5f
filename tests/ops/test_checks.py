"""Checks of arguments of dense operations: extents, dtypes, strides and backends. See test_argument_table.py.

Both backends must raise the same error, or give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_cases import LENGTHS, C, Case, K, cases
from float64 import DEVICE
from kernel_accuracy import Place, feature_inputs, normal, pointer, relative
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diffnet import ops

pytest.importorskip("triton")

from diffnet.ops import Pattern
from diffnet.ops.gradient_features import kernels as gradient_features
from diffnet.ops.gradient_features.coefficient_kernels import table
from diffnet.ops.implicit.kernels import iteration
from diffnet.ops.implicit.reference import System
from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients
from diffnet.ops.sparse.pattern import csr_arrays
from diffnet.ops.spectral import kernels as spectral
from diffnet.ops.spectral.kernels import sum_and_diffuse

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


OPERATIONS = pytest.mark.parametrize("operation", cases())
WITH_EXTENTS = pytest.mark.parametrize("operation", [name for name, case in cases().items() if "ptr" in case.arguments])


def error(case: Case, backend: str, changed: dict[str, Any]) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        case.run(backend, **changed)
    return caught.type, str(caught.value)


def refused(case: Case, kind: type[Exception], words: str, **changed: Any) -> None:
    """Every backend raises the same error of this kind, which contains these words."""
    errors = [error(case, backend, changed) for backend in case.backends]
    assert all(found == errors[0] for found in errors), errors
    assert errors[0][0] is kind, (changed, errors[0])
    assert words in errors[0][1], (words, errors[0][1])


def test_empty_tensors_hold_nan() -> None:
    """The fixture `poisoned` works, so a kernel that leaves elements unwritten fails in these tests."""
    x = torch.ones(3)
    assert all(t.isnan().all() for t in (torch.empty(3), torch.empty_like(x), x.new_empty(3)))


LOSSES = ("cross_entropy", "label_smoothing_loss", "focal_loss", "dice_loss", "generalized_dice_loss")


@WITH_EXTENTS
def test_extents_that_do_not_fit_are_refused(operation: str) -> None:
    case = cases()[operation]
    for wrong in ([0, 5, 5, 9], [0, 5, 5, 7], [1, 5, 5, 8], [0, 5, 4, 8], [0, 9, 5, 8], [0, -1, 5, 8]):
        refused(case, ValueError, "ptr should ascend from 0 to the number of rows, 8", ptr=torch.tensor(wrong))
    refused(case, ValueError, "ptr should have one value more", ptr=torch.zeros(0, dtype=torch.int64))
    for lengths in ((5, 3), (5, 0, 4)):
        refused(case, ValueError, "lengths should be 3 that add up to 8", lengths=lengths)
    refused(case, ValueError, "lengths should be the differences of ptr, [5, 0, 3]", lengths=(5, 1, 2))
    for backend in case.backends:
        case.run(backend, lengths=LENGTHS)


@pytest.mark.gpu
@WITH_EXTENTS
def test_debug_mode_checks_extents_on_a_gpu(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases("cuda")[operation]
    monkeypatch.setattr("diffnet.ops.common.checks.DEBUG", True)
    refused(case, ValueError, "ptr should ascend", ptr=torch.tensor([0, 5, 4, 8], device="cuda"))


@OPERATIONS
@DEVICES
def test_mixed_floating_dtypes(operation: str, device: str) -> None:
    """Both backends give the same dtype and about the same numbers, and gradients in the dtypes of the arguments."""
    case = cases(device)[operation]
    for first in (0, 1):
        halved = case.floating[first::2]
        mixed = {n: case.arguments[n].detach().to(torch.float16 if n in halved else None) for n in case.floating}
        exact = [out.detach() for out in case.run("torch", **{n: x.double() for n, x in mixed.items()})]
        dtypes = []
        for backend in case.backends:
            leaves = {n: x.clone().requires_grad_() for n, x in mixed.items()}
            outs = case.run(backend, **leaves)
            dtypes.append([out.dtype for out in outs])
            assert all(relative(a, b) < 1e-2 for a, b in zip(outs, exact, strict=True)), (halved, backend)
            grads = torch.autograd.grad(sum(out.double().sum() for out in outs), list(leaves.values()))
            assert [g.dtype for g in grads] == [x.dtype for x in leaves.values()]
        assert dtypes[0] == dtypes[-1], (halved, dtypes)


@OPERATIONS
def test_float64_is_promoted_in_plain_pytorch(operation: str) -> None:
    """The kernels don't compute in float64; plain PyTorch takes it beside float32."""
    case = cases()[operation]
    expected = case.run("torch")
    for name in case.floating:
        for a, b in zip(case.run("torch", **{name: case.arguments[name].double()}), expected, strict=True):
            assert relative(a.float(), b) < 1e-5, name


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=["no-mesh", "empty-mesh", "2-empty-meshes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@DEVICES
def test_no_vertices(lengths: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    place = Place(device, dtype, 0.0)
    d, evecs, gradient_evecs, a_re, a_im, ptr = (place.put(x) for x in feature_inputs(lengths, 3, 5))
    empty = place.put(torch.ones(0))
    for backend in ("torch", "triton"):
        leaves = [x.clone().requires_grad_() for x in (d, evecs, gradient_evecs, a_re, a_im)]
        _, evecs_, _, re, im = leaves
        values, features = ops.values_and_gradient_features(*leaves, ptr, backend=backend)
        assert values.shape == features.shape == (0, 5)
        spectrum = ops.to_spectral(values, evecs_, empty, ptr, backend=backend)
        assert spectrum.shape == (len(lengths), 3, 5)
        assert (spectrum == 0).all()
        weights = [values.new_ones(2, 10), values.new_ones(5, 2)]
        hidden = ops.mlp([values, features], weights, residual=values, backend=backend)
        direct = ops.gradient_features(torch.stack([values, features]), re, im, backend=backend)
        fused = ops.diffusion_and_gradient_features(
            values, empty, d[..., 0], evecs, gradient_evecs, a_re[0].abs(), re, im, ptr, backend=backend
        )
        outs = [hidden, direct, spectrum, features, *fused, ops.segment_mean(values, empty, ptr)]
        for grad in torch.autograd.grad(sum(out.float().sum() for out in outs), leaves, allow_unused=True):
            assert grad is None or (grad == 0).all()


@DEVICES
def test_no_eigenpairs(device: str) -> None:
    """With K = 0, all that is left of a function is 0."""
    place = Place(device, torch.float32, 0.0)
    d, evecs, gradient_evecs, a_re, a_im, ptr = (place.put(x) for x in feature_inputs((5, 2), 1, 4))
    for backend in ("torch", "triton"):
        values, features = ops.values_and_gradient_features(
            d[:, :0], evecs[:, :0], gradient_evecs[..., :0], a_re, a_im, ptr, backend=backend
        )
        assert (values == 0).all()
        assert (features == 0).all()
        assert ops.to_spectral(values, evecs[:, :0], evecs[:, 0], ptr, backend=backend).shape == (2, 0, 4)


def test_tensors_without_values_pass() -> None:
    """Fake tensors have shapes only, and the meta device has no values either."""
    case = cases()["to_spectral"]
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) for n, x in case.arguments.items() if x is not None}
        assert case.run("torch", **fake, lengths=LENGTHS)[0].shape == (3, K, C)
    meta = {n: x.to("meta") for n, x in case.arguments.items() if x is not None}
    assert case.run("torch", **meta, lengths=LENGTHS)[0].shape == (3, K, C)


def test_the_cpu_computes_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffnet.ops.spectral.op.project_operator", None)  # a call would fail
    case = cases()["to_spectral"]
    assert case.run("auto")[0].shape == (3, K, C)


@pytest.mark.parametrize("operation", [name for name, case in cases().items() if len(case.backends) > 1])
def test_float64_and_unknown_backends_are_refused(operation: str) -> None:
    case = cases()[operation]
    wide = {n: case.arguments[n].double() for n in case.floating}
    with pytest.raises(ValueError, match="float64"):
        case.run("triton", **wide)
    with pytest.raises(ValueError, match="'cuda'"):
        case.run("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_the_interpreter_has_no_bfloat16() -> None:
    case = cases()["to_spectral"]
    with pytest.raises(RuntimeError, match="bfloat16"):
        case.run("triton", **{n: case.arguments[n].bfloat16() for n in case.floating})


def test_autocast_rounds_operands_before_the_products() -> None:
    """The result is the result of rounded inputs."""
    d, evecs, gradient_evecs, a_re, a_im, ptr = (
        x.float() if x.is_floating_point() else x for x in feature_inputs((9, 0, 3), 17, 5)
    )
    x, mass = normal(12, 5).float(), normal(12).abs().float()
    w, out = normal(21, 5).float(), normal(5, 21).float()

    def run(x: Tensor, evecs: Tensor, gradient_evecs: Tensor, w: Tensor, out: Tensor) -> list[Tensor]:
        return [
            ops.to_spectral(x, evecs, mass, ptr, backend="triton"),
            ops.from_spectral(d, evecs, ptr, backend="triton"),
            *ops.values_and_gradient_features(d, evecs, gradient_evecs, a_re, a_im, ptr, backend="triton"),
            ops.mlp([x], [w, out], backend="triton"),
        ]

    with torch.autocast("cpu", torch.float16):
        cast = run(x, evecs, gradient_evecs, w, out)
    rounded = run(x.half(), evecs.half(), gradient_evecs.half(), w.half(), out.half())
    torch.testing.assert_close(cast, rounded, rtol=0, atol=0)
    assert [t.dtype for t in cast] == [torch.float32, *[torch.float16] * 4]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tf32_splits_each_number_in_two(device: str, request: pytest.FixtureRequest) -> None:
    """(1 + e)(1 + e) = 1 + 2e + e² with bfloat16 parts 1 and e misses the last term for e = 2⁻¹⁰.

    Rounded to bfloat16, which has 8 bits, the result would be 1. tf32 would have e² as well.
    """
    ptr, x = pointer((1,)).to(device), torch.full((1, 1), 1 + 2**-10, device=device)
    results = {}
    before = torch.get_float32_matmul_precision()
    request.addfinalizer(lambda: torch.set_float32_matmul_precision(before))
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        results[precision] = [
            ops.to_spectral(x, x, torch.ones(1, device=device), ptr, backend="triton").item(),
            ops.from_spectral(x[None], x, ptr, backend="triton").item(),
            ops.mlp([x], [x], backend="triton").item(),
        ]
    assert results == {"high": [1 + 2**-9] * 3, "highest": [1 + 2**-9 + 2**-20] * 3}


V, WIDTH = 40, 16  # as many eigenpairs as channels, so that one launch computes weight gradients and a projection
BORDER = 100  # rows
EXTENTS = ([0, V + 90], [0, 7, V + 90], [-90, 7, V], [0, V + 30, V + 60, V], [0, 30, 10, V], [V + 20, V, 5, -20])


def bordered(dtype: torch.dtype, *shape: int) -> Tensor:
    """The rows of a (…, V, WIDTH) tensor in the middle of a larger one, whose other rows are NaN."""
    wide = torch.full((*shape[:-1], V + 2 * BORDER, shape[-1]), float("nan"), device=DEVICE, dtype=dtype)
    inner = wide[..., BORDER : BORDER + V, :]
    return inner.copy_(normal(*inner.shape))


def project(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x, evecs, mass = bordered(dtype, WIDTH), bordered(dtype, WIDTH), bordered(torch.float32, 1)[:, 0].fill_(1)
    ones = torch.ones(len(ptr) - 1, WIDTH, device=DEVICE)
    spectrum = sum_and_diffuse(*spectral.project_spans(x, evecs, mass, ptr), ptr, ones, ones[0])
    return [spectral.project(x, evecs, mass, ptr), *spectrum]


def evaluate(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    coefficients = torch.ones(len(ptr) - 1, WIDTH, WIDTH, device=DEVICE)
    return [spectral.evaluate(coefficients, bordered(dtype, WIDTH), None, ptr, added=bordered(dtype, WIDTH))]


def features(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    a, d = torch.eye(WIDTH, device=DEVICE), torch.ones(len(ptr) - 1, WIDTH, WIDTH, device=DEVICE)
    x, evecs, gradients = bordered(dtype, WIDTH), bordered(dtype, WIDTH), bordered(dtype, 2, WIDTH)
    coefficients = table(d, a, a, evecs)
    sums = gradient_features.backward(x, coefficients, gradients, ptr, values_grad=x, evecs=evecs)
    return [sums, *gradient_features.forward(coefficients, evecs, gradients, ptr)]


def weights(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    x = bordered(dtype, WIDTH)
    found = weight_gradients([x], [], [x], projection=Projection(x, x, ptr))
    return [*found.weights, *([] if found.projected is None else [found.projected[0]])]


def solve(ptr: Tensor, dtype: torch.dtype) -> list[Tensor]:
    indices = torch.arange(V, dtype=torch.int32, device=DEVICE)
    pattern = Pattern.from_row_lengths(torch.ones_like(indices), indices, V)
    ones = bordered(torch.float32, 1)[:, 0].fill_(1)
    system = System(csr_arrays(pattern, True), ones, ones, ones, torch.ones(WIDTH, device=DEVICE), ptr)
    u, r, p = (bordered(torch.float32, WIDTH) for _ in range(3))
    left = torch.ones(len(ptr) - 1, WIDTH, device=DEVICE)  # is below the bound, so all steps have length 0
    iteration(system, u, r, p, torch.full_like(left, torch.inf))(left)
    return [u, r, p]


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The memory before and after each tensor that is made empty. The memory and the tensor hold zeros."""
    around: list[Tensor] = []

    def guard(tensor: Tensor) -> Tensor:
        size, border = tensor.numel(), 2 * BORDER * WIDTH
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
