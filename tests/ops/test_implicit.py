"""Implicit diffusion against dense solves."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import trimesh
from float64 import DEVICE, random
from torch import Tensor

from diffnet import DiffusionNet, DiffusionNetBlock, ImplicitDiffusion, Operators, collate, precompute
from diffnet.ops import SparseMatrix, implicit_diffusion, spmm
from diffnet.ops.sparse.pattern import csr_arrays

C = 5

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    """A sphere, a torus and a point cloud; the torus has vertices that no face uses."""
    torus = trimesh.creation.torus(1, 0.4, 6, 4)
    loose = np.concatenate([[[5.0, 0, 0]], torus.vertices, [[6.0, 0, 0]]]), torus.faces + 1
    cloud = trimesh.creation.icosphere(1).vertices * [1, 0.7, 0.5]
    operators = [precompute(m, k=0) for m in (trimesh.creation.icosphere(1), loose, (cloud, None))]
    assert (operators[1].mass == 0).sum() == 2
    return operators


def times() -> Tensor:
    return torch.tensor([0.0, 1e-3, 0.02, 0.3, 5.0], dtype=torch.float64)


def dense_solution(x: Tensor, time: Tensor, values: Tensor, mass: Tensor, operators: Operators) -> Tensor:
    """By dense factorisation of the part that has mass."""
    pattern, live = operators.laplacian.pattern, mass > 0
    laplacian = torch.zeros(len(x), len(x), dtype=x.dtype)
    laplacian = laplacian.index_put((pattern.row_indices.long(), pattern.indices.long()), values)[live][:, live]
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
    """In values and in the gradients for features, times, masses and the Laplacian."""
    for operators in (meshes[0], collate(meshes)):
        given = (random(operators.num_vertices, C), times(), operators.laplacian.values, operators.mass)
        weights = random(operators.num_vertices, C, seed=1)
        results = []
        for ours in (True, False):
            leaves = [t.to(dtype).to(DEVICE if ours else "cpu") for t in given]
            leaves = [(t if ours else t.double()).requires_grad_() for t in leaves]
            if ours:
                out = solve(*leaves, operators.to(DEVICE), tolerance=tolerance, backend=backend)
                assert out.dtype == dtype
            else:
                out = dense_solution(*leaves, operators)
            results.append([out, *torch.autograd.grad((out * weights.to(out)).sum(), leaves)])
        for name, a, b in zip(("value", "x", "time", "values", "mass"), *results, strict=True):
            error = torch.linalg.norm(a.cpu().double() - b) / torch.linalg.norm(b)
            assert error.detach() <= bound, (name, error)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_any_layout_and_order_of_rows(meshes: list[Operators], backend: str) -> None:
    operators = collate(meshes[:2])
    lengths = operators.lengths
    order = torch.cat([torch.arange(n).flip(0) + lo for n, lo in zip(lengths, operators.ptr.tolist(), strict=False)])
    x, grad = random(operators.num_vertices, C).float(), random(operators.num_vertices, C, seed=1).float()
    results = []
    for other in (False, True):
        ordered = operators.laplacian.with_row_order(order if other else None)
        o = replace(operators, laplacian=ordered).to(DEVICE)
        features = x.to(DEVICE)
        if other:
            features = features.mT.contiguous().mT
        features.requires_grad_()
        out = solve(features, times().float().to(DEVICE), o.laplacian.values, o.mass, o, backend=backend)
        upstream = grad.to(DEVICE).mT.contiguous().mT if other else grad.to(DEVICE)
        results.append((out, *torch.autograd.grad(out, features, upstream)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_gradcheck(meshes: list[Operators]) -> None:
    operators = meshes[1].to(dtype=torch.float64)
    x, time = random(operators.num_vertices, C).requires_grad_(), times()[1:].clone().requires_grad_()
    live = operators.mass > 0
    mass = operators.mass[live].clone().requires_grad_()

    def function(x: Tensor, time: Tensor, mass: Tensor) -> Tensor:
        full = torch.zeros_like(operators.mass).index_put((live,), mass)
        return solve(x[:, 1:], time, operators.laplacian.values, full, operators, tolerance=1e-14)

    assert torch.autograd.gradcheck(function, (x, time, mass), atol=1e-6)


def test_well_formed_operator(meshes: list[Operators]) -> None:
    operators = meshes[1].to(dtype=torch.float64)
    pattern = operators.laplacian.pattern
    mass = operators.mass.clone().requires_grad_()
    arguments = (list(csr_arrays(pattern, False)), operators.ptr, random(operators.num_vertices).abs())
    arguments += (operators.laplacian.values.clone().requires_grad_(), mass, times().requires_grad_())
    arguments += (random(operators.num_vertices, C).requires_grad_(), list(operators.lengths), 1e-10, 100, 8, False)
    torch.library.opcheck(torch.ops.diffnet.implicit_solve.default, arguments)


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


def test_conserves_the_mean_and_smooths(meshes: list[Operators]) -> None:
    operators = meshes[0]
    diffusion = ImplicitDiffusion(C)
    torch.nn.init.constant_(diffusion.time, 0.5)
    x = random(operators.num_vertices, C).float()
    out = diffusion(x, operators)
    torch.testing.assert_close(operators.mass @ out, operators.mass @ x, rtol=1e-4, atol=1e-4)
    assert out.std() < 0.5 * x.std()


def test_packed_meshes_do_not_touch_each_other(meshes: list[Operators]) -> None:
    """Each stops at its own tolerance, also beside one of other size and units, and one whose features are 0."""
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


def test_too_few_iterations_are_warned_of(meshes: list[Operators]) -> None:
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


def test_twice_is_refused(meshes: list[Operators]) -> None:
    operators = meshes[0]
    x, time = random(operators.num_vertices, C).float().requires_grad_(), times().float().requires_grad_()
    out = solve(x, time, operators.laplacian.values, operators.mass, operators)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_network(meshes: list[Operators]) -> None:
    """On operators without eigenpairs; packed or one by one; and it learns."""
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=8, blocks=2, diffusion="implicit", dropout=0.0)
    with torch.no_grad():
        for block in model.blocks:
            block.diffusion.time.uniform_(0.01, 0.3)
    packed = collate(meshes)
    x = random(packed.num_vertices, 3).float()
    apart = torch.cat([model(f, o) for f, o in zip(x.split(list(packed.lengths)), meshes, strict=True)])
    torch.testing.assert_close(model(x, packed), apart, rtol=1e-3, atol=1e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = torch.nn.functional.cross_entropy(model(x, packed), torch.arange(len(x)) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(block.diffusion.time.grad.abs().min() > 0 for block in model.blocks)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiles_to_one_graph(meshes: list[Operators], backend: str) -> None:
    """Forward and backward, with the operations opaque to the compiler."""
    torch._dynamo.reset()
    operators = meshes[0].to(DEVICE)
    x = random(operators.num_vertices, C).float().to(DEVICE).requires_grad_()
    time = times().float().to(DEVICE).requires_grad_()

    def loss(x: Tensor, time: Tensor, operators: Operators) -> Tensor:
        u = solve(x, time, operators.laplacian.values, operators.mass, operators, backend=backend)
        gradients = spmm(operators.gradient.pattern, operators.gradient.values, u, backend=backend)
        return gradients.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours, expected = compiled(x, time, operators), loss(x, time, operators)
    torch.testing.assert_close(ours, expected)
    for a, b in zip(*(torch.autograd.grad(out, (x, time)) for out in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_bad_options(meshes: list[Operators]) -> None:
    with pytest.raises(ValueError, match="heat"):
        DiffusionNetBlock(4, diffusion="heat")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coefficients"):
        DiffusionNetBlock(4, diffusion="implicit", gradient="spectral")
    for options in ({"tolerance": 0.0}, {"max_iterations": 0}, {"check_every": -1}):
        (name,) = options
        with pytest.raises(ValueError, match=name):
            ImplicitDiffusion(4, **options)  # type: ignore[arg-type]
    # Gradients stay sparse where operators hold gradients of a basis.
    block = DiffusionNetBlock(3, diffusion="implicit").eval()
    x = random(meshes[0].num_vertices, 3).float()
    other = replace(meshes[0], gradient_evecs=torch.zeros(2, meshes[0].num_vertices, 0))
    torch.testing.assert_close(block(x, other), block(x, meshes[0]))


@pytest.mark.gpu
def test_no_look_back_can_be_captured(meshes: list[Operators]) -> None:
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
