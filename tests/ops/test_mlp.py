"""`mlp`: kernels against plain PyTorch, hidden layers, dropout, and the weight operands of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_accuracy import PLACES, Place, at_places, check, normal, pointer, relative, sizes
from refusals import refused
from torch import Tensor

from diffnet.ops import mlp
from diffnet.ops.common import matmul
from diffnet.ops.common.matmul import operands
from diffnet.ops.common.tiling import Tiling, on_hopper
from diffnet.ops.definition import BlockArguments
from diffnet.ops.diffusion_features import op as block
from diffnet.ops.diffusion_features.op import diffusion_block
from diffnet.ops.mlp import kernels, linear_kernels
from diffnet.ops.mlp.dropout_kernels import threshold_and_scale, word_count
from diffnet.ops.mlp.linear_kernels import inputs_backward, linear, linear_backward
from diffnet.ops.mlp.op import MAX_INPUTS, mlp_forward

pytest.importorskip("triton")

from diffnet.ops.common.spans import sum_spans
from diffnet.ops.mlp.weight_gradient_kernels import Projection, weight_gradients

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


def test_plain_mlp() -> None:
    x, layers = torch.randn(7, 5), [torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)]
    expected = layers[1](torch.relu(layers[0](x)))
    assert torch.equal(mlp([x], [n.weight for n in layers], [n.bias for n in layers]), expected)


def mlp_with_given_units(
    x: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], active: Sequence[Tensor]
) -> Tensor:
    """An MLP without dropout whose active hidden units are given.

    A sum close to 0 may have another sign in float64, and then its unit has no gradient or all of it.
    """
    y = torch.cat(list(x), dim=-1)
    for i, weight in enumerate(weights):
        y = y if i == 0 else y * active[i - 1].to(y)
        y = torch.nn.functional.linear(y, weight, biases[i] if biases else None)
    return y


def active_units(
    place: Place, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> list[Tensor]:
    x, w, b = ([place.put(t) for t in group] for group in (inputs, weights, biases))
    x = x if len(x) <= MAX_INPUTS else [torch.cat(x, dim=-1)]  # as `mlp` does, so sums have the same order
    return [h > 0 for h in mlp_forward(x, w, [], b, None, False, 0.0, None, True)[1:]]


# The number of inputs, the hidden widths and the residual.
CASES = {
    "linear": (1, (), "none"),
    "linear-without-bias": (1, (), "no bias"),
    "1-input-2-layers-skip": (1, (1,), "first input"),
    "1-input-2-layers-without-biases": (1, (1,), "no bias"),
    "2-inputs-2-layers-residual": (2, (1,), "other"),
    "3-inputs-linear-skip": (3, (), "first input"),
    "3-inputs-3-widths-residual": (3, (2, 1), "other"),
    "4-inputs-3-widths": (4, (2, 1), "none"),
    "1-input-one-kernel": (1, (0, 0), "none"),
    "2-inputs-one-kernel-residual": (2, (0, 0), "other"),
    "3-inputs-one-kernel-skip": (3, (0, 0), "first input"),
}


@at_places("parts,hidden,residual", CASES, ["3-inputs-3-widths-residual", "3-inputs-one-kernel-skip"])
def test_mlp(place: Place, parts: int, hidden: tuple[int, ...], residual: str) -> None:
    """Layers of one width and of several. A hidden width of 0 stands for the width of an input.

    Three layers of that width have a kernel of their own. A residual that is an input gets both gradients.
    """
    layers = len(hidden) + 1
    active: list[Tensor] = []

    def run(*tensors: Tensor, backend: str) -> Tensor:
        x, weights, biases = tensors[:parts], tensors[parts : parts + layers], tensors[parts + layers :][:layers]
        added = {"first input": x[0], "other": tensors[-1]}.get(residual)
        if backend == "triton":
            return mlp(x, weights, biases or None, residual=added, backend=backend)
        out = mlp_with_given_units(x, weights, biases, active)
        return out if added is None else added + out

    for lengths, c, h in sizes(place)[-1:] if place.device == "cpu" else sizes(place):
        v, h = sum(lengths), c if residual == "first input" or hidden == (0, 0) else h
        widths = [parts * c, *(16 + n * h if n else c for n in hidden), h]

        def draw() -> list[Tensor]:
            weights = [normal(b, a, scale=a**-0.5) for a, b in pairwise(widths)]  # noqa: B023
            biases = [] if residual == "no bias" else [normal(b) for b in widths[1:]]  # noqa: B023
            inputs = [normal(v, c) for _ in range(parts)]  # noqa: B023
            active[:] = active_units(place, inputs, weights, biases)
            return [*inputs, *weights, *biases, *([normal(v, h)] if residual == "other" else [])]  # noqa: B023

        check(place, run, draw, [(v, h)])


def layers_in_float32(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor], residual: Tensor | None
) -> list[Tensor]:
    """The output and the hidden layers, which are rounded to the inputs' dtype."""
    y, outs = torch.cat(list(inputs), dim=-1), []
    for i, weight in enumerate(weights):
        y = torch.nn.functional.linear(y.float(), weight.float(), biases[i] if biases else None)
        if i < len(weights) - 1:
            y = torch.relu(y).to(inputs[0].dtype)
        outs.append(y)
    return [outs[-1] if residual is None else outs[-1] + residual, *outs[:-1]]


