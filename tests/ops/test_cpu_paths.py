"""The CPU forms of `mlp` and of blocks with sparse gradients against the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from float64 import check
from kernel_accuracy import relative
from torch import Tensor

from diffnet.ops import Backend, Pattern, definition, mlp
from diffnet.ops.common import cpu as common
from diffnet.ops.common.backend import use_cpu_form
from diffnet.ops.definition import BlockArguments
from diffnet.ops.diffusion_features import cpu as diffusion_cpu
from diffnet.ops.diffusion_features.op import diffused_with_features

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are computed in several chunks, of which the last one is short."""
    monkeypatch.setattr(common, "ROWS", 16)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


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
    inputs: list[tuple[int, int]], weights: list[tuple[int, int]], biased: bool, residual: str, dtype: torch.dtype
) -> None:
    biases = [(w[0],) for w in weights] if biased else []
    other = [(inputs[0][0], weights[-1][0])] if residual == "other" else []
    tensors = leaves(*inputs, *weights, *biases, *other, dtype=dtype)
    run, expected = (perceptron(f, len(inputs), len(weights), residual == "first") for f in (mlp, definition.mlp))
    check(run, expected, tensors, dtype, "cpu")
    with torch.no_grad():
        assert torch.equal(run(*tensors), run(*(t.requires_grad_() for t in tensors)))


def test_most_and_least_dropout() -> None:
    x = torch.ones(100, 100)
    for p in (1e-7, 1 - 1e-7):
        out = mlp([x], [torch.eye(100), torch.eye(100)], dropout=p)
        assert torch.isfinite(out).all()
        assert (out == 0).all() == (p > 0.5)


def test_only_some_gradients() -> None:
    """Inputs without gradients get none, and the others are the same as when all have them."""
    tensors = leaves((37, 5), (5, 5), (5, 5), (5,), (5,))
    run = perceptron(mlp, 1, 2, skip=True)
    everything = torch.autograd.grad(run(*tensors).sum(), tensors)
    for i, t in enumerate(tensors):
        only = [x if j == i else x.detach() for j, x in enumerate(tensors)]
        assert torch.equal(torch.autograd.grad(run(*only).sum(), t)[0], everything[i])


