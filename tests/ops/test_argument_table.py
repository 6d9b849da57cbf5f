"""Every public operation × wrong shape, dtype, stride, device, empty and non-finite input.

Both backends must agree on each row of this generated table: the same kind of error, or the same numbers. The valid
calls of the table also serve tests of layouts, integers, derivatives and compilation.

Without a GPU the kernels run in Triton's interpreter. With one, all tensors are on it but those of a wrong device.
`pytest -m gpu tests/ops/test_argument_table.py` also runs under `compute-sanitizer --tool memcheck`. There set
PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an allocation of its own with ends that memcheck knows.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from dense_cases import Case, cases, wrong_shapes
from float64 import random
from kernel_accuracy import LAYOUTS, column
from refusals import refused
from torch import Tensor

from diffnet import ops
from diffnet.ops.common import checks

pytestmark = [
    pytest.mark.usefixtures("one_thread", "poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # NumPy's, about NaN in Triton's interpreter
]

# Kernels multiply in another order. Products with inf and their differences are then inf in one order, NaN in another.
REASSOCIATED = ("spectral_gradient_features", "values_and_gradient_features", "diffusion_and_gradient_features")
KINDS = ("shape", "dtype", "type", "stride", "device", "empty", "non-finite")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the kernels")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# Kinds that an operation can't have.
WITHOUT = {
    ("row_offsets", "type"): "any sequence of integers will do",
    ("row_offsets", "stride"): "a list has no stride",
    ("row_offsets", "device"): "a list is on no device",
    ("row_offsets", "non-finite"): "integers are finite",
}
LOSSES = ("cross_entropy", "label_smoothing_loss", "focal_loss", "dice_loss", "generalized_dice_loss")
# Dimensions whose size no other argument determines.
FREE = {
    ("to_spectral", "x", 1),
    ("to_spectral", "evecs", 1),
    ("from_spectral", "coefficients", 2),
    ("gradient_features", "gradients", 1),
    *((loss, "logits", 1) for loss in LOSSES),
    ("segment_mean", "x", 1),
    *((product, "x", 1) for product in ("spmm", "EllPattern", "EllPattern.T", "HybridPattern", "HybridPattern.T")),
    ("block_matmul", "b", 2),
    ("block_matmul.dds", "a", 1),
}
# Operations on several sets of values. They take one dimension more.
OF_SETS = ("spmm", "sddmm", "row_sum", "sparse_softmax", "EllPattern", "HybridPattern", "block_matmul")
# Operations that promote integers and bools, and those that refuse them.
PROMOTING = [f"{form}{kind}" for form in ("EllPattern", "HybridPattern") for kind in ("", ".T", ".sddmm")]
PROMOTING += ["spmm", "sddmm", "block_matmul", "block_matmul.sdd", "block_matmul.dds"]
FLOATING = ["sparse_softmax", "EllPattern.softmax", "HybridPattern.softmax", "block_softmax", "block_attention"]
BLOCK = 16
# The backward pass of these operations reads an output on one backend or both.
READ_BY_BACKWARD = (
    "gradient_features",
    "spectral_gradient_features",
    "values_and_gradient_features",
    "diffusion_and_gradient_features",
    "sparse_softmax",
    "EllPattern.softmax",
    "HybridPattern.softmax",
    "block_softmax",
    "block_attention",
    "soft_map",
)


# These read values of tensors, so they break a graph or take no tensors.
READING = ["Pattern", "block_diagonal_pattern", "split_diagonal", "split_diagonal_pattern", "row_offsets"]
READING += ["nearest_neighbors", "point_map", "zoomout"]
# Their arguments here have no derivatives: an asymmetric matrix, and equal largest eigenvalues.
AT_KINKS = ["implicit_diffusion", "functional_map"]


class Row(NamedTuple):
    """One call: an operation with one argument replaced."""

    operation: str
    kind: str
    argument: str
    value: Any
    case: Case


def single(function: Callable[..., Any], **arguments: Any) -> Case:
    """An operation without kernels. Its rows must raise an error of a documented kind or give numbers."""
    return Case(function, arguments, backends=("torch",))


def sparse_cases(device: str) -> dict[str, Case]:
    """Valid calls of every sparse operation in float32. Index arrays of patterns are arguments, too."""

    def normal(*shape: int) -> Tensor:
        return random(*shape).float().to(device)

    pattern = ops.Pattern(torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 3, 0, 1, 2, 3]), 4).to(device)
    values, dense = normal(6), normal(4, 3)
    bools = torch.tensor([[True, False], [True, True]])
    blocks = ops.BlockPattern.from_mask(bools, BLOCK).to(device)
    block_values, block_dense = normal(*blocks.values_shape), normal(1, 2 * BLOCK, BLOCK)
    ell, _ = ops.EllPattern.from_pattern(pattern)
    hybrid = ops.HybridPattern.from_pattern(pattern)
    square = ops.Pattern(torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]), 2).to(device)
    indptr, indices = pattern.indptr, pattern.indices
    query, key, value = (normal(1, 1, 2 * BLOCK, BLOCK) for _ in range(3))
    return {
        "spmm": Case(partial(ops.spmm, pattern), {"values": values, "x": dense}),
        "sddmm": Case(partial(ops.sddmm, pattern), {"a": dense, "b": normal(4, 3)}),
        "row_sum": Case(partial(ops.row_sum, pattern), {"values": values}),
        "sparse_softmax": Case(partial(ops.sparse_softmax, pattern), {"scores": values}),
        "EllPattern": Case(ell.matmul, {"values": normal(*ell.indices.shape), "x": dense}),
        "EllPattern.T": Case(partial(ell.matmul, transpose=True), {"values": normal(*ell.indices.shape), "x": dense}),
        "EllPattern.sddmm": Case(ell.sddmm, {"a": dense, "b": normal(4, 3)}),
        "EllPattern.softmax": Case(ell.softmax, {"scores": normal(*ell.indices.shape)}),
        "HybridPattern": Case(hybrid.matmul, {"values": values, "x": dense}),
        "HybridPattern.T": Case(partial(hybrid.matmul, transpose=True), {"values": values, "x": dense}),
        "HybridPattern.sddmm": Case(hybrid.sddmm, {"a": dense, "b": normal(4, 3)}),
        "HybridPattern.softmax": Case(hybrid.softmax, {"scores": values}),
        "BlockPattern": single(blocks.to_dense, values=block_values),
        "block_matmul": Case(partial(ops.block_matmul, blocks, mode="dsd"), {"a": block_values, "b": block_dense}),
        "block_matmul.sdd": Case(
            partial(ops.block_matmul, blocks, mode="sdd"), {"a": block_dense, "b": block_dense.mT.contiguous()}
        ),
        "block_matmul.dds": Case(
            partial(ops.block_matmul, blocks, mode="dds"), {"a": block_dense.mT.contiguous(), "b": block_values}
        ),
        "block_softmax": Case(partial(ops.block_softmax, blocks), {"scores": block_values}),
        "block_attention": Case(partial(ops.block_attention, blocks), {"query": query, "key": key, "value": value}),
        "implicit_diffusion": Case(
            lambda x, time, values, mass, ptr, lengths, backend: ops.implicit_diffusion(
                *(x, time, ops.SparseMatrix(square, values), mass, ptr, lengths),
                max_iterations=4,
                check_every=2,
                backend=backend,
            ),
            {
                "x": normal(2, 3),
                "time": normal(3).abs(),
                "values": torch.tensor([1.0, 0.0, 1.0], device=device),
                "mass": torch.ones(2, device=device),
                "ptr": torch.tensor([0, 2], device=device),
                "lengths": None,
            },
        ),
        "Pattern": Case(
            lambda indptr, indices, x, backend: ops.spmm(ops.Pattern(indptr, indices, 4), values, x, backend=backend),
            {"indptr": indptr, "indices": indices, "x": dense},
        ),
        "SparseMatrix": Case(
            lambda values, x, backend: ops.spmm(pattern, ops.SparseMatrix(pattern, values).values, x, backend=backend),
            {"values": values, "x": dense},
        ),
        "diagonal": single(partial(ops.diagonal, pattern), values=values),
        "block_diagonal": single(
            lambda values: ops.block_diagonal([ops.SparseMatrix(square, values)] * 2).values, values=normal(3)
        ),
        "split_diagonal": single(
            lambda values: ops.split_diagonal(ops.SparseMatrix(square, values), [2, 0])[0].values, values=normal(3)
        ),
        "block_diagonal_pattern": single(
            lambda indptr, indices: ops.block_diagonal_pattern([ops.Pattern(indptr, indices, 4)] * 2).indices,
            indptr=indptr,
            indices=indices,
        ),
        "split_diagonal_pattern": single(
            lambda indptr, indices: ops.split_diagonal_pattern(ops.Pattern(indptr, indices, 4), [4])[0][0].indices,
            indptr=indptr,
            indices=indices,
        ),
    }


def functional_map_cases(device: str) -> dict[str, Case]:
    """Valid calls of the operations on functional maps in float32: 2 pairs with 3 and 4 eigenpairs, and 5 features."""

    def normal(*shape: int) -> Tensor:
        return random(*shape).float().to(device)

    c, evecs_a, evecs_b, mass_b = normal(4, 3), normal(6, 4), normal(7, 4), normal(7).abs()
    matches, vertices = torch.tensor([0, 5, 2, 1, 3, 4, 0], device=device), torch.arange(6, device=device)
    features = {"a": normal(2, 3, 5), "b": normal(2, 4, 5)}
    evals = {"evals_a": normal(2, 3).abs(), "evals_b": normal(2, 4).abs()}
    points = {"evecs_a": evecs_a, "evecs_b": evecs_b}
    return {
        "functional_map": Case(ops.functional_map, {**features, **evals}),
        "soft_map": single(ops.soft_map, queries=normal(7, 5), keys=normal(6, 5), values=evecs_a, temperature=0.5),
        "nearest_neighbors": single(ops.nearest_neighbors, queries=evecs_b, points=evecs_a),
        "point_map": single(ops.point_map, c=c, **points, evals_a=normal(4).abs()),
        "functional_map_from_points": single(ops.functional_map_from_points, matches=matches, **points, mass_b=mass_b),
        "functional_map_from_correspondences": single(
            ops.functional_map_from_correspondences, vertices_a=vertices, vertices_b=vertices, **points
        ),
        "zoomout": single(ops.zoomout, c=normal(2, 2), **points, mass_b=mass_b),
        "orthogonality_loss": single(ops.orthogonality_loss, c=normal(2, 4, 3)),
        "bijectivity_loss": single(ops.bijectivity_loss, c_ab=normal(2, 4, 3), c_ba=normal(2, 3, 4)),
        "coupling_loss": single(ops.coupling_loss, c=normal(2, 4, 3), c_of_points=normal(2, 4, 3)),
    }


def block_mlp(device: str) -> Case:
    """Three layers as wide as the inputs, which one kernel computes."""
    shapes = {"inputs": [(4, 5)] * 3, "weights": [(5, 15), (5, 5), (5, 5)], "biases": [(5,)] * 3}
    arguments = {
        f"{name}[{i}]": random(*shape).float().to(device)
        for name, each in shapes.items()
        for i, shape in enumerate(each)
    }
    return Case(ops.mlp, arguments)


@functools.cache
def table(device: str) -> list[Row]:
    """All rows. They have the same numbers on each device."""
    return list(rows(device))


def rows(device: str) -> Iterator[Row]:
    torch.manual_seed(0)
    named = [cases(device), sparse_cases(device), functional_map_cases(device), {"mlp": block_mlp(device)}]
    for name, case in (entry for group in named for entry in group.items()):
        for argument in [*case.floating, *case.indices]:
            x = case.arguments[argument]
            for kind, value in replacements(x):
                if kind == "non-finite" and name in REASSOCIATED and value.is_floating_point() and value.isinf().any():
                    continue
                yield Row(name, kind, argument, value, case)
    offsets = single(ops.row_offsets, lengths=[3, 0, 2])
    for kind, lengths in (("shape", 3), ("shape", [[3, 0, 2]]), ("dtype", [3.0, 0.0]), ("dtype", "302"), ("empty", [])):
        yield Row("row_offsets", kind, "lengths", lengths, offsets)


def replacements(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from (("shape", wrong) for wrong in wrong_shapes(x))
    wrong_dtypes = (torch.int64, torch.bool, torch.complex64) if x.is_floating_point() else (torch.float32, torch.int16)
    yield from (("dtype", x.to(dtype)) for dtype in wrong_dtypes)
    yield from (("type", wrong) for wrong in (x.tolist(), x.cpu().numpy()))
    if x.ndim == 1:
        yield "stride", column(x) if x.is_floating_point() else torch.stack([x, 0 * x], 1)[:, 0]
    else:
        yield from (("stride", layout(x)) for layout in LAYOUTS[0 if x.is_cuda else 1 :])
    yield "device", x.to("cpu" if x.is_cuda else "meta")
    yield from (("empty", x.narrow(d, 0, 0)) for d in range(x.ndim))
    strange = (torch.nan, torch.inf) if x.is_floating_point() else (-1, 2**40)
    for number in strange:
        changed = x.clone()
        changed.view(-1)[x.numel() // 2] = number
        yield "non-finite", changed


def outcome(row: Row, backend: str) -> tuple[type[Exception], str] | list[Tensor]:
    try:
        return row.case.run(backend, **{row.argument: row.value})
    except (TypeError, ValueError, IndexError) as error:
        return type(error), str(error)


def expected_error(row: Row) -> type[Exception] | None:
    """The kind of error that a row must give, or None if it may also give numbers."""
    if row.operation in ("row_offsets", "block_diagonal", "split_diagonal", "orthogonality_loss"):
        return None  # each takes lists, any dtype or a single tensor
    if row.kind == "device":
        return ValueError
    is_refused = row.kind == "type" or (row.kind == "dtype" and (row.value.is_complex() or row.operation in cases()))
    return TypeError if is_refused else None


def has_a_wrong_shape(row: Row) -> bool:
    """Whether an operation must refuse the shape of an argument: nothing is broadcast but sets of values."""
    of_sets = row.operation.split(".")[0] in OF_SETS
    if row.kind != "shape" or not (of_sets or row.operation in cases()):
        return False
    right, wrong = row.case.arguments[row.argument].shape, row.value.shape
    if len(wrong) != len(right):
        return not (of_sets and wrong[1:] == right)
    changed = [d for d in range(len(right)) if wrong[d] != right[d]]
    return any((row.operation, row.argument, d) not in FREE for d in changed)


OPERATIONS = list({row.operation: None for row in table("cpu")})


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_backends_agree(operation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in table(device):
        if row.operation != operation:
            continue
        # Only debug mode reads extents on a GPU. Without it, kernels would read and write beyond the end.
        monkeypatch.setattr(checks, "DEBUG", device == "cuda")
        where = f"{row.operation}: {row.kind} of {row.argument}, {described(row.value)}"
        first, second = (outcome(row, backend) for backend in (row.case.backends * 2)[:2])
        if isinstance(first, tuple) or isinstance(second, tuple):
            assert first == second, (where, first, second)
            kind, message = first
            assert expected_error(row) in (None, kind), (where, first)
            if row.kind in ("dtype", "type") and row.operation in cases():
                assert f"{row.argument} should be " in message, (where, message)
            assert row.kind != "device" or " on " in message, (where, message)
            if has_a_wrong_shape(row):
                assert kind in (ValueError, IndexError), (where, first)
                assert "should " in message, (where, message)
            continue
        assert expected_error(row) is None, (where, first)
        assert not has_a_wrong_shape(row), (where, first)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(
                b, a, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m, where=where: f"{where}\n{m}"
            )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_change_in_place(operation: str, device: str) -> None:
    """As in `logits /= 2`. Gradients are those of `logits / 2`, unless the backward pass needs the output."""
    case = next(row.case for row in table(device) if row.operation == operation)
    for backend in case.backends:
        found = []
        for change in (torch.mul, Tensor.mul_):
            given = {name: case.arguments[name].clone().requires_grad_() for name in case.floating}
            outs = case.run(backend, **{name: 1 * x for name, x in given.items()})
            if operation == "diffusion_and_gradient_features":
                outs = outs[1:]  # the first output is an argument
            changed = [change(out, 0.5).sum() for out in outs if isinstance(out, Tensor) and out.requires_grad]
            if changed and operation not in READ_BY_BACKWARD:
                found.append(torch.autograd.grad(changed, [*given.values()], allow_unused=True))
        torch.testing.assert_close(found[:1], found[-1:])


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in READING])
@pytest.mark.parametrize("device", DEVICES)
def test_operations_compile_to_one_graph(operation: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their checks, after a first call, in which patterns find what products need."""
    case = next(row.case for row in table(device) if row.operation == operation)
    monkeypatch.undo()  # torch.compile doesn't know the functions of `poisoned`
    torch._dynamo.reset()
    given: dict[str, Any] = {name: case.arguments[name].clone().requires_grad_() for name in case.floating}
    given |= {"lengths": case.arguments["ptr"].diff().tolist()} if "lengths" in case.arguments else {}
    expected = case.run(case.backends[-1], **given)
    compiled = torch.compile(lambda: case.run(case.backends[-1], **given), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), expected)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in (*READING, *AT_KINKS)])
