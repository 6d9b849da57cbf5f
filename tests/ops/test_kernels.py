"""Triton kernels against float64: outputs and every gradient, at sizes that fill no tile.

Without a GPU they run in Triton's interpreter, at small sizes and in float32, plain or in two parts where tf32 is
allowed, and float16 (it has no bfloat16 products).
On a GPU, `-m gpu` runs them in full. Whatever is allocated is filled with NaN first, so nothing unwritten passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from diffnet.ops import (
    cross_entropy,
    diffuse,
    diffusion_and_gradient_features,
    from_spectral,
    gradient_features,
    mlp,
    spectral_gradient_features,
    to_spectral,
    values_and_gradient_features,
)
from diffnet.ops.common.matmul import operands
from diffnet.ops.mlp.kernels import backward_tiling, forward_tiling
from diffnet.ops.mlp.op import MOST_INPUTS, _mlp_implementation

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Place:
    """Where, and in which arithmetic; bound: of ‖out − ref‖ / ‖ref‖"""

    device: str
    dtype: torch.dtype
    bound: float
    tf32: bool = False


PLACES = [
    pytest.param(Place("cpu", torch.float32, 1e-5), id="cpu-fp32"),
    pytest.param(Place("cpu", torch.float16, 1e-2), id="cpu-fp16"),
    pytest.param(Place("cpu", torch.float32, 1e-3, tf32=True), id="cpu-tf32"),
    pytest.param(Place("cuda", torch.float32, 1e-5), id="cuda-fp32", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", torch.float32, 1e-3, tf32=True), id="cuda-tf32", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", torch.bfloat16, 1e-2), id="cuda-bf16", marks=pytest.mark.gpu),
    pytest.param(Place("cuda", torch.float16, 1e-2), id="cuda-fp16", marks=pytest.mark.gpu),
]

# Vertices of each mesh, K, C. The interpreter's tiles have 16 rows and columns, a GPU's up to 128.
SMALL = [((1,), 3, 5), ((63,), 20, 5), ((7, 0, 18, 1), 5, 36), ((17, 3), 40, 18)]
LARGE = [
    ((1,), 3, 5),
    ((63,), 5, 40),
    ((1000,), 128, 64),
    ((5000, 0, 17, 1200, 1), 100, 36),
    ((100_003,), 128, 128),
    ((3000, 500), 300, 200),
]


def sizes(place: Place) -> list[tuple[tuple[int, ...], int, int]]:
    return SMALL if place.device == "cpu" else LARGE


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param.tf32 else "highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=[PLACES[i] for i in (0, 3, 5)])
def roomy(request: pytest.FixtureRequest) -> Place:
    """Places for what doesn't depend on the arithmetic."""
    found: Place = request.param
    return found


def _poison(x: Tensor) -> Tensor:
    return x.fill_(float("nan")) if x.is_floating_point() else x


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is handed out empty holds NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, original=original, **k: _poison(original(*a, **k)))


def test_poison_is_there() -> None:
    x = torch.ones(3)
    assert all(t.isnan().all() for t in (torch.empty(3), torch.empty_like(x), x.new_empty(3)))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Fresh in every run; pytest prints the seed of one that fails."""
    return scale * torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed() -> int:
    seed = torch.seed()
    print("torch.manual_seed", seed)
    return seed


def pointer(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)))


Operation = Callable[..., Tensor | tuple[Tensor, ...]]


def evaluate(
    operation: Operation, inputs: Sequence[Tensor | None], cotangents: Sequence[Tensor], constants: int = 0
) -> list[Tensor]:
    """What an operation returns, and the gradients of all of its inputs but the last, which are constants."""
    leaves = [x for x in inputs[: len(inputs) - constants] if x is not None and x.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    out = operation(*inputs)
    outs = [out] if isinstance(out, Tensor) else list(out)
    grads = torch.autograd.grad(outs, leaves, [c.to(o) for c, o in zip(cotangents, outs, strict=True)])
    assert all(g.shape == leaf.shape and g.dtype == leaf.dtype for g, leaf in zip(grads, leaves, strict=True))
    return [*outs, *grads]


def relative(out: Tensor, reference: Tensor) -> float:
    assert out.shape == reference.shape
    norm = torch.linalg.norm(reference)
    difference = torch.linalg.norm(out.detach().to(reference) - reference)
    return float(difference / norm if norm > 0 else difference)


def check(
    place: Place,
    operation: Operation,
    draw: Callable[[], Sequence[Tensor | None]],
    outputs: Sequence[tuple[int, ...]],
    constants: int = 0,
    disturbance: float = 1 / 16,
) -> None:
    """operation(*draw(), backend=…) with the kernels, against the plain functions in float64.

    The reference starts from the same rounded inputs, so that only the arithmetic differs. outputs: their shapes;
    constants: how many of the last inputs have no gradient; disturbance: what inputs of a draw have to bear, in bounds
    """

    def place_of(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.to(place.device, place.dtype if x.is_floating_point() else None)

    def exact(x: Tensor | None) -> Tensor | None:
        return x if x is None or not x.is_floating_point() else x.detach().double()

    def disturbed(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        return x.detach().double() * (1 + disturbance * place.bound * torch.randn_like(x, dtype=torch.float64))

    # What bfloat16 rounds on the way may be amplified more than what disturbs the inputs, and its bound is near. So
    # where few rows average that out, the bound is for the median of some draws.
    draws = 7 if place.dtype == torch.bfloat16 and outputs[0][0] < 100 else 1
    found: list[list[float]] = []
    for _ in range(100 * draws):
        inputs = [place_of(x) for x in draw()]
        cotangents = [place_of(normal(*shape)) for shape in outputs]
        wide = [c.double() for c in cotangents]
        expected = evaluate(partial(operation, backend="torch"), [exact(x) for x in inputs], wide, constants)
        near = [
            evaluate(partial(operation, backend="torch"), [disturbed(x) for x in inputs], wide, constants)
            for _ in range(3)
        ]
        # Where terms cancel, as those of a single vertex may, any rounding is too much: another draw, then.
        if all(relative(a, b.detach()) <= place.bound / 2 for n in near for a, b in zip(n, expected, strict=True)):
            got = evaluate(partial(operation, backend="triton"), inputs, cotangents, constants)
            found.append([relative(a, b.detach()) for a, b in zip(got, expected, strict=True)])
            if len(found) == draws:
                errors = torch.tensor(found).median(dim=0).values.tolist()
                assert all(error <= place.bound for error in errors), found  # false for NaN
                return
    pytest.fail(f"{len(found)} draws are well conditioned, not {draws}")


def spectral_inputs(lengths: Sequence[int], k: int, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, evecs, mass (as small as areas are), ptr"""
    v = sum(lengths)
    return normal(v, c), normal(v, k), normal(v).abs() / max(v, 1), pointer(lengths)


