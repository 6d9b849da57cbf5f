"""The eigensolver and its factorization, against dense solves and SciPy, with multiple eigenvalues, and with faults."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
import trimesh
from operator_checks import relative
from refusals import refused
from torch import Tensor

from diffnet.geometry import MeshError, eigenbases, eigenbasis, laplacian_and_mass, load_mesh, precompute
from diffnet.geometry.eigen import checks as eigenpair_checks, cpu, lanczos, problem as eigenproblem
from diffnet.geometry.eigen.cpu import smallest_pairs
from diffnet.geometry.eigen.gpu import batches as eigenbases_on_gpu
from diffnet.geometry.eigen.gpu.dissection import LEAF, nested_dissection
from diffnet.geometry.eigen.gpu.lanczos import largest_pairs
from diffnet.geometry.eigen.gpu.multifrontal import MultifrontalCholesky
from diffnet.geometry.eigen.lanczos import KrylovSpace
from diffnet.geometry.eigen.problem import Pairs, Problem

pytestmark = pytest.mark.usefixtures("one_thread")


def several() -> trimesh.Trimesh:
    """Three components. Two are equal, so most eigenvalues appear at least twice."""
    sphere = trimesh.creation.icosphere(2)
    torus = trimesh.creation.torus(1, 0.4, major_sections=16, minor_sections=10)
    parts = [sphere, sphere.copy().apply_translation([9, 0, 0]), torus.apply_translation([0, 9, 0])]
    return trimesh.util.concatenate(parts)


def problem(mesh: Any) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    return laplacian_and_mass(load_mesh(mesh), "cotan")


def assert_pairs(laplacian: Any, mass: Any, evals: Any, evecs: Any, expected: Any = None, atol: float = 1e-9) -> None:
    if expected is not None:
        np.testing.assert_allclose(evals, expected, atol=atol * expected[-1])
    np.testing.assert_allclose(evecs.T @ (mass[:, None] * evecs), np.eye(len(evals)), atol=1e-8)
    residual = (laplacian @ evecs - mass[:, None] * evecs * evals) / np.sqrt(mass)[:, None]
    assert np.linalg.norm(residual, axis=0).max() < 1e-5 * max(evals[-1], 1e-3)


@pytest.mark.parametrize("solver", ["dense_pairs", "lanczos_pairs"])
@pytest.mark.parametrize("source", ["sphere", "several", "cloud"])
def test_against_a_full_solve(monkeypatch: pytest.MonkeyPatch, source: str, solver: str) -> None:
    monkeypatch.setattr(eigenproblem, "DENSE_LIMIT", 10**6 if solver == "dense_pairs" else 0)
    for other in {"dense_pairs", "lanczos_pairs", "scipy_pairs"} - {solver}:
        monkeypatch.setattr(cpu, other, None)
    sphere = trimesh.creation.icosphere(2)
    mesh = {"sphere": sphere, "cloud": (sphere.vertices, None), "several": several()}[source]
    laplacian, mass = laplacian_and_mass(load_mesh(mesh))
    full, vectors = scipy.linalg.eigh(laplacian.toarray(), np.diag(mass))
    # The span of the first k vectors is defined only if a gap follows.
    k = next(k for k in range(25, len(full)) if full[k] - full[k - 1] > 0.01 * full[k])
    evals, evecs = eigenbasis(laplacian, mass, k)
    assert evals.dtype == evecs.dtype == np.float64
    np.testing.assert_allclose(evals, full[:k], rtol=1e-8, atol=1e-8 * full[k])
    np.testing.assert_allclose(evecs.T @ (mass[:, None] * evecs), np.eye(k), atol=1e-8)
    overlap = vectors[:, :k].T @ (mass[:, None] * evecs)
    np.testing.assert_allclose(np.linalg.svd(overlap)[1], 1, atol=1e-7)
    again = eigenbasis(laplacian, mass, k)
    np.testing.assert_array_equal(again[0], evals)
    np.testing.assert_array_equal(again[1], evecs)


@pytest.mark.filterwarnings("error")
def test_lost_orthogonality_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    laplacian, mass = problem(trimesh.creation.icosphere(3))
    converge = KrylovSpace.converge

    def skewed(*args: Any) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = converge(*args)
        return values, vectors + 3e-8 * np.roll(vectors, 1, axis=0)

    monkeypatch.setattr(KrylovSpace, "converge", skewed)
    evals, evecs = eigenbasis(laplacian, mass, 100)
    assert_pairs(laplacian, mass, evals, evecs)


@pytest.mark.parametrize("k", [20, 31, 100], ids=lambda k: f"k={k}")
def test_equal_components(k: int) -> None:
    """30 equal spheres: each eigenvalue appears at least 30 times, and each vector is supported on one component."""
    laplacian, mass = problem(trimesh.creation.icosphere(2))
    one, _ = eigenbasis(laplacian, mass, 10)
    laplacian, mass = scipy.sparse.block_diag([laplacian] * 30, format="csr"), np.tile(mass, 30)
    evals, evecs = eigenbasis(laplacian, mass, k)
    np.testing.assert_allclose(evals, np.sort(np.tile(one, 30))[:k], atol=1e-9 * one[-1])
    assert_pairs(laplacian, mass, evals, evecs)
    touched = (np.abs(evecs).reshape(30, 162, k) > 0).any(1).sum(0)
    np.testing.assert_array_equal(touched, 1)


def test_the_largest_components_are_kept() -> None:
    """One pair: the constant on the torus, the last 160 vertices, whose area is larger than that of a sphere."""
    _, evecs = eigenbasis(*problem(several()), 1)
    np.testing.assert_array_equal(np.flatnonzero(evecs[:, 0]), np.arange(324, 484))


@pytest.mark.parametrize("spectrum", ["apart", "multiple", "zero"])
def test_smallest_pairs_of_a_dense_matrix(spectrum: str) -> None:
    rng = np.random.default_rng(0)
    values = {"apart": rng.standard_normal(200), "multiple": np.repeat(np.arange(20.0), 10), "zero": np.zeros(200)}
    turn, _ = np.linalg.qr(rng.standard_normal((200, 200)))
    matrix = turn * values[spectrum] @ turn.T
    matrix = (matrix + matrix.T) / 2
    evals, evecs = smallest_pairs(matrix, 64)
    np.testing.assert_allclose(evals, np.sort(values[spectrum])[:64], atol=1e-12)
    np.testing.assert_allclose(evecs.T @ evecs, np.eye(64), atol=1e-12)
    np.testing.assert_allclose(matrix @ evecs, evecs * evals, atol=1e-12)


def test_components_that_need_more_than_their_share() -> None:
    """Long strips have lower eigenvalues than Weyl's law predicts from their area, so more pairs are sought."""
    sphere = trimesh.creation.icosphere(2)
    strip = trimesh.creation.cylinder(0.02, 200, sections=4).subdivide_loop(2)
    strip.apply_translation([5, 0, 0])
    laplacian, mass = problem(trimesh.util.concatenate([sphere, strip]))
    k = 40
    evals, evecs = eigenbasis(laplacian, mass, k)
    expected = scipy.linalg.eigh(laplacian.toarray(), np.diag(mass), eigvals_only=True, subset_by_index=(0, k - 1))
    assert_pairs(laplacian, mass, evals, evecs, expected, 1e-8)


