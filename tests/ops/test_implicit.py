"""Implicit diffusion against dense solves, on plain PyTorch and on Triton kernels (interpreted without a GPU)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from float64 import DEVICE, random
from refusals import refused
from sparse_cases import backends
from torch import Tensor

from diffnet import DiffusionNet, DiffusionNetBlock, ImplicitDiffusion, Operators, collate, precompute
from diffnet.ops import Backend, Pattern, SparseMatrix, implicit_diffusion
from diffnet.ops.common import checks
from diffnet.ops.fronts import reference
from diffnet.ops.fronts.reference import FrontLevel

pytestmark = pytest.mark.usefixtures("one_thread")

C = 5


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """A sphere, a torus with two vertices that no face uses, and a point cloud."""
    torus = trimesh.creation.torus(1, 0.4, 4, 3)
    loose = np.concatenate([[[5.0, 0, 0]], torus.vertices, [[6.0, 0, 0]]]), torus.faces + 1
    cloud = trimesh.creation.icosphere(1).vertices * [1, 0.7, 0.5]
    operators = [precompute(m, k=0) for m in (trimesh.creation.icosphere(1), loose, (cloud, None))]
    assert (operators[1].mass == 0).sum() == 2
    return operators


def times() -> Tensor:
    return torch.tensor([0.0, 1e-3, 0.02, 0.3, 5.0], dtype=torch.float64)


def dense_solution(x: Tensor, time: Tensor, values: Tensor, mass: Tensor, operators: Operators) -> Tensor:
    """Solve by dense factorization of the part that has mass."""
    pattern, live = operators.laplacian.pattern, mass > 0
    laplacian = torch.zeros(len(x), len(x), dtype=x.dtype)
    laplacian = laplacian.index_put((pattern.row_indices.long(), pattern.column_indices.long()), values)[live][:, live]
    columns = [
        torch.linalg.solve(torch.diag(mass[live]) + t * laplacian, mass[live] * x[live, c]) for c, t in enumerate(time)
    ]
    return x.index_put((live,), torch.stack(columns, 1))


def solve(x: Tensor, time: Tensor, values: Tensor, mass: Tensor, operators: Operators, **options: object) -> Tensor:
    laplacian = SparseMatrix(operators.laplacian.pattern, values)
    return implicit_diffusion(x, time, laplacian, mass, operators.ptr, operators.lengths, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance", "bound"),
    [
        ("torch", torch.float32, 1e-6, 1e-4),
        ("torch", torch.float64, 1e-12, 1e-9),
        ("triton", torch.float32, 1e-6, 1e-4),
    ],
)
def test_agrees_with_dense_solves(
    meshes: list[Operators], backend: str, dtype: torch.dtype, tolerance: float, bound: float
) -> None:
    interpreted = backend == "triton" and DEVICE == "cpu"
    for operators in (meshes[1], collate([meshes[1]] * 2 if interpreted else meshes)):
        given = (random(operators.num_vertices, C), times(), operators.laplacian.values, operators.mass)
        weights = random(operators.num_vertices, C, seed=1)
        results = []
        for ours in (True, False):
            leaves = [t.to(dtype).to(DEVICE if ours else "cpu") for t in given]
            leaves = [(t if ours else t.double()).requires_grad_() for t in leaves]
            if ours:
                out = solve(*leaves, operators.to(DEVICE), tolerance=tolerance, check_every=2, backend=backend)
                assert out.dtype == dtype
            else:
                out = dense_solution(*leaves, operators)
            results.append([out, *torch.autograd.grad((out * weights.to(out)).sum(), leaves)])
        for name, a, b in zip(("value", "x", "time", "values", "mass"), *results, strict=True):
            error = torch.linalg.norm(a.cpu().double() - b) / torch.linalg.norm(b)
            assert error.detach() <= bound, (name, error)


@backends
def test_any_order_of_rows(meshes: list[Operators], backend: Backend) -> None:
    operators = collate([meshes[1]] * 2)
    lengths = operators.lengths
    order = torch.cat([torch.arange(n).flip(0) + lo for n, lo in zip(lengths, operators.ptr.tolist(), strict=False)])
    x, grad = random(operators.num_vertices, C).float(), random(operators.num_vertices, C, seed=1).float()
    results = []
    for other in (False, True):
        ordered = operators.laplacian.with_row_order(order if other else None)
        o = replace(operators, laplacian=ordered).to(DEVICE)
        features, time = x.to(DEVICE).requires_grad_(), times().float().to(DEVICE)
        out = solve(features, time, o.laplacian.values, o.mass, o, check_every=2, backend=backend)
        results.append((out, *torch.autograd.grad(out, features, grad.to(DEVICE))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_gradcheck(meshes: list[Operators]) -> None:
    operators = meshes[1].to(dtype=torch.float64)
    x, time = random(operators.num_vertices, C).requires_grad_(), times()[1:].clone().requires_grad_()
    live = operators.mass > 0
    mass = operators.mass[live].clone().requires_grad_()

    def function(x: Tensor, time: Tensor, mass: Tensor) -> Tensor:
        full = torch.zeros_like(operators.mass).index_put((live,), mass)
        return solve(x[:, 1:], time, operators.laplacian.values, full, operators, tolerance=1e-14)

    assert torch.autograd.gradcheck(function, (x, time, mass), atol=1e-6)


def test_time_zero_changes_nothing(meshes: list[Operators]) -> None:
    operators = collate(meshes)
    x = random(operators.num_vertices, C).float()
    torch.testing.assert_close(ImplicitDiffusion(C)(x, operators), x)


def test_vertices_without_mass_keep_their_features(meshes: list[Operators]) -> None:
    operators = meshes[1]
    loose = operators.mass == 0
    x = random(operators.num_vertices, C).float().requires_grad_()
    out = solve(x, times().float(), operators.laplacian.values, operators.mass, operators)
    assert torch.equal(out[loose], x[loose])
    (grad,) = torch.autograd.grad(out[loose].sum(), x)
    assert torch.equal(grad, loose[:, None].float().expand(-1, C))


def test_packed_meshes_do_not_touch_each_other(meshes: list[Operators]) -> None:
    """Each stops at its own tolerance, also beside a mesh in other units and one whose features are 0."""
    scaled = precompute((meshes[0].frames[:, 2].numpy() * 100, meshes[0].faces.numpy()), k=0)
    each = [*meshes, scaled]
    packed = collate(each)
    x = [random(o.num_vertices, C, seed=i).float() * 10.0 ** (3 * i) for i, o in enumerate(each)]
    x[1] = torch.zeros_like(x[1])
    time = times().float()
    together = solve(torch.cat(x), time, packed.laplacian.values, packed.mass, packed)
    apart = [solve(f, time, o.laplacian.values, o.mass, o) for f, o in zip(x, each, strict=True)]
    for a, b in zip(together.split(list(packed.lengths)), apart, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


def test_an_empty_mesh_and_no_vertices(meshes: list[Operators]) -> None:
    operators = meshes[0]
    n = operators.num_vertices
    x, time = random(n, C).float(), times().float()
    expected = solve(x, time, operators.laplacian.values, operators.mass, operators)
    ptr = torch.tensor([0, 0, n, n])
    out = implicit_diffusion(x, time, operators.laplacian, operators.mass, ptr)
    torch.testing.assert_close(out, expected)
    nothing = operators.laplacian.pattern.from_row_lengths(torch.zeros(0).long(), torch.zeros(0).long(), 0)
    out = implicit_diffusion(x[:0], time, SparseMatrix(nothing, x[:0, 0]), x[:0, 0], torch.tensor([0, 0]))
    assert out.shape == (0, C)


def test_too_few_iterations_give_a_warning(meshes: list[Operators]) -> None:
    operators = meshes[0]
    arguments = (random(operators.num_vertices, C).float(), times().float(), operators.laplacian.values, operators.mass)
    with pytest.warns(UserWarning, match=r"after 3 iterations at a relative residual of .*tolerance of 1e-06"):
        solve(*arguments, operators, max_iterations=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unseen = solve(*arguments, operators, max_iterations=100, check_every=0)
        torch.testing.assert_close(unseen, solve(*arguments, operators), rtol=1e-5, atol=1e-5)


def test_low_precision_features(meshes: list[Operators]) -> None:
    operators = meshes[0]
    x = random(operators.num_vertices, C).bfloat16()
    exact = solve(x.float(), times().float(), operators.laplacian.values, operators.mass, operators)
    out = solve(x, times().float(), operators.laplacian.values, operators.mass, operators)
    assert torch.equal(out, exact.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(solve(x, times().float(), operators.laplacian.values, operators.mass, operators), out)


@pytest.mark.parametrize("order", [None, [1, 5, 0, 3, 2, 4]], ids=["rows", "row-order"])
def test_second_derivatives(order: list[int] | None) -> None:
    arguments = system()
    laplacian = arguments["laplacian"].with_row_order(None if order is None else torch.tensor(order, device=DEVICE))

    def diffused(x: Tensor, time: Tensor, mass: Tensor) -> Tensor:
        matrix = SparseMatrix(laplacian.pattern, laplacian.values.double())
        return implicit_diffusion(x, time, matrix, mass, arguments["ptr"], tolerance=1e-13)

    inputs = [arguments[name].double().requires_grad_() for name in ("x", "time", "mass")]
    assert torch.autograd.gradgradcheck(diffused, inputs)


def test_transforms_are_refused() -> None:
    """The advice of the message holds: a derivative at a time, see above."""
    arguments, message = system(), "no forward-mode derivatives .* one gradient at a time|one gradient at a time, not"
    x = arguments.pop("x").requires_grad_()
    out = implicit_diffusion(x, **arguments)
    refused(RuntimeError, message, torch.autograd.grad, out, x, torch.stack([out, out]), is_grads_batched=True)
    refused(RuntimeError, message, torch.func.jvp, lambda y: implicit_diffusion(y, **arguments), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        refused(RuntimeError, "no forward-mode derivatives", implicit_diffusion, x, **arguments)


def test_network(meshes: list[Operators]) -> None:
    """A network works on operators without eigenpairs, packed or one by one."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=8, blocks=2, diffusion="implicit", dropout=0.0)
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.uniform_(0.01, 0.3)
    packed = collate(meshes)
    x = random(packed.num_vertices, 3).float()
    apart = torch.cat([model(f, o) for f, o in zip(x.split(list(packed.lengths)), meshes, strict=True)])
    torch.testing.assert_close(model(x, packed), apart, rtol=1e-3, atol=1e-4)
    torch.nn.functional.cross_entropy(model(x, packed), torch.arange(len(x)) % 5).backward()
    assert all(block.diffusion.time.grad.abs().min() > 0 for block in model.blocks)