def test_to_spectral(place: Place) -> None:
    for lengths, k, c in [*sizes(place), ((1000,), 3, 2)]:

        def draw() -> list[Tensor | None]:
            x, evecs, mass, ptr = spectral_inputs(lengths, k, c)  # noqa: B023
            mass = 100 * mass if place.dtype == torch.float16 else mass  # whose own rounding isn't what is looked at
            return [x, evecs, mass, ptr, None]

        # The gradient of the mass is made of what has been rounded before.
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


@pytest.mark.parametrize("ignored", [-1, 2])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 2), (33, 8), (70, 260), (3, 5000)])
def test_cross_entropy(place: Place, rows: int, classes: int, ignored: int) -> None:
    def draw() -> list[Tensor | None]:
        labels = torch.randint(classes, (rows,))
        labels[torch.rand(rows) < 0.2] = ignored
        return [normal(rows, classes, scale=3.0), labels.clamp(max=max(classes - 1, ignored))]

    check(place, partial(cross_entropy, ignored=ignored), draw, [(rows,)])


def test_cross_entropy_of_no_rows_and_of_labels_that_are_none(place: Place) -> None:
    empty = torch.zeros(0, 7, dtype=place.dtype, device=place.device, requires_grad=True)
    loss = cross_entropy(empty, torch.zeros(0, dtype=torch.int64, device=place.device), backend="triton")
    loss.sum().backward()
    assert (loss.shape, empty.grad.shape) == ((0,), (0, 7))
    logits = normal(4, 7).to(place.device, place.dtype)
    loss = cross_entropy(logits, torch.tensor([0, 7, -1, -5], device=place.device), backend="triton")
    assert loss.isnan().tolist() == [False, True, False, True]
    assert loss[2] == 0


def feature_inputs(
    lengths: Sequence[int], k: int, c: int, rotation: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """coefficients, evecs, gradient_evecs, a_re, a_im, ptr such that z is about 1. A is far from symmetric."""
    v = sum(lengths)
    scale = (k * k * c) ** -0.25
    a_im = normal(c, c) if rotation else None
    return (
        normal(len(lengths), k, c),
        normal(v, k),
        normal(2, v, k, scale=scale),
        normal(c, c),
        a_im,
        pointer(lengths),
    )


def borne(lengths: Sequence[int]) -> float:
    """The disturbance of a draw, see `check`: over a single vertex nothing averages it out."""
    return 1 / 8 if sum(lengths) == 1 else 1 / 16


@pytest.mark.parametrize("rotation", [True, False])
def test_values_and_gradient_features(place: Place, rotation: bool) -> None:
    for lengths, k, c in sizes(place):
        draw = partial(feature_inputs, lengths, k, c, rotation)
        check(place, values_and_gradient_features, draw, [(sum(lengths), c)] * 2, disturbance=borne(lengths))


@pytest.mark.parametrize("rotation", [True, False])
def test_spectral_gradient_features(place: Place, rotation: bool) -> None:
    for lengths, k, c in sizes(place)[:3]:

        def draw() -> list[Tensor | None]:
            coefficients, _, *rest = feature_inputs(lengths, k, c, rotation)  # noqa: B023
            return [coefficients, *rest]

        check(place, spectral_gradient_features, draw, [(sum(lengths), c)], disturbance=borne(lengths))


@pytest.mark.parametrize("rotation", [True, False])
def test_gradient_features(place: Place, rotation: bool) -> None:
    for lengths, _, c in sizes(place):
        shape = sum(lengths), c

        def draw() -> list[Tensor | None]:
            c = shape[1]  # noqa: B023
            gradients = normal(2, *shape, scale=c**-0.25)  # noqa: B023
            return [gradients, normal(c, c), normal(c, c) if rotation else None]

        check(place, gradient_features, draw, [shape])


@pytest.mark.parametrize("rotation", [True, False])
def test_diffusion_and_gradient_features(place: Place, rotation: bool) -> None:
    def both(
        x: Tensor, time: Tensor, a_re: Tensor, a_im: Tensor | None, ptr: Tensor, *operators: Any, backend: str
    ) -> Any:
        return diffusion_and_gradient_features(x, *operators, time, a_re, a_im, ptr, backend=backend)[1:]

    for lengths, k, c in sizes(place):
        v = sum(lengths)
        # What diffuses on one vertex has the same direction in all channels, and dA_im, which is about their angles, is
        # next to nothing.
        turns = rotation and v > 1

        def draw() -> list[Tensor | None]:
            _, evecs, pushed, a_re, a_im, ptr = feature_inputs(lengths, k, c, turns)  # noqa: B023
            mass, evals = normal(v).abs() * v**-0.5, normal(len(lengths), k).abs()  # noqa: B023
            x, time = normal(v, c), normal(c)  # noqa: B023 – some of the times are below 0
            return [x, time, a_re, a_im, ptr, mass, evals, evecs, pushed]

        check(place, both, draw, [(v, c)] * 2, constants=4, disturbance=borne(lengths))


def test_x_of_another_type_is_returned_as_it_is() -> None:
    _, evecs, pushed, a_re, a_im, ptr = feature_inputs((29,), 18, 5, True)
    half = [t.half() for t in (normal(29).abs() / 29, normal(1, 18).abs(), evecs, pushed, normal(5), a_re, a_im)]
    x = normal(29, 5).float()
    with torch.autocast("cpu", torch.float16):
        assert diffusion_and_gradient_features(x, *half, ptr, backend="triton")[0] is x


def test_operators_that_want_a_gradient_are_given_it() -> None:
    def draw() -> list[Tensor | None]:
        _, evecs, pushed, a_re, a_im, ptr = feature_inputs((9, 0, 20), 18, 5, True)
        return [
            normal(29, 5),
            normal(29).abs() * 29**-0.5,
            normal(3, 18).abs(),
            evecs,
            pushed,
            normal(5).abs(),
            a_re,
            a_im,
            ptr,
        ]

    check(Place("cpu", torch.float32, 1e-5), diffusion_and_gradient_features, draw, [(29, 5)] * 3)


def plain_mlp(
    x: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], open: Sequence[Tensor]
) -> Tensor:
    """Without dropout. Where its ReLUs are open is given: a sum next to 0 may have another sign in float64, and no
    gradient or all of it."""
    y = torch.cat(list(x), dim=-1)
    for i, weight in enumerate(weights):
        y = y if i == 0 else y * open[i - 1].to(y)
        y = torch.nn.functional.linear(y, weight, biases[i] if biases else None)
    return y