def test_derivatives_are_difference_quotients(operation: str) -> None:
    """In float64 on the CPU, and those of the derivatives."""
    case = next(row.case for row in table("cpu") if row.operation == operation)
    leaves = [case.arguments[name].double().requires_grad_() for name in case.floating]

    def run(*changed: Tensor) -> tuple[Tensor, ...]:
        return tuple(case.run("auto", **dict(zip(case.floating, changed, strict=True))))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


TWICE = [name for name in READ_BY_BACKWARD if "features" not in name] + ["cross_entropy", "diffuse"]


@pytest.mark.parametrize("operation", TWICE)
@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_on_kernels_are_those_of_plain_pytorch(operation: str, device: str) -> None:
    case = next(row.case for row in table(device) if row.operation == operation)
    found = []
    for backend, dtype in ((case.backends[-1], torch.float32), ("torch", torch.float64)):
        leaves = {name: case.arguments[name].to(dtype).requires_grad_() for name in case.floating}
        (out,) = case.run(backend, **leaves)
        grads = torch.autograd.grad(out.square().sum(), [*leaves.values()], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), [*leaves.values()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("operation", [*TWICE, "spmm", "sddmm", "functional_map", "HybridPattern", "block_matmul"])
def test_transforms_of_operations(operation: str) -> None:
    """Those of torch.func by plain PyTorch. Kernels refuse them and say what does not."""
    case = next(row.case for row in table("cpu") if row.operation == operation)
    name = case.floating[0]
    x = case.arguments[name].clone()

    def run(x: Tensor, backend: str = "auto") -> Tensor:
        return case.run(backend, **{name: x})[0]

    (expected,) = torch.autograd.grad(run(x.requires_grad_()).square().sum(), x)
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(lambda x: run(x).square().sum())(x), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.func.vmap(run)(x[None])[0], run(x))
    along = torch.func.jvp(lambda x: run(x).square().sum(), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(along, expected.sum(), rtol=1e-3, atol=1e-3)
    if len(case.backends) > 1:
        refused(
            RuntimeError, 'on kernels.*backend="torch" and "auto" do', torch.func.vmap(run), x[None], backend="triton"
        )


@pytest.mark.parametrize("operation", [name for name in (*READ_BY_BACKWARD, "mlp") if name not in TWICE])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_without_second_derivatives_raise(operation: str, device: str) -> None:
    """They must not pass for constants. The gradients of bases come from plain PyTorch, which has second ones."""
    case = next(row.case for row in table(device) if row.operation == operation)
    leaves = {name: case.arguments[name].clone().requires_grad_("evecs" not in name) for name in case.floating}
    outs = case.run(case.backends[-1], **leaves)
    wanted = [x for x in leaves.values() if x.requires_grad]
    grads = torch.autograd.grad(sum(out.square().sum() for out in outs), wanted, create_graph=True)
    squares = sum(grad.square().sum() for grad in grads)
    refused(RuntimeError, 'once; backend="torch" has', torch.autograd.grad, squares, wanted)


@pytest.mark.parametrize("operation", [*PROMOTING, *FLOATING])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_integers_are_promoted_or_refused(operation: str, dtype: torch.dtype, device: str) -> None:
    case = sparse_cases(device)[operation]
    for backend, name in itertools.product(("auto", *case.backends), case.floating):
        whole = (3 * (case.arguments[name] > 0)).to(dtype)
        if operation in FLOATING:
            refused(TypeError, f"{name} should be floating point, got {dtype}", case.run, backend, **{name: whole})
            continue
        leaves = {n: case.arguments[n].clone().requires_grad_() for n in case.floating if n != name}
        results = []
        for x in (whole, whole.float()):
            (out,) = case.run(backend, **leaves, **{name: x})
            results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves.values()])])
        torch.testing.assert_close(*results)