def test_wrong_options_are_refused(meshes: list[Operators]) -> None:
    refused(ValueError, "heat", DiffusionNetBlock, 4, diffusion="heat")
    refused(ValueError, "coefficients", DiffusionNetBlock, 4, diffusion="implicit", gradient="spectral")
    for options in ({"tolerance": 0.0}, {"max_iterations": 0}, {"check_every": -1}):
        (name,) = options
        refused(ValueError, name, ImplicitDiffusion, 4, **options)
    # Gradients stay sparse if operators hold gradients of a basis.
    block = DiffusionNetBlock(3, diffusion="implicit").eval()
    x = random(meshes[0].num_vertices, 3).float()
    other = replace(meshes[0], gradient_evecs=torch.zeros(2, meshes[0].num_vertices, 0))
    torch.testing.assert_close(block(x, other), block(x, meshes[0]))


def system() -> dict[str, Any]:
    """Return the arguments for two paths, of 2 and of 4 vertices, and 3 channels."""
    ends = torch.tensor([[1.0, -1, 0, 0, 0, 0], [0, 0, 1, -1, 0, 0], [0, 0, 0, 1, -1, 0], [0, 0, 0, 0, 1, -1]])
    dense = ends.T @ ends
    return {
        "x": random(6, 3).float().to(DEVICE),
        "time": torch.tensor([0.1, 0.5, 2.0], device=DEVICE),
        "laplacian": SparseMatrix.from_torch(dense.to_sparse_csr()).to(DEVICE),
        "mass": (1 + random(6, seed=1).abs()).float().to(DEVICE),
        "ptr": torch.tensor([0, 2, 6], device=DEVICE),
    }