@pytest.mark.parametrize(
    ("parts", "hidden", "residual"),
    [
        (1, (), "none"),
        (1, (1,), "first input"),
        (2, (1,), "other"),
        (3, (), "first input"),
        (3, (1, 1), "first input"),
        (3, (2, 1), "other"),
        (4, (2, 1), "none"),
        (1, (0, 0), "none"),
        (2, (0, 0), "other"),
        (3, (0, 0), "first input"),
    ],
)
def test_mlp(place: Place, parts: int, hidden: tuple[int, ...], residual: str) -> None:
    """Layers of one width and of several, 0 being that of an input, for which there is a kernel of its own; a residual
    that is an input has the gradient of both."""
    layers = len(hidden) + 1
    opened: list[Tensor] = []

    def run(*tensors: Tensor, backend: str) -> Tensor:
        x, weights, biases = tensors[:parts], tensors[parts : parts + layers], tensors[parts + layers :][:layers]
        added = {"none": None, "first input": x[0], "other": tensors[-1]}[residual]
        if backend == "triton":
            return mlp(x, weights, biases, residual=added, backend=backend)
        out = plain_mlp(x, weights, biases, opened)
        return out if added is None else added + out

    for lengths, c, h in sizes(place):
        v, h = sum(lengths), c if residual == "first input" or hidden == (0, 0) else h
        widths = [parts * c, *(16 + n * h if n else c for n in hidden), h]

        def draw() -> list[Tensor]:
            weights = [normal(b, a, scale=a**-0.5) for a, b in pairwise(widths)]  # noqa: B023
            biases = [normal(b) for b in widths[1:]]  # noqa: B023
            inputs = [normal(v, c) for _ in range(parts)]  # noqa: B023
            opened[:] = open_units(place, inputs, weights, biases)
            return [*inputs, *weights, *biases, *([normal(v, h)] if residual == "other" else [])]  # noqa: B023

        check(place, run, draw, [(v, h)])


def open_units(
    place: Place, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    x, w, b = ([t.to(place.device, place.dtype) for t in group] for group in (inputs, weights, biases))
    x = x if len(x) <= MOST_INPUTS else [torch.cat(x, dim=-1)]  # as `mlp` gives them, for the order of the sums
    return [h > 0 for h in _mlp_implementation(x, w, b, None, False, 0.0, None, True)[1:]]


def test_hidden_layers_are_kept_for_gradients_only(roomy: Place) -> None:
    """In one kernel, and in one for each layer."""
    for hidden in ((18, 18), (21, 5)):
        widths = [18, *hidden, 18]
        x, *weights = (
            normal(*shape).to(roomy.device, roomy.dtype) for shape in [(63, 18), *map(reversed, pairwise(widths))]
        )
        out, *kept = _mlp_implementation([x], weights, [], None, True, 0.0, None, True)
        assert [h.shape for h in kept] == [(63, width) for width in hidden]
        assert [torch.equal(y, out) for y in _mlp_implementation([x], weights, [], None, True, 0.0, None, False)] == [True]
        leaves = [weight.requires_grad_() for weight in weights]
        assert torch.equal(mlp([x], leaves, residual=x, backend="triton"), out)
        with torch.no_grad():
            assert torch.equal(mlp([x], leaves, residual=x, backend="triton"), out)


def test_mlp_without_biases(place: Place) -> None:
    opened: list[Tensor] = []

    def run(x: Tensor, *weights: Tensor, backend: str) -> Tensor:
        if backend == "triton":
            return mlp([x], weights, backend=backend)
        return plain_mlp([x], weights, [], opened)

    def draw() -> list[Tensor]:
        x, *weights = normal(63, 18), normal(21, 18), normal(5, 21, scale=0.2)
        opened[:] = open_units(place, [x], weights, [])
        return [x, *weights]

    check(place, run, draw, [(63, 5)])


def test_plain_mlp() -> None:
    x, layers = torch.randn(7, 5), [torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)]
    expected = layers[1](torch.relu(layers[0](x)))
    assert torch.equal(mlp([x], [n.weight for n in layers], [n.bias for n in layers]), expected)


