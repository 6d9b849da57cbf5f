"""The CPU paths of `mlp` and `gradient_features` against the plain references."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from kernel_accuracy import relative
from torch import Tensor

from diffnet.ops import gradient_features, mlp
from diffnet.ops.common import cpu as common
from diffnet.ops.gradient_features import reference as features_reference
from diffnet.ops.mlp import reference as mlp_reference

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed in several chunks, of which the last one is short."""
    monkeypatch.setattr(common, "ROWS", 16)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def agree(run: Callable[..., Tensor], expected: Callable[..., Tensor], tensors: Sequence[Tensor], bound: float) -> None:
    """Check the outputs and the gradients of all tensors. The expected ones are computed in float64."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    out, reference = run(*tensors), expected(*exact)
    grad = torch.randn_like(reference)
    grads = torch.autograd.grad(out, tensors, grad.to(out.dtype))
    assert relative(out.detach(), reference.detach()) <= bound
    for found, true in zip(grads, torch.autograd.grad(reference, exact, grad), strict=True):
        assert relative(found, true) <= bound


def perceptron(function: Callable[..., Tensor], inputs: int, layers: int, skip: bool = False) -> Callable[..., Tensor]:
    """The function of inputs, weights, biases and perhaps a residual that a multilayer perceptron is."""

    def run(*tensors: Tensor) -> Tensor:
        x, weights, rest = tensors[:inputs], tensors[inputs : inputs + layers], tensors[inputs + layers :]
        biases, residual = rest[:layers] or None, x[0] if skip else (rest[layers:] or [None])[0]
        return function(x, weights, biases, residual=residual)

    return run


PERCEPTRONS = [
    pytest.param([(37, 5)], [(4, 5)], False, "none", id="linear-without-bias"),
    pytest.param([(37, 5), (37, 3), (37, 4)], [(6, 12), (7, 6), (5, 7)], True, "first", id="block"),
    pytest.param([(37, 5), (37, 3)], [(6, 8), (5, 6)], True, "other", id="residual"),
    pytest.param([(1, 5)], [(6, 5), (5, 6)], True, "none", id="one-row"),
    pytest.param([(0, 5)], [(6, 5), (5, 6)], True, "first", id="no-rows"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("inputs", "weights", "biased", "residual"), PERCEPTRONS)
def test_mlp(
    inputs: list[tuple[int, int]],
    weights: list[tuple[int, int]],
    biased: bool,
    residual: str,
    dtype: torch.dtype,
) -> None:
    biases = [(w[0],) for w in weights] if biased else []
    other = [(inputs[0][0], weights[-1][0])] if residual == "other" else []
    tensors = leaves(*inputs, *weights, *biases, *other, dtype=dtype)
    run, expected = (perceptron(f, len(inputs), len(weights), residual == "first") for f in (mlp, mlp_reference.mlp))
    agree(run, expected, tensors, BOUNDS[dtype])
    with torch.no_grad():
        assert torch.equal(run(*tensors), run(*(t.requires_grad_() for t in tensors)))


def test_dropout_of_the_mlp() -> None:
    """Units are dropped with the probability, outputs keep their mean, and gradients have the units of the outputs."""
    x, width, p = torch.ones(1003, 8), 50, 0.3
    first, last = torch.ones(width, 8) / 8, torch.eye(width)
    torch.manual_seed(0)
    out = mlp([x], [first, last], dropout=p)
    assert set(out.unique().tolist()) == {0.0, out.max().item()}
    assert out.max().item() == pytest.approx(1 / (1 - p), rel=1e-4)
    deviation = (p * (1 - p) / out.numel()) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(p, abs=5 * deviation)
    for each in ((out == 0).double().mean(0), (out == 0).double().mean(1)):
        assert each.var().item() == pytest.approx(p * (1 - p) * len(each) / out.numel(), rel=0.8)
    torch.manual_seed(0)
    leaf = first.clone().requires_grad_()
    again = mlp([x], [leaf, last], dropout=p)
    assert torch.equal(again, out)
    again.sum().backward()
    assert relative(leaf.grad, out.sum(0)[:, None].expand(width, 8)) < 1e-5  # type: ignore[arg-type]
    assert not torch.equal(mlp([x], [first, last], dropout=p), out)


def test_most_and_least_dropout() -> None:
    x = torch.ones(100, 100)
    for p in (1e-7, 1 - 1e-7):
        out = mlp([x], [torch.eye(100), torch.eye(100)], dropout=p)
        assert torch.isfinite(out).all()
        assert (out == 0).all() == (p > 0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_gradient_features(rows: int, rotation: bool, dtype: torch.dtype) -> None:
    tensors = leaves((2, rows, 5), *[(5, 5)] * (1 + rotation), dtype=dtype)
    if rotation:
        agree(gradient_features, features_reference.gradient_features, tensors, BOUNDS[dtype])
    else:
        run, expected = (
            lambda g, a, f=f: f(g, a, None) for f in (gradient_features, features_reference.gradient_features)
        )
        agree(run, expected, tensors, BOUNDS[dtype])


def test_only_some_gradients() -> None:
    """Inputs without gradients get none, and the others are the same as when all have them."""
    g, a_re, a_im = leaves((2, 37, 5), (5, 5), (5, 5))
    everything = torch.autograd.grad(gradient_features(g, a_re, a_im).sum(), [g, a_re, a_im])
    for i, t in enumerate((g, a_re, a_im)):
        only = [x if j == i else x.detach() for j, x in enumerate((g, a_re, a_im))]
        assert torch.equal(torch.autograd.grad(gradient_features(*only).sum(), t)[0], everything[i])
    tensors = leaves((37, 5), (5, 5), (5, 5), (5,), (5,))
    run = perceptron(mlp, 1, 2, skip=True)
    everything = torch.autograd.grad(run(*tensors).sum(), tensors)
    for i, t in enumerate(tensors):
        only = [x if j == i else x.detach() for j, x in enumerate(tensors)]
        assert torch.equal(torch.autograd.grad(run(*only).sum(), t)[0], everything[i])


def test_second_derivatives() -> None:
    assert torch.autograd.gradgradcheck(gradient_features, leaves((2, 3, 2), (2, 2), (2, 2)))
    torch.manual_seed(1)  # no unit is so close to 0 that the check crosses it
    assert torch.autograd.gradgradcheck(perceptron(mlp, 2, 2, skip=True), leaves((3, 2), (3, 2), (4, 4), (2, 4)))


def test_second_derivative_with_dropout() -> None:
    """The derivative that can be differentiated drops the same units."""
    x, w1, w2 = leaves((37, 5), (6, 5), (5, 6))
    out = mlp([x], [w1, w2], dropout=0.5, residual=x)
    grad = torch.randn_like(out)
    plain = torch.autograd.grad(out, [x, w1, w2], grad, retain_graph=True)
    for a, b in zip(plain, torch.autograd.grad(out, [x, w1, w2], grad, create_graph=True), strict=True):
        assert relative(b.detach(), a) < 1e-12


def test_autocast() -> None:
    """Products are rounded to bfloat16. Dtypes and errors are those of the reference."""
    x, d, w1, w2, a_re, a_im = leaves((37, 8), (37, 8), (8, 16), (8, 8), (8, 8), (8, 8), dtype=torch.float32)
    g = torch.randn(2, 37, 8, requires_grad=True)
    for run, expected, tensors in (
        (perceptron(mlp, 2, 2, skip=True), perceptron(mlp_reference.mlp, 2, 2, skip=True), (x, d, w1, w2)),
        (perceptron(mlp, 2, 1), perceptron(mlp_reference.mlp, 2, 1), (x, d, w1)),
        (gradient_features, features_reference.gradient_features, (g, a_re, a_im)),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out, plain = run(*tensors), expected(*tensors)
        assert out.dtype == plain.dtype
        grad = torch.randn_like(plain)
        grads, true = (torch.autograd.grad(o, tensors, grad) for o in (out, plain))
        assert relative(out.detach(), plain.detach()) < BOUNDS[torch.bfloat16]
        for a, b in zip(grads, true, strict=True):
            assert a.dtype == b.dtype
            assert relative(a, b) < 2 * BOUNDS[torch.bfloat16]


def test_backward_under_autocast() -> None:
    """Backward products keep the dtype of the forward ones."""
    x, w1, w2 = leaves((37, 8), (8, 8), (8, 8), dtype=torch.float32)
    out = mlp([x], [w1, w2]) + gradient_features(torch.stack([x, x]), w1, w2)
    expected = torch.autograd.grad(out.sum(), [x, w1, w2], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out.sum(), [x, w1, w2])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_where_the_cpu_paths_give_way() -> None:
    x = torch.ones(2, 2)
    assert common.eager_on_cpu(x, torch.nn.Parameter(x))
    assert not common.eager_on_cpu(x, x.half())
    assert not common.eager_on_cpu(x.to("meta"))
    assert not torch.func.vmap(lambda y: torch.tensor(common.eager_on_cpu(y)))(x).any()
    with torch.autograd.forward_ad.dual_level():
        assert not common.eager_on_cpu(x)
    with torch.inference_mode():
        inference = torch.ones(2, 2)
        assert common.eager_on_cpu(x, inference)
    assert not common.eager_on_cpu(x, inference)
    with torch.autocast("cpu", torch.bfloat16):
        assert common.eager_on_cpu(x)
        assert not common.eager_on_cpu(x.double())