WRONG = {
    "time of one value": ("time", lambda t: t[:1], r"time should have shape \(3,\), shape is \(1,\)"),
    "2-D time": ("time", lambda t: t[None], r"shape is \(1, 3\)"),
    "mass of 4 rows": ("mass", lambda m: m[:4], r"mass should have shape \(6,\), shape is \(4,\)"),
    "2-D mass": ("mass", lambda m: m[:, None], r"shape is \(6, 1\)"),
    "1-D x": ("x", lambda x: x[:, 0], r"x should have shape \(V, C\), shape is \(6,\)"),
    "x of 5 rows": ("x", lambda x: x[:5], r"mass should have shape \(5,\)"),
    "2-D ptr": ("ptr", lambda p: p[None], "ptr should have 1 dimension"),
    "no ptr": ("ptr", lambda p: p[:0], "got none"),
    "laplacian on another device": ("laplacian", lambda m: m.to("meta"), "laplacian should be on"),
    "wide laplacian": (
        "laplacian",
        lambda m: SparseMatrix(Pattern(m.pattern.indptr, m.pattern.indices, 7), m.values),
        r"laplacian should have shape \(6, 6\), shape is \(6, 7\)",
    ),
    "type of ptr": ("ptr", lambda p: p.float(), r"ptr should be int32 or int64, got torch\.float32"),
    "type of laplacian": ("laplacian", lambda m: m.values, "laplacian should be a SparseMatrix, got Tensor"),
    "two laplacians": (
        "laplacian",
        lambda m: SparseMatrix(m.pattern, torch.stack([m.values] * 2)),
        r"values of the laplacian should have shape \(14,\), shape is \(2, 14\)",
    ),
}