def test_operands(place: Place) -> None:
    """Small matrices of any layout and type in the type of the products, or in two parts."""
    matrices = [normal(40, 70).mT, normal(1, 1), normal(0, 3), normal(5, 3)]
    precision = "bf16x3" if place.tf32 else "ieee"
    for dtypes in [(torch.float32,) * 4, (torch.float32, torch.float16, torch.float32, torch.float32)]:
        given = [m.to(place.device, dtype) for m, dtype in zip(matrices, dtypes, strict=True)]
        for found, m in zip(operands(given, place.dtype, precision), given, strict=True):
            assert found.is_contiguous()
            if place.tf32:
                assert found.dtype == torch.bfloat16
                torch.testing.assert_close(found[0].float(), m.float(), rtol=2**-8, atol=0)
                torch.testing.assert_close(found.float().sum(0), m.float(), rtol=2**-15, atol=0)
            else:
                assert torch.equal(found, m.to(place.dtype))
    assert operands([], place.dtype, precision) == []


def test_inputs_that_want_no_gradient(roomy: Place) -> None:
    x, weight = (normal(n, 5).to(roomy.device, roomy.dtype) for n in (29, 4))
    weight.requires_grad_()
    out = mlp([x], [weight], residual=x[:, :4].clone().requires_grad_(), backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert relative(grad, x.detach().cpu().double().sum(0).expand(4, 5)) <= roomy.bound


# ---- shapes and layouts ----


def slowest(x: Tensor) -> Tensor:
    """The same values with the first dimension innermost in memory."""
    return x.mT.contiguous().mT


def strided(x: Tensor) -> Tensor:
    """The same values as every other column of something wider."""
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1).flatten(-2)[..., ::2]


def widened(x: Tensor) -> Tensor:
    """The same values as the first columns of something wider."""
    return torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]]


@pytest.mark.parametrize("layout", [slowest, strided, widened])
def test_inputs_that_are_not_contiguous(roomy: Place, layout: Callable[[Tensor], Tensor]) -> None:
    """One after the other, so that a stride taken from another tensor shows."""
    ptr, deep = pointer((9, 0, 20)), [normal(7, 10), normal(5, 7)]
    coefficients, evecs, pushed, a_re, a_im, _ = feature_inputs((9, 0, 20), 18, 5, True)
    x, gradients, weight = normal(29, 5), normal(2, 29, 5, scale=0.3), normal(21, 5)
    cases: list[tuple[Operation, list[Tensor | None], int]] = [
        (to_spectral, [x, evecs, normal(29).abs(), ptr, None], 1),
        (from_spectral, [coefficients, evecs, ptr, None], 1),
        (values_and_gradient_features, [coefficients, evecs, pushed, a_re, a_im, ptr], 2),
        (gradient_features, [gradients, a_re, a_im], 1),
        (lambda x, w, backend: mlp([x], [w, w @ w.mT], backend=backend), [x, weight], 1),
        (lambda x, *w, backend: mlp([x, x], w, residual=x, backend=backend), [x, *deep], 1),
    ]
    for operation, inputs, count in cases:
        placed = [
            x if x is None else x.to(roomy.device, roomy.dtype if x.is_floating_point() else None) for x in inputs
        ]
        expected = operation(*placed, backend="triton")
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert len(expected) == count
        for i, given in enumerate(placed):
            if given is None or given.ndim < 2:
                continue
            changed = [layout(x) if i == j else x for j, x in enumerate(placed)]
            assert not changed[i].is_contiguous()
            got = operation(*changed, backend="triton")
            for a, b in zip(got if isinstance(got, tuple) else (got,), expected, strict=True):
                assert relative(a, b.detach().cpu().double()) <= roomy.bound


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, slowest, widened])
def test_gradients_of_x_meet(place: Place, layout: Callable[[Tensor], Tensor]) -> None:
    """That of the x which is returned, of any layout, is added to that of what is computed of it."""
    for lengths, k, c in sizes(place)[1:4]:
        v = sum(lengths)
        _, evecs, pushed, a_re, a_im, ptr = feature_inputs(lengths, k, c, True)
        inputs = normal(v, c), normal(v).abs() / v, normal(len(lengths), k).abs(), evecs, pushed, normal(c), a_re, a_im
        x, *rest = (t.to(place.device, place.dtype) for t in inputs)
        x.requires_grad_()
        outs = diffusion_and_gradient_features(x, *rest, ptr.to(place.device), backend="triton")
        assert torch.equal(outs[0], x)
        grads = [layout(normal(v, c).to(x)) for _ in outs]
        (apart,) = torch.autograd.grad(outs[1:], x, grads[1:], retain_graph=True)
        (together,) = torch.autograd.grad(outs, x, grads)
        assert relative(together, apart.detach().double() + grads[0].double()) <= place.bound
        assert not torch.equal(together, apart)