def gradients_in_float32(
    grad: Tensor, parts: int, weights: Sequence[Tensor], hidden: Sequence[Tensor], skip: bool, scale: float
) -> list[Tensor]:
    """The gradients of the inputs, and of each layer's output before its activation, rounded to the dtype of `grad`."""
    grads = [grad]
    for weight, layer in zip(weights[:0:-1], hidden[::-1], strict=True):
        y = torch.where(layer > 0, scale * (grads[0].float() @ weight.float()), 0.0)
        grads.insert(0, y.to(grad.dtype))
    of_inputs = list((grads[0].float() @ weights[0].float()).tensor_split(parts, dim=1))
    if skip:
        of_inputs[0] = of_inputs[0] + grad
    return [*of_inputs, *grads]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("parts", "dtype"),
    [(1, torch.bfloat16), (2, torch.float16), (3, torch.bfloat16), (3, torch.float16)],
    ids=["1-bf16", "2-fp16", "3-bf16", "3-fp16"],
)
def test_kernels_for_hopper(parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute three layers, drop the units that the kernels for other GPUs drop, and read rows of any alignment.

    Each line of `cases` is compiled by itself, which takes most of the time.
    """
    wide = [torch.randn(1003, 300, device="cuda").to(dtype) for _ in range(parts)]
    if not on_hopper(wide[0]):
        pytest.skip("these kernels run on Hopper")
    weights = [(torch.randn(128, n * 128, device="cuda") * n**-0.5 / 8).to(dtype) for n in (parts, 1, 1)]
    biases = [torch.randn(128, device="cuda") for _ in range(3)]
    seeds = torch.randint(2**31, (2, 2), device="cuda")
    apart, unaligned, few = [x[:, :128] for x in wide], [x[:, 1:129] for x in wide], [x[:5, :128] for x in wide]
    cases: list[tuple[list[Tensor], Tensor | None, float, bool]] = [
        (apart, apart[0], 0.3, True),
        (apart, unaligned[0], 0.5, False),
        (unaligned, unaligned[-1], 0.0, False),
        ([x.contiguous() for x in few], None, 0.0, False),
    ]
    for inputs, residual, p, skip in cases:
        seed = seeds if p else None
        outs = kernels.forward(inputs, weights, biases, residual, p, seed, True)
        if seed is None:
            expected = layers_in_float32(inputs, weights, biases, residual)
        else:
            with monkeypatch.context() as patch:
                # A private name, since nothing else takes the kernels for other GPUs on this one.
                patch.setattr(kernels, "fits_hopper", lambda *_: False)
                expected = kernels.forward(inputs, weights, biases, residual, p, seed, True)
        *outs, signs = outs
        assert all(relative(out, other) <= 5e-3 for out, other in zip(outs, expected, strict=True))
        for out, other in zip(outs[1:], expected[1:], strict=True):
            assert ((out == 0) != (other == 0)).double().mean() <= 2e-3
        found, layers = kernels.backward(inputs[0], inputs, weights, [*outs[1:], signs], skip, p, True)
        scale = threshold_and_scale(p)[1]
        same = gradients_in_float32(inputs[0], parts, weights, outs[1:], skip, scale)
        assert all(relative(grad, other) <= 5e-3 for grad, other in zip([*found, *layers], same, strict=True))
        if residual is not None:
            (only,) = kernels.forward(inputs, weights, biases, residual, p, seed, False)
            assert torch.equal(only, outs[0])
    (no_bias,) = kernels.forward(inputs, weights, [], None, 0.0, None, False)
    assert relative(no_bias, layers_in_float32(inputs, weights, [], None)[0]) <= 5e-3
    nan = torch.full_like(inputs[0], float("nan"))
    assert kernels.forward([nan] * parts, weights, [], None, 0.0, None, False)[0].isnan().all()
    empty = [x[:0] for x in inputs]
    assert kernels.forward(empty, weights, [], None, 0.0, None, False)[0].shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "column"),
    [(torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float16, 344)],
    ids=["bf16", "bf16-unaligned", "fp16"],
)
def test_layers_for_hopper(dtype: torch.dtype, column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute what the kernel for other GPUs computes, drop the same units, and read rows of any alignment."""
    wide = torch.randn(30_003, 600, device="cuda").to(dtype)
    if not on_hopper(wide):
        pytest.skip("these kernels run on Hopper")
    weight = (torch.randn(256, 768, device="cuda") / 16).to(dtype)
    square, bias = weight[:, :256].contiguous(), torch.randn(256, device="cuda")
    seed = torch.randint(2**31, (2,), device="cuda")

    def layers(x: Tensor, other: Tensor) -> list[Tensor]:
        """Layers forward, then the gradients of a layer's input and of a layer on several inputs."""
        return [
            linear([x], square, bias, activation=True, dropout=0.3, seed=seed),
            linear([x], square, None, activation=True),
            linear([x], square, bias, residual=other),
            linear_backward(x, square, hidden=other.relu(), dropout=0.3),
            *inputs_backward(x, square, 1, other),
            *inputs_backward(x, weight[:, :512].contiguous(), 2, None),
            *inputs_backward(x, weight, 3, other),
        ]

    for rows in (30_003, 1003, 65, 5, 0):
        x, other = wide[:rows, column : column + 256], wide[:rows, 344 - column : 600 - column]
        results = []
        for hopper in (True, False):
            # A private name, since nothing else takes the kernel for other GPUs on this one, or this one for few rows.
            monkeypatch.setattr(linear_kernels, "_fits_hopper", lambda *_, hopper=hopper: hopper)
            results.append(layers(x, other))
        for out, same in zip(*results, strict=True):
            assert relative(out, same) <= 1e-3
            assert ((out == 0) != (same == 0)).sum() <= 1e-3 * out.numel()
    monkeypatch.setattr(linear_kernels, "_fits_hopper", lambda *_: True)
    x, other, matrix = wide[:, column : column + 256], wide[:, 344 - column : 600 - column], square.float()
    _, plain, added, back, first, _, second, _, _, third = layers(x, other)
    assert relative(plain, (x.float() @ matrix.mT).relu()) <= 5e-3
    assert relative(added, x.float() @ matrix.mT + bias + other) <= 5e-3
    scale = threshold_and_scale(0.3)[1]
    assert relative(back, scale * (x.float() @ matrix) * (other > 0)) <= 5e-3
    assert relative(first, x.float() @ matrix + other) <= 5e-3
    assert relative(second, x.float() @ weight[:, 256:512].float()) <= 5e-3
    assert relative(third, x.float() @ weight[:, 512:].float()) <= 5e-3
    nan = torch.full_like(x, float("nan"))
    assert linear([nan], square, None, activation=True).isnan().all()


@pytest.mark.gpu
def test_gradients_of_a_block_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one node and as several operators, a block has the gradients that the kernels for other GPUs give."""
    v, c, k = 1003, 128, 20
    x, evecs, diffused_grad = (normal(v, n).to("cuda", torch.bfloat16) for n in (c, k, c))
    if not on_hopper(x):
        pytest.skip("these kernels run on Hopper")
    weights = [normal(c, n, scale=n**-0.5).to(x) for n in (3 * c, c, c)]
    biases = [normal(c).to(x) for _ in range(3)]
    shapes = (1, k), (c,), (c, c), (c, c)
    evals, time, a_re, a_im = (normal(*shape, scale=1 / shape[-1]).abs().float().cuda() for shape in shapes)
    leaves = [t.requires_grad_() for t in (x, time, a_re, a_im, *weights, *biases)]
    gradient = normal(2, v, k, scale=0.1).to(evecs)
    ptr = pointer((v,)).cuda()
    arguments = BlockArguments(evals.new_full((v,), 1 / v), evals, evecs, gradient, time, a_re, a_im, ptr)

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        out = diffusion_block(x, arguments, weights, biases, 0.5, "triton")
        return [out, *torch.autograd.grad(out, leaves, diffused_grad)]

    found = [run()]
    for owner, name in ((block, "_is_one_node"), (kernels, "fits_hopper")):
        monkeypatch.setattr(owner, name, lambda *_: False)
        found.append(run())
    for other in found[1:]:
        assert all(relative(a, b) <= 2e-2 for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("c", [200, 256])
def test_many_rows_of_wide_layers(c: int) -> None:
    """They take larger tiles, and compute the same as a few of the rows alone."""
    inputs = [torch.randn(2**16 + 3, c, device="cuda").bfloat16() for _ in range(3)]
    weights = [(torch.randn(c, n * c, device="cuda") * (n * c) ** -0.5).bfloat16() for n in (3, 1, 1)]
    biases = [torch.randn(c, device="cuda") for _ in range(3)]
    found = []
    for rows in (slice(None), slice(-1000, None)):
        x = [each[rows].clone().requires_grad_() for each in inputs]
        out = mlp(x, weights, biases, residual=x[0], backend="triton")
        found.append([t[-1000:] for t in (out, *torch.autograd.grad(out, x, inputs[1][rows]))])
    assert all(relative(many, few) <= 1e-3 for many, few in zip(*found, strict=True))


def test_hidden_layers_are_kept_for_gradients_only(any_place: Place) -> None:
    """In one kernel, and in one for each layer."""
    for hidden in ((18, 18), (21, 5)):
        widths = [18, *hidden, 18]
        x, *weights = (any_place.put(normal(*shape)) for shape in [(40, 18), *map(reversed, pairwise(widths))])
        out, *kept = mlp_forward([x], weights, [], [], None, True, 0.0, None, True)
        layers, matrices = kept[: len(hidden)], kept[len(hidden) :]
        assert [h.shape for h in layers] == [(40, width) for width in hidden]
        # float32 weights are kept in three parts, too; others as they are.
        parts = 3 if x.dtype == torch.float32 else 0
        assert [m.shape for m in matrices] == ([(parts, *weight.shape) for weight in weights] if parts else [])
        (only,) = mlp_forward([x], weights, [], [], None, True, 0.0, None, False)
        assert torch.equal(only, out)
        leaves = [weight.requires_grad_() for weight in weights]
        assert torch.equal(mlp([x], leaves, residual=x, backend="triton"), out)
        with torch.no_grad():
            assert torch.equal(mlp([x], leaves, residual=x, backend="triton"), out)


def test_inputs_without_gradients(any_place: Place) -> None:
    x, weight = (any_place.put(normal(n, 5)) for n in (29, 4))
    weight.requires_grad_()
    out = mlp([x], [weight], residual=x[:, :4].clone().requires_grad_(), backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert relative(grad, x.detach().cpu().double().sum(0).expand(4, 5)) <= any_place.bound


def test_weight_gradients_are_the_same_in_every_run(any_place: Place) -> None:
    rows, c = (70, 18) if any_place.device == "cpu" else (50_000, 36)
    shapes = [(rows, c), (rows, c), (c, 2 * c), (c, c), (c,), (c,)]
    leaves = [any_place.put(normal(*shape, scale=shape[-1] ** -0.5)).requires_grad_() for shape in shapes]
    out = mlp(leaves[:2], leaves[2:4], leaves[4:], residual=leaves[0], backend="triton")
    grad = normal(rows, c).to(out)
    first, second = (torch.autograd.grad(out, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_operands(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices of any layout and dtype become contiguous in the products' dtype, or in two or three parts."""
    matrices = [normal(40, 70).mT, normal(1, 1), normal(0, 3), normal(5, 3)]
    precision = ("bf16x3" if place.tf32 else "bf16x6") if place.dtype == torch.float32 else "ieee"
    monkeypatch.setattr(matmul, "MAX_MATRICES", 3)  # two launches
    for dtypes in [(torch.float32,) * 4, (torch.float32, torch.float16, torch.float32, torch.float32)]:
        given = [m.to(place.device, dtype) for m, dtype in zip(matrices, dtypes, strict=True)]
        for found, m in zip(operands(given, place.dtype, precision), given, strict=True):
            assert found.is_contiguous()
            if place.tf32:
                assert found.dtype == torch.bfloat16
                torch.testing.assert_close(found[0].float(), m.float(), rtol=2**-8, atol=0)
                torch.testing.assert_close(found.float().sum(0), m.float(), rtol=2**-15, atol=0)
            elif place.dtype == torch.float32:
                assert found.dtype == torch.bfloat16
                assert torch.equal(found.double().sum(0), m.double())  # the parts are exact
            else:
                assert torch.equal(found, m.to(place.dtype))
    assert operands([], place.dtype, precision) == []


# On the CPU, "auto" takes its own form, whose draws have 8 bits if these suffice for the probability.
@pytest.mark.parametrize(("backend", "p"), [("triton", 0.3), ("auto", 0.3), ("auto", 0.5)])
def test_dropout(any_place: Place, backend: Any, p: float) -> None:
    v, h = (64, 34) if any_place.device == "cpu" else (20_000, 130)
    rtol = 1e-4 if any_place.dtype == torch.float32 else 1e-2
    x = any_place.put(torch.ones(v, h)).requires_grad_()
    weight = any_place.put(torch.eye(h))
    torch.manual_seed(1)
    out = mlp([x], [weight, weight], dropout=p, backend=backend)
    kept = out.detach().float() > 0
    torch.testing.assert_close(out[kept].float(), torch.full_like(out[kept], 1 / (1 - p)).float(), rtol=rtol, atol=0)
    # Shares of n independent draws are within 5 σ of p: of all units, of each row and of each column.
    for shares, n in ((kept.float().mean()[None], v * h), (kept.float().mean(0), v), (kept.float().mean(1), h)):
        assert (shares - (1 - p)).abs().max() < 5 * (p * (1 - p) / n) ** 0.5
    # Neighbors in a row or a column, and columns far apart, are uncorrelated.
    centered = kept.float() - (1 - p)
    for a, b in (
        (centered[1:], centered[:-1]),
        (centered[:, 1:], centered[:, :-1]),
        (centered[:, 16:], centered[:, :-16]),
    ):
        assert (a * b).mean().abs() < 5 * p * (1 - p) / a.numel() ** 0.5
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad.float(), out.detach().float(), rtol=rtol, atol=0)
    torch.manual_seed(1)
    assert torch.equal(mlp([x], [weight, weight], dropout=p, backend=backend), out)
    assert not torch.equal(mlp([x], [weight, weight], dropout=p, backend=backend), out)