@backends
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, backend: Backend) -> None:
    argument, change, message = WRONG[name]
    given = system()
    given[argument] = change(given[argument])
    refused(TypeError if name.startswith("type") else ValueError, message, implicit_diffusion, **given, backend=backend)


WRONG_VALUES = {
    "negative time": ("time", 1, -0.5, r"time should be finite and at least 0, got -0.5 at index \[1\]"),
    "NaN time": ("time", 2, torch.nan, r"time should be finite and at least 0, got nan at index \[2\]"),
    "infinite time": ("time", 0, torch.inf, r"time should be finite and at least 0, got inf at index \[0\]"),
    "NaN mass": ("mass", 3, torch.nan, r"mass should be finite, got nan at index \[3\]"),
    "infinite mass": ("mass", 0, -torch.inf, r"mass should be finite, got -inf at index \[0\]"),
}


def with_value(name: str, place: int | tuple[int, int], value: float) -> dict[str, Any]:
    given = system()
    given[name] = given[name].clone()
    given[name][place] = value
    return given


@backends
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused(name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in debug mode."""
    monkeypatch.setattr(checks, "DEBUG", True)
    argument, place, value, message = WRONG_VALUES[name]
    refused(ValueError, message, implicit_diffusion, **with_value(argument, place, value), backend=backend)


@backends
@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_that_are_not_checked_give_nan(
    name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without debug mode."""
    monkeypatch.setattr(checks, "readable", lambda _: False)
    argument, place, value, _ = WRONG_VALUES[name]
    given = with_value(argument, place, value)
    if name == "infinite mass":
        given["mass"][place] = torch.inf
    options: Any = {"check_every": 2, "max_iterations": 12, "backend": backend}
    out, expected = (implicit_diffusion(**arguments, **options) for arguments in (given, system()))
    if argument == "time":
        expected[:, place] = torch.nan
    else:
        expected[slice(2, 6) if place >= 2 else slice(0, 2)] = torch.nan
    torch.testing.assert_close(out, expected, equal_nan=True)


@backends
@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_nan_in_x_stays_in_its_mesh_and_channel(value: float, backend: Backend) -> None:
    """There is no solution with it. A vertex without mass keeps its x, and other gradients are finite."""
    spoiled, sound = with_value("x", (3, 1), value), system()
    results = []
    for given in (spoiled, sound):
        given["mass"][5] = 0
        given["x"].requires_grad_()
        out = implicit_diffusion(**given, check_every=1, backend=backend)
        # The gradient of a sum over the other mesh and the other channels.
        (grad,) = torch.autograd.grad(out[:2].sum() + out[:, 0].sum(), given["x"])
        results.append((out.detach(), grad))
    (out, grad), (expected, expected_grad) = results
    expected[2:5, 1] = torch.nan
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad)