@pytest.mark.parametrize("layout", [slowest, strided, widened, lambda x: x[:1, :1].expand_as(x)])
def test_gradients_that_are_not_contiguous(roomy: Place, layout: Callable[[Tensor], Tensor]) -> None:
    def grads(output_grad: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        ptr = pointer((9, 0, 20)).to(roomy.device)
        inputs = [
            x if x is None else x.to(roomy.device, roomy.dtype) for x in feature_inputs((9, 0, 20), 18, 5, True)[:5]
        ]
        leaves = [x.requires_grad_() for x in inputs]
        values, features = values_and_gradient_features(*inputs, ptr, backend="triton")
        spectrum = to_spectral(values, leaves[1], leaves[1][:, 0].abs(), ptr, backend="triton")
        hidden = mlp([features], [leaves[3], leaves[4]], residual=features, backend="triton")
        out = from_spectral(
            diffuse(spectrum, spectrum[..., 0] ** 2, leaves[3][0].abs(), "triton"), leaves[1], ptr, backend="triton"
        )
        direct = gradient_features(torch.stack([values, features]) / 4, leaves[3], leaves[4], backend="triton")
        outs = [values, features, hidden, out, direct]
        return list(torch.autograd.grad(outs, leaves, [output_grad.to(o.dtype) for o in outs]))

    output_grad = layout(normal(29, 5).to(roomy.device, roomy.dtype))
    assert not output_grad.is_contiguous()
    for a, b in zip(grads(output_grad), grads(output_grad.contiguous()), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=False)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_vertices(roomy: Place, lengths: tuple[int, ...]) -> None:
    inputs = [
        x.to(roomy.device, roomy.dtype if x.is_floating_point() else None) for x in feature_inputs(lengths, 3, 5, True)
    ]
    *leaves, ptr = inputs
    for leaf in leaves:
        leaf.requires_grad_()
    _, evecs, _, a_re, a_im = leaves
    values, features = values_and_gradient_features(*leaves, ptr, backend="triton")
    assert values.shape == features.shape == (0, 5)
    spectrum = to_spectral(values, evecs, evecs[:, 0], ptr, backend="triton")
    assert spectrum.shape == (len(lengths), 3, 5)
    assert (spectrum == 0).all()
    hidden = mlp([values, features], [values.new_ones(2, 10), values.new_ones(5, 2)], residual=values, backend="triton")
    direct = gradient_features(torch.stack([values, features]), a_re, a_im, backend="triton")
    total = hidden.sum() + direct.sum() + spectrum.sum()
    for grad in torch.autograd.grad(total, leaves):
        assert (grad == 0).all()


def test_no_eigenpairs(roomy: Place) -> None:
    """K = 0: nothing is left of a function but zeros."""
    ptr = pointer((5, 2)).to(roomy.device)
    coefficients, evecs, pushed, a_re, a_im, _ = (x.to(roomy.device) for x in feature_inputs((5, 2), 1, 4, True))
    empty = (coefficients[:, :0], evecs[:, :0], pushed[..., :0], a_re, a_im)
    values, features = values_and_gradient_features(*(x.to(roomy.dtype) for x in empty), ptr, backend="triton")
    assert (values == 0).all()
    assert (features == 0).all()
    assert to_spectral(
        values, evecs[:, :0].to(roomy.dtype), evecs[:, 0].to(roomy.dtype), ptr, backend="triton"
    ).shape == (2, 0, 4)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_either_index_type(index: torch.dtype) -> None:
    x, evecs, mass, ptr = spectral_inputs((9, 0, 20), 18, 5)
    inputs = (x.float(), evecs.float(), mass.float())
    out = to_spectral(*inputs, ptr.to(index), backend="triton")
    assert relative(out, to_spectral(*(t.double() for t in inputs), ptr)) < 1e-5


# ---- what published kernels for this got wrong ----


def test_every_part_of_the_sum_is_there(place: Place) -> None:
    """Ones, of which any share left out, or read twice, changes the sums: several spans, tiles of K, tiles of C."""
    v, k, c = (100, 20, 18) if place.device == "cpu" else (50_000, 300, 200)
    ones = [torch.ones(*shape, device=place.device, dtype=place.dtype) for shape in ((v, c), (v, k), (v,))]
    ptr = pointer((v,)).to(place.device)
    x, evecs, mass = ones
    out = to_spectral(x, evecs, mass, ptr, backend="triton")
    assert (out == v).all(), out.unique()
    # dD of Σ f at D = 0 and A = 1 is 0, so look at dP: with g = 1 and b = 0, every entry counts the vertices.
    d = torch.full((1, k, c), 1 / k, device=place.device)
    pushed = torch.stack([evecs, torch.zeros_like(evecs)])
    a_re = torch.zeros(c, c, device=place.device, requires_grad=True)
    spectral_gradient_features(d, pushed, a_re, None, ptr, backend="triton").sum().backward()
    bound = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}[place.dtype]
    assert a_re.grad is not None
    torch.testing.assert_close(a_re.grad, torch.full_like(a_re, v), rtol=max(bound, place.bound), atol=0)