def int32_column(index: Tensor) -> Tensor:
    return column(index.int())


def expanded(x: Tensor) -> Tensor:
    return x[..., :1, :1].expand_as(x)


def laid_out(layout: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.ndim > 1:
        return layout(x)
    return column(x) if x.ndim == 1 and layout in LAYOUTS else x


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "row_offsets"])
@pytest.mark.parametrize("device", DEVICES)
def test_strides_change_nothing(operation: str, device: str) -> None:
    """Arguments and gradients of outputs may have any layout, and index arrays may be columns of int32."""
    case = next(row.case for row in table(device) if row.operation == operation)
    backends = ("auto", "triton") if len(case.backends) > 1 else case.backends

    def run(
        backend: str, layout: Callable[[Tensor], Tensor], of_arguments: Callable[[Tensor], Tensor], changed: bool
    ) -> list[Tensor | None]:
        layout_of_arguments = of_arguments if changed else Tensor.clone
        given = {n: laid_out(layout_of_arguments, case.arguments[n].clone()) for n in case.floating}
        # Plain PyTorch computes where the bases of these operations need gradients.
        leaves = [x.requires_grad_() for n, x in given.items() if "evecs" not in n or operation not in REASSOCIATED]
        indices = {n: int32_column(x) if changed else x for n, x in case.arguments.items() if n in case.indices}
        outs = [out for out in case.run(backend, **given, **indices) if out.requires_grad]
        torch.manual_seed(0)
        grads = [laid_out(layout, torch.randn(out.shape, device=device).to(out)) for out in outs]
        grads = grads if changed else [grad.contiguous() for grad in grads]
        return [*outs, *(torch.autograd.grad(outs, leaves, grads, allow_unused=True) if outs else [])]

    pairs = [*((layout, Tensor.clone) for layout in (*LAYOUTS, expanded)), *zip(LAYOUTS, LAYOUTS, strict=True)]
    plain = {backend: run(backend, Tensor.clone, Tensor.clone, False) for backend in backends}
    for backend, pair in itertools.product(backends, pairs):
        found = run(backend, *pair, True)
        # An expanded gradient has values of its own.
        expected = run(backend, *pair, False) if pair[0] is expanded else plain[backend]
        # Products of PyTorch add up factors of another layout in another order.
        exact = {"rtol": 0, "atol": 0} if backend == "triton" and (device == "cpu" or pair[1] is Tensor.clone) else {}
        torch.testing.assert_close(found, expected, **exact)


def described(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def test_the_table_is_complete() -> None:
    """Every operation has a row of each kind, or the table says why not."""
    names = {n for n in ops.__all__ if inspect.isclass(getattr(ops, n)) or inspect.isfunction(getattr(ops, n))}
    assert names == {name.split(".")[0] for name in OPERATIONS}
    found = Counter((row.operation, row.kind) for row in table("cpu"))
    missing = {(operation, kind) for operation in OPERATIONS for kind in KINDS if found[operation, kind] == 0}
    assert missing == WITHOUT.keys()
    assert len(table("cpu")) >= 400