def test_nan_in_x_gives_no_warning(meshes: list[Operators]) -> None:
    """Also if the iterations don't suffice for another mesh, whose residual is then reported."""
    packed = collate([meshes[0], meshes[1]])
    x = random(packed.num_vertices, C).float()
    x[-2] = torch.nan
    given = x, times().float(), packed.laplacian.values, packed.mass, packed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve(*given)[: meshes[0].num_vertices].isfinite().all()
    with pytest.warns(UserWarning, match=r"after 3 iterations at a relative residual of \d"):
        solve(*given, max_iterations=3)


@pytest.mark.gpu
def test_solve_without_checks_can_be_captured(meshes: list[Operators]) -> None:
    operators = collate(meshes).to("cuda")
    x, time = random(operators.num_vertices, C).float().cuda(), times().float().cuda()

    def step() -> Tensor:
        values = operators.laplacian.values
        return solve(x, time, values, operators.mass, operators, max_iterations=60, check_every=0)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    torch.testing.assert_close(out, expected)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def fronts_of(width: int, height: int, rows: int, vertices: int) -> FrontLevel:
    """Fronts of all sizes up to width and height, with children in some places. Their own vertices come first."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.cartesian_prod(torch.tensor([1, width // 2, width]), torch.tensor([0, height // 2, height])).int()
    fronts = len(sizes)
    own = torch.arange(fronts * width).view(fronts, width)
    border = torch.randint(fronts * width, vertices, (fronts, height), generator=random)
    child_rows = torch.randint(-1, rows, (2, fronts, width + height), generator=random)
    inside = torch.arange(width) < sizes[:, :1], torch.arange(height) < sizes[:, 1:]
    child_rows[:, ~torch.cat(inside, 1)] = -1
    inverse = torch.randn(fronts, width, width, generator=random, dtype=torch.float64)
    inverse = torch.where(inside[0][:, :, None] & inside[0][:, None, :], inverse, torch.eye(width))
    coupling = torch.randn(fronts, height, width, generator=random, dtype=torch.float64)
    coupling = torch.where(inside[1][:, :, None] & inside[0][:, None, :], coupling, 0)
    own, border, child_rows = (t.int() for t in (own, border, child_rows))
    return FrontLevel(own, border, *sizes.T.contiguous(), child_rows, inverse, coupling)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("width", "height", "count"), [(2, 2, 8), (21, 40, 8), (40, 17, 3)])
def test_fronts_against_the_reference(width: int, height: int, count: int, device: str) -> None:
    pytest.importorskip("triton")
    from diffnet.ops.fronts import kernels

    fronts = FrontLevel(*(tensor.to(device) for tensor in fronts_of(width, height, 50, 9 * width + 30)))
    right = torch.randn(9 * width + 30, count, dtype=torch.float64, device=device)
    updates = torch.randn(50, count, dtype=torch.float64, device=device)
    collected, passed = kernels.forward(fronts, right, updates)
    own, up = reference.forward(fronts, right, updates)
    filled = torch.arange(width, device=device) < fronts.own_size[:, None]
    torch.testing.assert_close(collected[filled], own[filled], rtol=1e-12, atol=1e-12)
    filled = (torch.arange(height, device=device) < fronts.border_size[:, None]).flatten()
    torch.testing.assert_close(passed[filled], up[filled], rtol=1e-12, atol=1e-12)

    x, expected = right.clone(), right.clone()
    kernels.backward(fronts, collected, x)
    reference.backward(fronts, own, expected)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