def test_weight_gradients_are_not_transposed(place: Place) -> None:
    """A single nonzero of A's gradient shows where it stands."""
    ptr = pointer((1,)).to(place.device)
    d = torch.zeros(1, 1, 4)
    d[0, 0, 1], d[0, 0, 2] = 0.5, 2.0  # x = 0 in channels 0 and 3
    pushed = torch.tensor([[[1.0]], [[0.0]]])
    a_re = torch.zeros(4, 4, device=place.device, dtype=place.dtype, requires_grad=True)
    f = spectral_gradient_features(
        d.to(place.device, place.dtype), pushed.to(place.device, place.dtype), a_re, None, ptr, backend="triton"
    )
    (grad,) = torch.autograd.grad(f[0, 1], a_re)  # f₁ = tanh(g₁ Σⱼ A₁ⱼ gⱼ), so dA₁ⱼ = g₁ gⱼ
    expected = torch.zeros(4, 4)
    expected[1, 1], expected[1, 2] = 0.25, 1.0
    torch.testing.assert_close(grad.cpu().float(), expected, rtol=place.bound, atol=0)


@pytest.mark.parametrize("size", [20.0, 45.0, 89.0, 1e4])
def test_features_of_large_gradients_are_finite(place: Place, size: float) -> None:
    """(e²ᶻ − 1)/(e²ᶻ + 1) is NaN from z ≈ 45. Here z = ± size."""
    ptr = pointer((1,)).to(place.device)
    a = torch.diag(torch.tensor([1.0, -1.0])).to(place.device, place.dtype).requires_grad_()
    gradient = torch.tensor([[[size**0.5]], [[0.0]]]).to(place.device, place.dtype)
    d = torch.ones(1, 1, 2).to(place.device, place.dtype).requires_grad_()
    on_basis = spectral_gradient_features(d, gradient, a, None, ptr, backend="triton")
    direct = gradient_features(gradient.expand(2, 1, 2), a, None, backend="triton")
    for f in (on_basis, direct):
        torch.testing.assert_close(f.cpu().float(), torch.tensor([[1.0, -1.0]]))
        grads = torch.autograd.grad(f.sum(), (d, a), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in grads)


def test_tanh_of_small_arguments_keeps_its_digits() -> None:
    """1 − e⁻²ᶻ has none left at z = 1e-7."""
    ptr = pointer((1,))
    for z in (1e-12, 1e-7, 1e-4, 0.01, 0.2, 0.249, 0.251, 0.5, 3.0):
        root = torch.tensor(z).sqrt()
        gradient = torch.stack([root, torch.zeros(())]).reshape(2, 1, 1)
        f = spectral_gradient_features(torch.ones(1, 1, 1), gradient, torch.ones(1, 1), None, ptr, backend="triton")
        expected = torch.tanh(root.double() ** 2)
        assert abs(f.item() / expected.item() - 1) < 1e-6, z