def dropped_units(place: Place, seed: Sequence[int], p: float) -> Tensor:
    """1 for each unit that dropout with a seed sets to 0, of 2048 rows and 256 columns"""
    x, weight = torch.ones(2048, 16), torch.full((1, 256, 16), 2.0**-8)
    x, weight = (t.to(place.device, torch.float16) for t in (x, weight))
    words = torch.tensor(seed, device=place.device)
    return (linear([x], weight, None, activation=True, dropout=p, seed=words) == 0).double()


@pytest.mark.parametrize("p", [0.5, 0.2, 0.1, 1e-4, 65535 / 65536])
def test_dropped_units_are_independent(any_place: Place, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies and correlations are within 5 σ of those of independent units, or a few rare units differ."""
    if any_place.device == "cpu":  # fewer programs for the interpreter
        monkeypatch.setattr(linear_kernels, "small_tiling", lambda *_: Tiling(256, 16, 256, 4, 1, 1))
    rounded = threshold_and_scale(p)[0] / 2**16
    # The first seed, one bit of either of its words flipped, and both words exchanged.
    seeds = [(1234567, 7654321), (1234566, 7654321), (1234567, 7654321 ^ 2**30), (7654321, 1234567)]
    drawn = [dropped_units(any_place, seed, p) for seed in seeds]
    assert torch.equal(drawn[0], dropped_units(any_place, seeds[0], p))
    units = drawn[0]
    for shares, n in ((units.mean()[None], units.numel()), (units.mean(0), 2048), (units.view(64, -1).mean(1), 2**13)):
        assert (shares - rounded).abs().max() < max(5 * (rounded * (1 - rounded) / n) ** 0.5, 6 / n)
    centered = [x - rounded for x in drawn]
    x = centered[0]
    pairs = [(x[i:], x[:-i]) for i in (1, 2, 64)]  # rows
    # Neighbors, those in the next word, and those in the next bits, bytes and groups of words
    pairs += [(x[:, i:], x[:, :-i]) for i in (1, 2, 4, 8, 16, 32, 64, 128)]
    pairs += [(x, other) for other in centered[1:]]
    for a, b in pairs:
        together = (a * b).mean().abs() / (rounded * (1 - rounded))
        assert together < max(5 / a.numel() ** 0.5, 2 / (a.numel() * rounded * (1 - rounded)))


def test_words_of_a_probability() -> None:
    found = {p: word_count(p) for p in (0.0, 1e-9, 2**-16, 0.2, 0.25, 0.5, 0.625, 0.75, 1 - 2**-16, 1 - 1e-9)}
    assert list(found.values()) == [0, 0, 16, 16, 2, 1, 3, 2, 16, 16]


@pytest.mark.parametrize("place", [PLACES[i] for i in (0, 3, 4, 5, 6)], indirect=True)
def test_dropout_in_one_kernel_and_in_several(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's MLP drops the same units in both cases, and both have its gradients."""
    v, c = (40, 18) if place.device == "cpu" else (50_000, 60)
    shapes = [(v, c)] * 3 + [(c, 3 * c), (c, c), (c, c), (c,), (c,), (c,)]
    leaves = [place.put(normal(*shape, scale=shape[-1] ** -0.5)) for shape in shapes]
    for leaf in leaves:
        leaf.requires_grad_()
    grad = place.put(normal(v, c))

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        out = mlp(leaves[:3], leaves[3:6], leaves[6:], dropout=0.3, residual=leaves[0], backend="triton")
        return [out, *torch.autograd.grad(out, leaves, grad)]

    assert kernels.forward_tiling(leaves[:3], leaves[3:6], True)
    # On a GPU, three parts of the weights of 60 channels leave too few registers for the backward.
    in_one = place.device == "cpu" or place.dtype != torch.float32 or place.tf32
    assert bool(kernels.backward_tiling(leaves[:3], leaves[3:6])) == in_one
    together = run()
    for name in ("forward_tiling", "backward_tiling"):
        monkeypatch.setattr(kernels, name, lambda *_: None)
    assert all(relative(a, b.detach().double().cpu()) <= place.bound for a, b in zip(together, run(), strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_wrong_arguments(backend: Any) -> None:
    x, one = torch.ones(2, 2), [torch.ones(2, 2)]
    run = partial(mlp, backend=backend)
    refused(ValueError, "-0.1", run, one, one, dropout=-0.1)
    refused(ValueError, "1.0", run, one, one, dropout=1.0)
    refused(TypeError, r"probability of a zero, got True; write dropout=0\.5", run, one, one, dropout=True)
    refused(TypeError, "dropout should be a number, got None", run, one, one, dropout=None)
    for name, arguments in (("inputs", (x, one)), ("weights", (one, x)), ("biases", (one, one, x))):
        message = rf"{name} should be a list of tensors, got a tensor; write \[{name}\]"
        refused(TypeError, message, run, *arguments)
    message = r"inputs\[0\] should be a tensor, got ndarray; convert it with torch\.from_nu"
    refused(TypeError, message, run, [x.numpy()], one)
    refused(ValueError, "got 0 and none", run, one, [])
    refused(ValueError, "got 1 and 2", run, one, one, [x[0], x[0]])
    refused(ValueError, "inputs should be one tensor or more, got none", run, [], one)


def random(place: Place, *shape: int) -> Tensor:
    return normal(*shape).to(place.device, place.dtype)


def by_mesh(sums: tuple[Tensor, int], ptr: Tensor) -> Tensor:
    partial, span = sums
    return sum_spans(partial, ptr, span)[0]


def test_a_projection_in_the_launch_of_the_weights(place: Place) -> None:
    """In 16 bits, the launch also computes Φᵀ x of each mesh. In float32 it leaves the projection to another launch.

    Small meshes have several spans each in the interpreter. Meshes may be empty.
    """
    on_cpu = place.device == "cpu"
    cases = [((40,), 18), ((19, 0, 21), 5)] if on_cpu else [((30_001,), 128), ((5000, 0, 17, 1200, 1), 36)]
    for lengths, c in cases:
        v, ptr = sum(lengths), pointer(lengths).to(place.device)
        inputs, hidden, grads = ([random(place, v, c) for _ in range(n)] for n in (3, 2, 3))
        evecs, x = random(place, v, c), random(place, v, c)
        alone = weight_gradients(inputs, hidden, grads)
        found = weight_gradients(inputs, hidden, grads, leave_sum=True, projection=Projection(evecs, x, ptr))
        assert alone.unsummed is None
        assert found.unsummed is not None
        found.unsummed.total.copy_(found.unsummed.partial[0].sum(0))
        layers = [torch.cat(inputs, 1), *hidden]
        for n, (grad, layer) in enumerate(zip(grads, layers, strict=True)):
            for sums in (alone, found):
                assert relative(sums.weights[n], grad.double().mT @ layer.double()) <= place.bound
                assert relative(sums.biases[n], grad.double().sum(0)) <= place.bound
        if place.dtype == torch.float32:
            assert found.projected is None
            continue
        assert found.projected is not None
        pairs = zip(evecs.double().split(lengths), x.double().split(lengths), strict=True)
        expected = torch.stack([phi.mT @ values for phi, values in pairs])
        assert relative(by_mesh(found.projected, ptr), expected) <= place.bound


def test_a_mesh_with_nan_spoils_no_other() -> None:
    c, ptr = 4, pointer((20, 3, 30))
    x = torch.randn(53, c).half()
    x[20:23] = float("nan")
    grad = torch.randn(53, c).half()
    found = weight_gradients([grad], [], [grad], projection=Projection(grad, x, ptr))
    assert found.projected is not None
    projected = by_mesh(found.projected, ptr)
    assert projected[1].isnan().all()
    assert projected[[0, 2]].isfinite().all()
    assert found.weights[0].isfinite().all()


@pytest.mark.parametrize(("rows", "k", "c"), [(30, 4, 5), (30, 5, 4), (0, 4, 4)], ids=["K", "C", "no rows"])
def test_a_projection_of_another_shape_is_left_out(rows: int, k: int, c: int) -> None:
    evecs, x, grad = (torch.randn(rows, n).half() for n in (k, c, 4))
    found = weight_gradients([grad], [], [grad], projection=Projection(evecs, x, pointer((rows,))))
    assert found.projected is None
    assert relative(found.weights[0], grad.double().mT @ grad.double()) <= 1e-3