@pytest.mark.filterwarnings("error")
def test_many_restarts(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles that don't divide the vertices."""
    laplacian, mass = problem(sphere)
    expected, _ = eigenbasis(laplacian, mass, 64)
    monkeypatch.setattr(lanczos, "TILE_LENGTH", 100)
    before, restarts = KrylovSpace.__init__, []

    def with_less_room(space: KrylovSpace, *args: Any) -> None:
        before(space, *args)
        space.capacity = space.wanted + 40

    monkeypatch.setattr(KrylovSpace, "__init__", with_less_room)
    restart = KrylovSpace._restart  # a private name, to count the restarts
    monkeypatch.setattr(KrylovSpace, "_restart", lambda *args: restarts.append(1) or restart(*args))
    evals, evecs = eigenbasis(laplacian, mass, 64)
    assert len(restarts) > 2
    assert_pairs(laplacian, mass, evals, evecs, expected, 1e-10)


@pytest.fixture
def tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code for a GPU with tensors on the CPU, in batches of 3, for components of 300 vertices and more."""
    # A private name, since the batch size depends on the free memory of a GPU.
    monkeypatch.setattr(eigenbases_on_gpu, "_batch_size", lambda *args: 3)
    monkeypatch.setattr(eigenbases_on_gpu, "MIN_VERTICES", 300)


def together(problems: list[Problem], k: int) -> list[Pairs]:
    return eigenbases_on_gpu.eigenbases_on_gpu(problems, k, torch.device("cpu"), 2)


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_a_batch_of_several_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meshes have different sizes, and one has several components."""
    torus = trimesh.creation.torus(1, 0.4, major_sections=32, minor_sections=16)
    meshes = [several(), trimesh.creation.icosphere(3), torus, trimesh.creation.icosphere(3)]
    problems = [problem(mesh) for mesh in meshes]
    solve = Mock(wraps=eigenbases_on_gpu.pairs_on_cpu)
    monkeypatch.setattr(eigenbases_on_gpu, "pairs_on_cpu", solve)
    found = together(problems, 40)
    # Only the components of the first mesh were solved on the CPU.
    assert {len(call.args[0].mass) for call in solve.call_args_list} == {160, 162}
    for (laplacian, mass), (evals, evecs), (same, _) in zip(problems, found, together(problems, 40), strict=True):
        expected, _ = eigenbasis(laplacian, mass, 40)
        assert_pairs(laplacian, mass, evals, evecs, expected)
        np.testing.assert_array_equal(same, evals)


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_components_with_mixed_vertices_stay_on_the_gpu(
    sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [sphere, trimesh.creation.torus(1, 0.4, 32, 16).apply_translation([9, 0, 0])]
    laplacian, mass = problem(trimesh.util.concatenate(parts))
    order = np.random.default_rng(0).permutation(len(mass))
    monkeypatch.setattr(eigenbases_on_gpu, "pairs_on_cpu", None)
    ((evals, evecs),) = together([(laplacian[order][:, order], mass[order])], 40)
    assert_pairs(laplacian[order][:, order], mass[order], evals, evecs, eigenbasis(laplacian, mass, 40)[0])


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_a_batch_in_which_a_check_fails(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_wrong(*args: Any) -> Any:
        values, rows = largest_pairs(*args)
        values[1] *= 1 + 1e-4
        return values, rows

    monkeypatch.setattr(eigenbases_on_gpu, "largest_pairs", one_wrong)
    solve = Mock(wraps=eigenbases_on_gpu.pairs_on_cpu)
    monkeypatch.setattr(eigenbases_on_gpu, "pairs_on_cpu", solve)
    problems = [problem(sphere), problem(trimesh.creation.torus(1, 0.4, 32, 16)), problem(sphere)]
    found = together(problems, 20)
    solve.assert_called_once()
    for (laplacian, mass), (evals, evecs) in zip(problems, found, strict=True):
        assert_pairs(laplacian, mass, evals, evecs)
        np.testing.assert_allclose(evals, eigenbasis(laplacian, mass, 20)[0], atol=1e-9 * evals[-1])


def test_the_cpu_solves_where_a_gpu_has_little_memory(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(eigenbases_on_gpu, "eigenbases_on_gpu", full)
    laplacian, mass = problem(sphere)
    with pytest.warns(UserWarning, match="cuda has too little free memory for eigenbases of 642 vertices and k = 12"):
        found = eigenbasis(laplacian, mass, 12, device="cuda")
    np.testing.assert_array_equal(found[1], eigenbasis(laplacian, mass, 12)[1])


@pytest.mark.gpu
def test_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    laplacian, mass = problem(trimesh.creation.icosphere(5))
    expected, _ = eigenbasis(laplacian, mass, 128)
    monkeypatch.setattr(eigenbases_on_gpu, "pairs_on_cpu", None)
    evals, evecs = eigenbasis(laplacian, mass, 128, device="cuda")
    assert_pairs(laplacian, mass, evals, evecs, expected)
    torch.use_deterministic_algorithms(True)
    try:
        again = eigenbasis(laplacian, mass, 128, device="cuda")
    finally:
        torch.use_deterministic_algorithms(False)
    np.testing.assert_array_equal(again[1], evecs)


@pytest.mark.gpu
def test_many_on_the_gpu() -> None:
    rng = np.random.default_rng(0)
    mesh = trimesh.creation.icosphere(5)
    problems = []
    for _ in range(6):
        mesh.vertices += 0.002 * rng.standard_normal(mesh.vertices.shape)
        problems.append(problem(mesh))
    for (evals, evecs), (laplacian, mass) in zip(eigenbases(problems, 64, "cuda", jobs=4), problems, strict=True):
        expected = eigenbasis(laplacian, mass, 64, "cuda")
        np.testing.assert_allclose(evals, expected[0], atol=1e-9 * evals[-1])
        assert_pairs(laplacian, mass, evals, evecs)


# Faults


def no_convergence(*args: Any, **kwargs: Any) -> Any:
    raise ArithmeticError("3 of 4 pairs haven't converged")


def turn(values: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = vectors[3].copy(), vectors[20].copy()
    vectors = vectors.copy()
    vectors[3], vectors[20] = np.cos(1e-4) * a + np.sin(1e-4) * b, np.cos(1e-4) * b - np.sin(1e-4) * a
    return values, vectors


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda values, vectors: (values, vectors + 1e-6), "orthonormal only to"),
        (turn, "accurate only to"),
        (lambda values, vectors: (values * (1 + 1e-4), vectors), "accurate only to"),
        (no_convergence, "haven't converged"),
    ],
)
def test_faults_are_noticed(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch, fault: Any, reason: str) -> None:
    laplacian, mass = problem(sphere)
    expected, _ = eigenbasis(laplacian, mass, 40)
    converge = KrylovSpace.converge
    monkeypatch.setattr(KrylovSpace, "converge", lambda *args: fault(*converge(*args)))
    with pytest.warns(UserWarning, match=f"block Lanczos failed on 642 vertices .*{reason}.*SciPy"):
        evals, evecs = eigenbasis(laplacian, mass, 40)
    assert_pairs(laplacian, mass, evals, evecs, expected)


@pytest.mark.filterwarnings("error")
def test_missing_eigenvalues_are_noticed(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    laplacian, mass = problem(sphere)
    expected, _ = eigenbasis(laplacian, mass, 40)
    # A private name: with block=1, eigenvalues are counted as if any of them could be missing.
    converge, counts = KrylovSpace.converge, eigenpair_checks._counts
    monkeypatch.setattr(eigenpair_checks, "_counts", lambda *problem: counts(*problem[:-1], block=1))
    np.testing.assert_array_equal(eigenbasis(laplacian, mass, 40)[0], expected)

    def skip(space: KrylovSpace, tolerance: float) -> Any:
        pairs = converge(space, tolerance)
        return (np.delete(pairs[0], 5), np.delete(pairs[1], 5, axis=0)) if space.block in faulty else pairs

    monkeypatch.setattr(KrylovSpace, "converge", skip)
    faulty = {4}
    evals, evecs = eigenbasis(laplacian, mass, 40)  # a wider block finds all
    assert_pairs(laplacian, mass, evals, evecs, expected)
    faulty = {4, 8}
    with pytest.warns(UserWarning, match="38 eigenvalues were found where there are 39"):
        evals, _ = eigenbasis(laplacian, mass, 40)
    np.testing.assert_allclose(evals, expected, atol=1e-9 * expected[-1])


@pytest.mark.filterwarnings("error")
def test_several_processes() -> None:
    """Results don't depend on the process, or on the order in which processes finish."""
    problems = [problem(trimesh.creation.icosphere(i)) for i in (3, 1, 2, 1)]
    for (laplacian, mass), (evals, evecs) in zip(problems, eigenbases(problems, 20, jobs=2), strict=True):
        np.testing.assert_allclose(evals, eigenbasis(laplacian, mass, 20)[0], atol=1e-9 * evals[-1])
        assert_pairs(laplacian, mass, evals, evecs)
    assert eigenbases([], 20) == []
    refused(ValueError, "k should be at least 0", eigenbases, problems, -1, jobs=2)


def star(arms: int, length: int) -> scipy.sparse.csr_matrix:
    """The Laplacian of a graph of paths that meet at one end. Its eigenvalues have a multiplicity of arms − 1."""
    inner = np.arange(arms * length).reshape(arms, length) + 1
    tails = np.concatenate([np.zeros(arms, int), inner[:, :-1].ravel()])
    heads = np.concatenate([inner[:, 0], inner[:, 1:].ravel()])
    edges = scipy.sparse.coo_matrix((np.ones(len(tails)), (tails, heads)), shape=(arms * length + 1,) * 2)
    return scipy.sparse.csr_matrix(scipy.sparse.csgraph.laplacian(edges + edges.T))


@pytest.mark.parametrize(("arms", "length", "k"), [(12, 60, 60), (30, 20, 70)])
@pytest.mark.filterwarnings("ignore:block Lanczos failed")
def test_eigenvalues_of_high_multiplicity(arms: int, length: int, k: int) -> None:
    laplacian = star(arms, length)
    evals, evecs = eigenbasis(laplacian, np.ones(laplacian.shape[0]), k)
    expected = scipy.linalg.eigh(laplacian.toarray(), eigvals_only=True, subset_by_index=(0, k - 1))
    assert_pairs(laplacian, np.ones(laplacian.shape[0]), evals, evecs, expected)


@pytest.mark.filterwarnings("error")
def test_very_different_scales() -> None:
    """A sheet squeezed to a ribbon. Its eigenvalues span many orders of magnitude, so orthogonality is lost quickly."""
    x, y = np.divmod(np.arange(1600.0), 40)
    corner = (np.arange(39)[:, None] * 40 + np.arange(39)).ravel()
    faces = np.concatenate([corner[:, None] + [0, 40, 41], corner[:, None] + [0, 41, 1]])
    laplacian, mass = problem((np.stack([1e-4 * x, y, 0 * x], axis=1), faces))
    evals, evecs = eigenbasis(laplacian, mass, 100)
    expected, _ = cpu.scipy_pairs(laplacian, mass, 99)
    np.testing.assert_allclose(evals[1:], expected, rtol=1e-5)
    np.testing.assert_allclose(evecs.T @ (mass[:, None] * evecs), np.eye(100), atol=1e-8)


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_indefinite_laplacian(sphere: trimesh.Trimesh) -> None:
    """Rounding of bad triangles can give negative eigenvalues, for which there is no Cholesky factorization."""
    laplacian, mass = problem(sphere)
    pair = scipy.sparse.csr_matrix(([1.0, 1, -1, -1], ([0, 1, 0, 1], [0, 1, 1, 0])), shape=laplacian.shape)
    indefinite = (laplacian - 50 * pair).tocsr()
    with pytest.warns(UserWarning, match="block Lanczos failed on 642 vertices .*not positive definite"):
        evals, evecs = eigenbasis(indefinite, mass, 12)
    assert np.isfinite(evals).all()
    assert np.isfinite(evecs).all()
    assert (evals >= 0).all()
    with pytest.warns(UserWarning, match="block Lanczos failed on 642"):
        first, second, third = together([(laplacian, mass), (indefinite, mass), (laplacian, mass)], 12)
    assert_pairs(laplacian, mass, *first)
    assert_pairs(laplacian, mass, *third)
    np.testing.assert_allclose(second[0], evals, atol=1e-12)


def test_no_convergence_names_the_mesh(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = scipy.sparse.linalg.ArpackNoConvergence("no", np.zeros(0), np.zeros((0, 0)))
    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", Mock(side_effect=failure))
    monkeypatch.setattr(KrylovSpace, "converge", no_convergence)
    with (
        pytest.warns(UserWarning, match="block Lanczos failed"),
        pytest.raises(MeshError, match="trimesh object: the eigenbasis didn't converge for 4 pairs on 642 vertices"),
    ):
        precompute(sphere, k=5)


# Rounding and wrong input


def plates(count: int, side: int, slivers: int, spacing: float = 0.3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Square plates. Faces of zero area join two vertices of a plate with a new vertex on the line between them.

    Such a face has cotangents of 10⁷ and more. The closer the plates, the larger. Its new vertex has no area.
    """
    rng = np.random.default_rng(seed)
    x, y = np.divmod(np.arange(side * side), side)
    grid = np.stack([x, y, 0 * x], axis=1) / (side - 1)
    corner = (np.arange(side - 1)[:, None] * side + np.arange(side - 1)).ravel()[:, None]
    squares = (corner + np.array([0, side, side + 1, 0, side + 1, 1])).reshape(-1, 3)
    verts, faces = [], []
    for plate in range(count):
        ends = np.array([rng.choice(side * side, 2, replace=False) for _ in range(slivers)])
        along = rng.uniform(0.1, 0.9, (slivers, 1))
        middle = grid[ends[:, 0]] * (1 - along) + grid[ends[:, 1]] * along
        flat = np.column_stack([ends, side * side + np.arange(slivers)])
        points = np.concatenate([grid, middle])
        turned = sum(points[:, i, None] * axis for i, axis in enumerate(random_axes(rng)))
        verts.append(30 * (turned + spacing * plate))
        faces.append(np.concatenate([squares, flat]) + plate * (side * side + slivers))
    return np.concatenate(verts), np.concatenate(faces)


def random_axes(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three axes at right angles, with the same bits on every machine. The last bits decide a stiff problem."""
    a, b = rng.normal(size=(2, 3))
    x, z = (v / math.sqrt(v[0] * v[0] + v[1] * v[1] + v[2] * v[2]) for v in (a, np.cross(a, b)))
    return x, np.cross(z, x), z


def exact(laplacian: scipy.sparse.csr_matrix, mass: np.ndarray) -> np.ndarray:
    """All eigenvalues, computed with 60 digits."""
    with mpmath.workdps(60):
        root = [1 / mpmath.sqrt(m) for m in mass.tolist()]
        dense = laplacian.toarray().tolist()
        scaled = [[x * a * b for x, b in zip(row, root, strict=True)] for row, a in zip(dense, root, strict=True)]
        return np.array([float(value) for value in mpmath.eigsy(mpmath.matrix(scaled), eigvals_only=True)])


@pytest.mark.filterwarnings("error")
def test_faces_of_zero_area_give_no_surplus_zeros() -> None:
    """35 components with 105 such faces. A dense solve of M^−½ L M^−½ finds up to 38 zeros too many."""
    for side in (5, 11):
        laplacian, mass = problem(plates(35, side, 3))
        assert abs(laplacian).max() > 1e7
        evals, evecs = eigenbasis(laplacian, mass, 128)
        assert (evals == 0).sum() == 35
        quotients = ((laplacian @ evecs) * evecs).sum(0)
        np.testing.assert_allclose(quotients, evals, rtol=1e-5, atol=1e-8 * evals[-1])
        np.testing.assert_allclose(evecs.T @ (mass[:, None] * evecs), np.eye(128), atol=1e-8)


def test_small_eigenvalues_of_stiff_problems_are_exact() -> None:
    laplacian, mass = problem(plates(1, 4, 2, seed=7))  # rounding makes most of these Laplacians indefinite
    expected = exact(laplacian, mass)[:8]
    assert abs(expected[0]) < 1e-6 * expected[1]
    evals, _ = eigenbasis(laplacian, mass, 8)
    np.testing.assert_allclose(evals[1:], expected[1:], rtol=1e-6)
    # A private name, for the solve that rounding spoils.
    spoiled, _ = cpu._pairs_of_dense(eigenproblem.Component(laplacian, mass, 7))
    assert relative(spoiled, expected[1:]) > 1e-3


@pytest.mark.filterwarnings("error")
def test_eigenvalues_that_rounding_spoils_are_reported() -> None:
    """The stored cotangent Laplacian is indefinite. The robust Laplacian of the same mesh is not."""
    for mesh, components, spoiled in ((plates(1, 10, 30), 1, "1"), (plates(35, 5, 3, spacing=0.1), 35, r"\d+")):
        laplacian, mass = problem(mesh)
        message = rf"resolve .* {spoiled} of {components} comp.* {components} should be.*laplacian=\"robust\""
        with pytest.warns(UserWarning, match=message):
            evals, _ = eigenbasis(laplacian, mass, 128)
        assert (evals == 0).sum() > components
        evals, _ = eigenbasis(*laplacian_and_mass(load_mesh(mesh), "robust"), 128)
        assert (evals == 0).sum() == components


@pytest.mark.usefixtures("tensors_on_the_cpu")
@pytest.mark.parametrize("fault", ["zeros", "values"])
def test_wrong_eigenvalues_are_reported(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Also with the code for a GPU. The faults are added after the solvers' own checks."""
    laplacian, mass = problem(sphere)

    def spoiled(checked: Any) -> Any:
        def check(*args: Any) -> Any:
            evals, rows, faults = checked(*args)
            if fault == "zeros":
                evals[..., :2] = 0
            else:
                evals[..., 1] *= 1 + 1e-4
            return evals, rows, faults

        return check

    reason = "2 nonconstant vectors have eigenvalue 0" if fault == "zeros" else "has the Rayleigh quotient"
    monkeypatch.setattr(cpu, "checked_pairs", spoiled(cpu.checked_pairs))
    monkeypatch.setattr(eigenbases_on_gpu, "checked_pairs", spoiled(eigenbases_on_gpu.checked_pairs))
    with pytest.warns(UserWarning, match=reason):
        eigenbasis(laplacian, mass, 20)
    with pytest.warns(UserWarning, match=reason):
        together([(laplacian, mass)] * 2, 20)


def both(laplacian: Any, mass: Any, message: str) -> None:
    refused(ValueError, message, eigenbasis, laplacian, mass, 4)
    refused(ValueError, message, eigenbases, [(laplacian, mass)], 4, jobs=1)
    refused(ValueError, message, together, [(laplacian, mass)] * 2, 4)


@pytest.mark.usefixtures("tensors_on_the_cpu")
def test_wrong_arguments_are_refused(sphere: trimesh.Trimesh) -> None:
    laplacian, mass = problem(sphere)
    for entry, message in (
        (np.nan, r"mass\[3\] = nan"),
        (-1.0, r"1 are not; .* mass\[3\] = -1"),
        (np.inf, r"mass\[3\] = inf"),
    ):
        both(laplacian, np.where(np.arange(len(mass)) == 3, entry, mass), message)
    both(-laplacian, mass, r"positive semi-definite.*pass -laplacian")  # the sign convention of libigl
    both(laplacian, mass[:-1], r"should have shape \(641, 641\), shape is \(642, 642\)")
    both(laplacian[:-1], mass, r"should have shape \(642, 642\), shape is \(641, 642\)")
    both(laplacian, scipy.sparse.diags(mass) + laplacian, r"entries beside the diagonal\. Lump it")
    both(laplacian, mass[:, None], r"mass should be a vector \(V,\) or a diagonal matrix \(V, V\), shape is \(642, 1\)")
    broken = laplacian.copy()
    broken.data[5] = np.nan
    both(broken, mass, "not finite")
    both(1j * laplacian, mass, "the Laplacian should be real, but its entries are complex")
    both(laplacian, mass + 0j, "mass should be real, but its entries are complex")


# ---- nested dissection, and the Cholesky factors built on it ----


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def grid(width: int, height: int) -> np.ndarray:
    """The edges of a grid of vertices."""
    at = np.arange(width * height).reshape(height, width)
    across, along = (at[:, :-1], at[:, 1:]), (at[:-1], at[1:])
    return np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in (across, along)])


GRAPHS = {
    "one vertex": np.zeros((0, 2), int),
    "two": np.array([[0, 1]]),
    "a leaf": grid(LEAF, 1),
    "a path": grid(200, 1),
    "a grid": grid(25, 14),
    "a star": np.stack([np.zeros(100, int), np.arange(1, 101)], axis=1),
    "complete": np.stack(np.triu_indices(50, 1), axis=1),
    "a sphere": trimesh.creation.icosphere(2).edges_unique,
}


def put_together(names: list[str], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tails, heads and the graph of each vertex. A vertex of no graph follows each graph."""
    edges, graph, count = [], [], 0
    for i, name in enumerate(names):
        size = int(GRAPHS[name].max(initial=0)) + 1
        edges.append(GRAPHS[name] + count)
        graph += [i] * size + [-1]
        count += size + 1
    both = np.concatenate([np.concatenate(edges), np.concatenate(edges)[:, ::-1]])
    tails, heads = torch.from_numpy(both.T.copy()).to(device)
    return tails, heads, torch.tensor(graph, device=device)


def test_cuts_are_short_and_balanced() -> None:
    tails, heads, graph = put_together(["a grid"], "cpu")
    level, region = nested_dissection(tails, heads, graph)
    assert (level == 0).sum() <= 2 * 14  # along the shorter side or diagonal
    halves = torch.bincount(region[level > 0] >> (level[level > 0] - 1))
    assert halves.max() <= 25 * 14 / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", [[name] for name in GRAPHS] + [[*GRAPHS]], ids=[*GRAPHS, "all together"])
def test_against_a_dense_solve(names: list[str], device: str) -> None:
    tails, heads, graph = put_together(names, device)
    n = len(graph)
    rng = np.random.default_rng(0)
    dense = torch.zeros(n, n, dtype=torch.float64, device=device)
    dense[tails, heads] = -torch.from_numpy(rng.uniform(0.5, 2, len(tails))).to(device)
    dense = dense + dense.mT
    diagonal = -dense.sum(1) + 0.01
    dense += torch.diag(diagonal)
    factor = MultifrontalCholesky(tails, heads, dense[tails, heads], diagonal, graph)
    assert factor.failed == set()
    for count in (1, 8):
        right = torch.from_numpy(rng.standard_normal((n, count))).to(device)
        expected = torch.linalg.solve(dense, right)
        expected[graph < 0] = 0
        solution = factor.solve(right).clone()
        torch.testing.assert_close(solution, expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(factor.solve(right), solution)


def test_indefinite_blocks_are_named() -> None:
    tails, heads, graph = put_together(["a grid", "a sphere", "two", "a path"], "cpu")
    diagonal = torch.full((len(graph),), 8.0, dtype=torch.float64)
    diagonal[(graph == 1).nonzero()[100]] = -1
    diagonal[graph == 2] = 0.5
    factor = MultifrontalCholesky(tails, heads, -torch.ones(len(tails), dtype=torch.float64), diagonal, graph)
    assert factor.failed == {1, 2}
    right = torch.ones(len(graph), 2, dtype=torch.float64)
    solution = factor.solve(right)
    back = diagonal[:, None] * solution - torch.zeros_like(solution).index_add(0, tails, solution[heads])
    for good in (0, 3):
        torch.testing.assert_close(back[graph == good], right[graph == good])


def test_vertices_without_a_graph() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    empty, graph = torch.zeros(0, dtype=torch.float64), torch.full((3,), -1)
    factor = MultifrontalCholesky(none, none, empty, torch.ones(3, dtype=torch.float64), graph)
    assert torch.equal(factor.solve(torch.ones(3, 2, dtype=torch.float64)), torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("device", DEVICES)
def test_a_badly_conditioned_surface(device: str) -> None:
    """The cotangents of a squeezed sphere span many orders of magnitude."""
    sphere = trimesh.creation.icosphere(3)
    sphere.vertices *= [1, 1, 1e-3]
    laplacian, mass = laplacian_and_mass(load_mesh(sphere), "cotan")
    scale = scipy.sparse.diags(mass**-0.5)
    matrix = (scale @ laplacian @ scale + scipy.sparse.eye(len(mass))).tocoo()
    rows, columns = (torch.from_numpy(a.astype(np.int64)).to(device) for a in (matrix.row, matrix.col))
    values = torch.from_numpy(matrix.data).to(device)
    off = rows != columns
    graph = torch.zeros(len(mass), dtype=torch.int64, device=device)
    diagonal = torch.from_numpy(matrix.diagonal()).to(device)
    factor = MultifrontalCholesky(rows[off], columns[off], values[off], diagonal, graph)
    expected = np.random.default_rng(0).standard_normal((len(mass), 4))
    right = matrix @ expected
    solution = factor.solve(torch.from_numpy(right).to(device)).cpu().numpy()
    condition = np.linalg.cond(matrix.toarray())
    assert condition > 1e6
    assert np.linalg.norm(solution - expected) < 1e-15 * condition * np.linalg.norm(expected)