def test_low_precision_is_what_computes() -> None:
    """Under autocast the operands are rounded before the products, not after: the result is that of rounded inputs."""
    lengths = (20, 0, 3)
    d, evecs, pushed, a_re, a_im, ptr = (
        x.float() if x.is_floating_point() else x for x in feature_inputs(lengths, 20, 18, True)
    )
    x, _, mass, _ = (t.float() for t in spectral_inputs(lengths, 20, 18))
    w, out = normal(21, 18).float(), normal(5, 21).float()
    with torch.autocast("cpu", torch.float16):
        cast = [
            to_spectral(x, evecs, mass, ptr, backend="triton"),
            from_spectral(d, evecs, ptr, backend="triton"),
            *values_and_gradient_features(d, evecs, pushed, a_re, a_im, ptr, backend="triton"),
            mlp([x], [w, out], backend="triton"),
        ]
    x, evecs, pushed = x.half(), evecs.half(), pushed.half()
    rounded = [
        to_spectral(x, evecs, mass, ptr, backend="triton"),
        from_spectral(d, evecs, ptr, backend="triton"),
        *values_and_gradient_features(d, evecs, pushed, a_re, a_im, ptr, backend="triton"),
        mlp([x], [w.half(), out.half()], backend="triton"),
    ]
    for a, b in zip(cast, rounded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert [t.dtype for t in cast] == [torch.float32, *[torch.float16] * 4]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tf32_takes_each_number_in_two_parts(device: str) -> None:
    """(1 + e)(1 + e) = 1 + 2e + e² of bfloat16 parts 1 and e, but for the last term: bfloat16 has 8 bits, e is 2⁻¹⁰.
    Rounded to bfloat16 it would be 1, and tf32 has e² as well."""
    ptr, x = pointer((1,)).to(device), torch.full((1, 1), 1 + 2**-10, device=device)
    results = {}
    before = torch.get_float32_matmul_precision()
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        results[precision] = [
            to_spectral(x, x, torch.ones(1, device=device), ptr, backend="triton").item(),
            from_spectral(x[None], x, ptr, backend="triton").item(),
            mlp([x], [x], backend="triton").item(),
        ]
    torch.set_float32_matmul_precision(before)
    assert results == {"high": [1 + 2**-9] * 3, "highest": [1 + 2**-9 + 2**-20] * 3}


def test_sums_are_the_same_in_every_run(roomy: Place) -> None:
    lengths = (70, 0, 33) if roomy.device == "cpu" else (50_000, 0, 20_001)
    inputs = [
        x.to(roomy.device, roomy.dtype if x.is_floating_point() else None)
        for x in feature_inputs(lengths, 20, 18, True)
    ]
    leaves = [x.requires_grad_() for x in inputs[:5]]
    values, features = values_and_gradient_features(*inputs, backend="triton")
    hidden = mlp([values, features], [leaves[3].repeat(1, 2), leaves[4]], residual=values, backend="triton")
    grad = normal(sum(lengths), 18).to(hidden)
    first, second = (torch.autograd.grad(hidden, leaves, grad, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_areas_that_float16_cannot_hold() -> None:
    """Of a mesh of 10⁵ vertices and area 1e-2, say; without a scale they would round to 0."""
    v = 60
    x, evecs = normal(v, 5).half(), normal(v, 4).half()
    mass = torch.full((v,), 1e-7)
    out = to_spectral(x, evecs, mass, pointer((v,)), backend="triton")
    assert relative(out, to_spectral(x.double(), evecs.double(), mass.double(), pointer((v,)))) < 1e-2


# ---- dropout ----


def test_dropout(roomy: Place) -> None:
    v, h, p = (320, 48, 0.3) if roomy.device == "cpu" else (20_000, 130, 0.3)
    x = torch.ones(v, h, device=roomy.device, dtype=roomy.dtype, requires_grad=True)
    weight = torch.eye(h, device=roomy.device, dtype=roomy.dtype)
    torch.manual_seed(1)
    out = mlp([x], [weight, weight], dropout=p, backend="triton")
    kept = out.detach().float() > 0
    torch.testing.assert_close(out[kept].float(), torch.full_like(out[kept], 1 / (1 - p)).float(), rtol=1e-2, atol=0)
    # Shares of n independent draws lie within 5 σ of p: of all, of each row and of each column.
    for shares, n in ((kept.float().mean()[None], v * h), (kept.float().mean(0), v), (kept.float().mean(1), h)):
        assert (shares - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5
    # Neighbours in a row or a column, and columns far apart, are not alike.
    centered = kept.float() - (1 - p)
    for a, b in (
        (centered[1:], centered[:-1]),
        (centered[:, 1:], centered[:, :-1]),
        (centered[:, 16:], centered[:, :-16]),
    ):
        assert (a * b).mean().abs() < 5 * p * (1 - p) / a.numel() ** 0.5
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad.float(), out.detach().float(), rtol=1e-2, atol=0)
    torch.manual_seed(1)
    assert torch.equal(mlp([x], [weight, weight], dropout=p, backend="triton"), out)
    assert not torch.equal(mlp([x], [weight, weight], dropout=p, backend="triton"), out)


def test_dropout_in_one_kernel_and_in_several(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's MLP drops the same units by either way, and both have its gradients."""
    v, c = (100, 18) if place.device == "cpu" else (50_000, 60)
    shapes = [(v, c)] * 3 + [(c, 3 * c), (c, c), (c, c), (c,), (c,), (c,)]
    leaves = [normal(*shape, scale=shape[-1] ** -0.5).to(place.device, place.dtype) for shape in shapes]
    for leaf in leaves:
        leaf.requires_grad_()
    grad = normal(v, c).to(place.device, place.dtype)

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        out = mlp(leaves[:3], leaves[3:6], leaves[6:], dropout=0.3, residual=leaves[0], backend="triton")
        return [out, *torch.autograd.grad(out, leaves, grad)]

    # On a GPU, float32 without matrix units has a kernel for each layer.
    in_one = place.device == "cpu" or place.dtype != torch.float32 or place.tf32
    assert bool(forward_tiling(leaves[:3], leaves[3:6], True)) == in_one
    assert bool(backward_tiling(leaves[:3], leaves[3:6])) == in_one
    together = run()
    for name in ("forward", "backward"):
        monkeypatch.setattr(f"diffnet.ops.mlp.kernels.{name}_tiling", lambda *_: None)
    for a, b in zip(together, run(), strict=True):
        assert relative(a, b.detach().double().cpu()) <= place.bound


def test_dropout_out_of_range() -> None:
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match=str(p)):
            mlp([torch.ones(2, 2)], [torch.ones(2, 2)], dropout=p)


def test_weights_and_biases_that_do_not_pair() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match="got 0 and none"):
        mlp([x], [])
    with pytest.raises(ValueError, match="got 1 and 2"):
        mlp([x], [x], [x[0], x[0]])


# ---- operators of torch.library ----


def test_operators_are_well_formed(roomy: Place) -> None:
    """Fake implementations, autograd and aliasing, as torch.compile and torch.export rely on them."""

    def leaf(*shape: int, dtype: torch.dtype = roomy.dtype) -> Tensor:
        return torch.randn(*shape, device=roomy.device, dtype=dtype, requires_grad=True)

    ops, ptr = torch.ops.diffnet, pointer((9, 0, 8)).to(roomy.device)
    x, evecs, mass, pushed = leaf(17, 5), leaf(17, 3), leaf(17), leaf(2, 17, 3)
    d, evals, time = leaf(3, 3, 5, dtype=torch.float32), torch.rand(3, 3, device=roomy.device), leaf(5)
    torch.library.opcheck(ops.project.default, (x, evecs, mass, ptr))
    torch.library.opcheck(ops.project.default, (x, evecs, None, ptr))
    torch.library.opcheck(ops.diffuse.default, (leaf(3, 3, 5, dtype=torch.float32), leaf(3, 3), leaf(5)))
    torch.library.opcheck(ops.evaluate.default, (d, evecs, mass, ptr))
    a, b, (fixed_evecs, fixed_mass, fixed_pushed) = leaf(5, 5), leaf(5, 5), (t.detach() for t in (evecs, mass, pushed))
    torch.library.opcheck(ops.spectral_gradient_features.default, (d, a, b, evecs, pushed, ptr))
    torch.library.opcheck(ops.spectral_gradient_features.default, (d, a, None, None, pushed, ptr))
    operators = (fixed_mass, evals, fixed_evecs, fixed_pushed)
    torch.library.opcheck(ops.diffusion_features.default, (x, *operators, time, a, b, ptr))
    torch.library.opcheck(ops.diffusion_features.default, (x, *operators, time, a, None, ptr))
    fixed_x, fixed_d, fixed_a, fixed_time = (t.detach() for t in (x, d, a, time))
    for turned in (None, fixed_a):
        table = torch.zeros(2 if turned is None else 3, *d.shape, device=roomy.device, dtype=roomy.dtype)
        saved = (fixed_d, fixed_a, turned, table, fixed_evecs, fixed_pushed, ptr)
        torch.library.opcheck(ops.spectral_gradient_features_backward.default, (fixed_x, fixed_x, *saved))
        torch.library.opcheck(ops.spectral_gradient_features_backward.default, (None, fixed_x, *saved))
        saved = (*operators, fixed_time, fixed_a, turned, ptr, fixed_d, fixed_d, table)
        for passed in (None, fixed_x):
            torch.library.opcheck(ops.diffusion_features_backward.default, (fixed_x, fixed_x, *saved, passed))
    torch.library.opcheck(ops.gradient_features.default, (leaf(2, 17, 5), a, leaf(5, 5)))
    torch.library.opcheck(
        ops.gradient_features_pointwise_backward.default, (x.detach(), leaf(2, 17, 5).detach(), a.detach(), None)
    )
    seeds = torch.randint(2**31, (1, 2), device=roomy.device)
    inputs, weights, biases = [x, leaf(17, 5)], [leaf(4, 10), leaf(6, 4)], [leaf(4), leaf(6)]
    torch.library.opcheck(ops.mlp.default, (inputs, weights, biases, leaf(17, 6), False, 0.5, seeds, True))
    torch.library.opcheck(ops.mlp.default, ([x], [leaf(5, 5)], [], None, True, 0.0, None, True))
    torch.library.opcheck(ops.mlp.default, ([fixed_x], [leaf(4, 5)], [], None, False, 0.0, None, False))
    constants = [[t.detach() for t in group] for group in (inputs, weights)]
    hidden = [torch.randn(17, 4, device=roomy.device, dtype=roomy.dtype)]
    for need_inputs in (True, False):
        grad = torch.randn(17, 6, device=roomy.device, dtype=roomy.dtype)
        torch.library.opcheck(ops.mlp_backward.default, (grad, *constants, hidden, False, 0.5, need_inputs))


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


def test_gradients_that_cannot_be_differentiated_say_so() -> None:
    """Rather than pass for constants."""
    d, evecs, pushed, a_re, a_im, ptr = (
        t.float() if t.is_floating_point() else t for t in feature_inputs((9, 0, 8), 3, 5, True)
    )
    x, w, operators = (
        normal(17, 5).float(),
        normal(5, 5).float(),
        (normal(17).abs().float(), normal(3, 3).abs().float()),
    )
    cases: list[tuple[Callable[..., Any], Tensor]] = [
        (lambda x: mlp([x], [w, w], backend="triton"), x),
        (lambda d: spectral_gradient_features(d, pushed, a_re, a_im, ptr, backend="triton"), d),
        (lambda a: gradient_features(pushed, a, None, backend="triton"), normal(3, 3).float()),
        (
            lambda x: diffusion_and_gradient_features(
                x, *operators, evecs, pushed, x[0].detach(), a_re, a_im, ptr, backend="triton"
            )[2],
            x,
        ),
    ]
    for operation, leaf in cases:
        leaf.requires_grad_()
        (grad,) = torch.autograd.grad(operation(leaf).square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="autograd"):
            torch.autograd.grad(grad.square().sum(), leaf)


# ---- the choice of a backend ----


def test_the_cpu_computes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffnet.ops.spectral.op.project_operator", None)  # would fail if it were called
    x, evecs, mass, ptr = (t.float() if t.is_floating_point() else t for t in spectral_inputs((5,), 3, 2))
    torch.testing.assert_close(to_spectral(x, evecs, mass, ptr)[0], evecs.T @ (mass[:, None] * x))


def test_float64_is_not_for_kernels() -> None:
    with pytest.raises(ValueError, match="float64"):
        to_spectral(*spectral_inputs((5,), 3, 2), backend="triton")


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="'cuda'"):
        to_spectral(*spectral_inputs((5,), 3, 2), backend="cuda")


def test_the_interpreter_says_that_it_has_no_bfloat16() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    x, evecs, mass, ptr = spectral_inputs((5,), 3, 2)
    with pytest.raises(RuntimeError, match="bfloat16"):
        to_spectral(x.bfloat16(), evecs.bfloat16(), mass.float(), ptr, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("c", [36, 200])
def test_to_spectral_of_large_meshes(c: int) -> None:
    """Which have tiles of their own."""
    x, evecs, mass, ptr = spectral_inputs((300_007, 0, 200_001), 100, c)
    x, evecs, mass = (t.to("cuda", torch.bfloat16) for t in (x, evecs, mass))
    spectrum = to_spectral(x, evecs, mass, ptr.cuda(), backend="triton")
    expected = to_spectral(x.double(), evecs.double(), mass.double(), ptr.cuda(), backend="torch")
    assert relative(spectrum, expected.cpu()) <= 1e-2


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31() -> None:
    """V·C and V·K of 2.2e9 elements: rows at the end are as right as those at the start."""
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