def test_second_derivatives() -> None:
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
    """Products are rounded to bfloat16. Dtypes and errors are those of the definition."""
    x, d, w1, w2 = leaves((37, 8), (37, 8), (8, 16), (8, 8), dtype=torch.float32)
    for run, expected, tensors in (
        (perceptron(mlp, 2, 2, skip=True), perceptron(definition.mlp, 2, 2, skip=True), (x, d, w1, w2)),
        (perceptron(mlp, 2, 1), perceptron(definition.mlp, 2, 1), (x, d, w1)),
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
    out = mlp([x], [w1, w2])
    expected = torch.autograd.grad(out.sum(), [x, w1, w2], retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out.sum(), [x, w1, w2])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_where_the_cpu_forms_give_way() -> None:
    def used(*tensors: Tensor) -> bool:
        return use_cpu_form("auto", *tensors)

    x = torch.ones(2, 2)
    assert used(x, torch.nn.Parameter(x))
    assert not used(x, x.half())
    assert not used(x.to("meta"))
    assert not use_cpu_form("torch", x)
    assert not torch.func.vmap(lambda y: torch.tensor(used(y)))(x).any()
    with torch.autograd.forward_ad.dual_level():
        assert not used(x)
    with torch.inference_mode():
        inference = torch.ones(2, 2)
        assert used(x, inference)
    assert not used(x, inference)
    with torch.autocast("cpu", torch.bfloat16):
        assert used(x)
        assert not used(x.double())


def operators_and_leaves(lengths: Sequence[int], k: int = 7, c: int = 5) -> tuple[list[Any], list[Tensor]]:
    """Random operators of meshes with 3 entries per row, and x, time, A_re and A_im, in float32."""
    v = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    mesh = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    near = starts[mesh, None] + torch.randint(1000, (v, 3)) % torch.tensor(lengths)[mesh, None]
    near = near.sort(1).values
    pattern = Pattern(torch.arange(0, 3 * v + 1, 3), near.flatten(), v, check=False)
    operators = [torch.rand(v) / max(v, 1), torch.rand(len(lengths), k), torch.randn(v, k), pattern]
    operators += [torch.randn(2, 3 * v), starts, list(lengths)]
    tensors = leaves((v, c), (c,), (c, c), (c, c), dtype=torch.float32)
    tensors[1].data.abs_()[1:2] = -0.5  # a negative time counts as 0
    return operators, tensors


def both_forms(operators: Sequence[Any]) -> list[Callable[..., tuple[Tensor, ...]]]:
    """The form of the CPU and the definition, as functions of x, time, A_re and A_im."""

    def run(backend: Backend, x: Tensor, *learned: Tensor | None) -> tuple[Tensor, ...]:
        mass, evals, evecs, gradient = (operators[i].to(x.dtype) for i in (0, 1, 2, 4))
        pattern, ptr, lengths = (operators[i] for i in (3, 5, 6))
        arguments = BlockArguments(mass, evals, evecs, gradient, *learned, ptr, pattern, lengths)
        return diffused_with_features(x, arguments, backend)

    return [partial(run, "auto"), partial(run, "torch")]


@pytest.mark.parametrize("lengths", [(37,), (20, 0, 33, 1), (0,)], ids=["one", "ragged", "empty"])
def test_sparse_diffusion_and_gradient_features(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    operators, tensors = operators_and_leaves(lengths)
    calls = []
    fast = diffusion_cpu.diffused_with_features
    monkeypatch.setattr(diffusion_cpu, "diffused_with_features", lambda *a: calls.append(a) or fast(*a))
    run, reference = both_forms(operators)
    x, time, *matrices = tensors
    fixed = [a.detach() for a in matrices]
    for ours, expected, inputs in (
        (lambda *t: torch.cat(run(*t)), lambda *t: torch.cat(reference(*t)), tensors),
        (lambda *t: run(*t)[2], lambda *t: reference(*t)[2], tensors),
        (lambda *t: run(*t, *fixed)[1], lambda *t: reference(*t, *(a.double() for a in fixed))[1], [x, time]),
    ):
        check(ours, expected, inputs, torch.float32, "cpu")
    assert len(calls) == 3
    with torch.no_grad():
        for a, b in zip(run(*tensors), run(*(t.requires_grad_() for t in tensors)), strict=True):
            assert torch.equal(a, b)


def test_second_derivative_of_sparse_diffusion_and_gradient_features() -> None:
    """A derivative that can be differentiated equals the fast one, and its own derivative that of the reference."""
    operators, tensors = operators_and_leaves((20, 17))
    run, reference = both_forms(operators)
    grads = [torch.randn_like(out) for out in run(*tensors)]
    fast = torch.autograd.grad(run(*tensors), tensors, grads)
    found, expected = (torch.autograd.grad(f(*tensors), tensors, grads, create_graph=True) for f in (run, reference))
    assert all(relative(a, b.detach()) < BOUNDS[torch.float32] for a, b in zip(fast, found, strict=True))
    second = [torch.autograd.grad(sum(g.square().sum() for g in each), tensors) for each in (found, expected)]
    assert all(relative(a, b) < BOUNDS[torch.float32] for a, b in zip(*second, strict=True))


def test_sparse_diffusion_and_gradient_features_under_autocast() -> None:
    operators, tensors = operators_and_leaves((20, 17))
    run, reference = both_forms(operators)
    with torch.autocast("cpu", torch.bfloat16):
        out, plain = run(*tensors), reference(*tensors)
    assert out[1].dtype == plain[1].dtype == torch.bfloat16
    exact = reference(*(t.double() for t in tensors))
    grads = [torch.randn_like(o) for o in exact]
    true = torch.autograd.grad(exact, tensors, grads)
    found = torch.autograd.grad(out, tensors, [g.to(o.dtype) for g, o in zip(grads, out, strict=True)])
    for a, b in zip((*out, *found), (*exact, *true), strict=True):
        assert relative(a.detach(), b.detach()) < 2 * BOUNDS[torch.bfloat16]


def test_where_sparse_diffusion_and_gradient_features_take_steps() -> None:
    """Without rotations, with gradients of operators and in float64, the steps run one by one, with the same result."""
    operators, tensors = operators_and_leaves((20, 17))
    run, reference = both_forms(operators)
    exact = [t.detach().double() for t in tensors]
    assert all(relative(a, b) < BOUNDS[torch.float64] for a, b in zip(run(*exact), reference(*exact), strict=True))
    operators[4].requires_grad_()
    assert torch.autograd.grad(run(*tensors)[2].sum(), operators[4])[0].isfinite().all()
    x, time, a_re, _ = tensors
    assert run(x, time, a_re, None)[2].shape == x.shape
