"""Laplacians, mass, tangent frames and gradients of a mesh, and of many meshes at once, which have the same values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import potpourri3d
import pytest
import robust_laplacian
import scipy.linalg
import scipy.sparse
import scipy.spatial
import torch
import trimesh
from conftest import random_rotation
from hypothesis import example, given, settings, strategies as st
from operator_checks import assert_same, gradient, relative
from refusals import refused
from shapes import Arrays, arrays, cloud_of, ellipsoid, moebius, soup, strip_on_a_line
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from diffnet import DiffusionNet
from diffnet.benchmarks.cases.preprocessing import bumpy_torus
from diffnet.geometry import (
    LAPLACIANS,
    Connectivity,
    LaplacianKind,
    Mesh,
    Operators,
    assemble,
    gradient_values,
    laplacian_and_mass,
    load_mesh,
    make_mesh,
    normalize_positions,
    one_ring,
    precompute,
    tangent_frames,
)
from diffnet.geometry.discretize import gradient as gradient_module, intrinsic_delaunay, packed_delaunay
from diffnet.geometry.discretize.intrinsic_delaunay import delaunay_laplacian
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing import packed as packed_meshes
from diffnet.geometry.preprocessing.packed import Discretized, discretize_on, entry_arrays
from diffnet.geometry.preprocessing.recipe import discretize
from diffnet.geometry.store.assembly import assembled_fields
from diffnet.ops import SparseMatrix, implicit_diffusion

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", LAPLACIANS)
SOURCES = pytest.mark.parametrize("source", ["mesh", "cloud"])


@SOURCES
def test_frames_of_a_sphere(sphere: trimesh.Trimesh, source: str) -> None:
    mesh = load_mesh(sphere if source == "mesh" else cloud_of(sphere))
    frames = tangent_frames(mesh)
    np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (642, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(frames), 1, atol=1e-12)
    assert ((frames[:, 2] * mesh.verts).sum(1) > 0.99).all()  # outward


def test_normals_of_a_cloud_agree_between_neighbors() -> None:
    """The surface is neither closed nor convex, so "outward" doesn't determine the signs."""
    rng = np.random.default_rng(0)
    angle, height = rng.uniform(0, 3 * np.pi, 3000), rng.uniform(0, 6, 3000)
    radius = 2 + angle / np.pi  # a scroll with a distance of 2 between its turns
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], 1)
    normals = tangent_frames(make_mesh(points, None))[:, 2]
    tangent = np.stack([np.cos(angle) / np.pi - radius * np.sin(angle), np.sin(angle) / np.pi + radius * np.cos(angle)])
    true = np.stack([tangent[1], -tangent[0], np.zeros(3000)], 1) / np.linalg.norm(tangent, axis=0)[:, None]
    agreement = (normals * true).sum(1)
    assert np.abs(agreement).min() > 0.9
    assert len(set(np.sign(agreement))) == 1


def test_normals_of_two_clouds_point_outward_each(sphere: trimesh.Trimesh) -> None:
    points = np.array(sphere.vertices)
    normals = tangent_frames(make_mesh(np.concatenate([points, points + np.array([9, 0, 0])]), None))[:, 2]
    assert ((normals * np.concatenate([points, points])).sum(1) > 0.99).all()


def test_frames_where_normals_cancel() -> None:
    """A double-sided triangle takes the normal of its largest face; unused vertices take z."""
    verts = np.array([[0.0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0.9], [5, 5, 5]])
    frames = tangent_frames(make_mesh(verts, [[0, 1, 2], [0, 2, 1]]))
    np.testing.assert_allclose(np.abs(frames[:3, 2]), np.tile([1, 0, 0], (3, 1)), atol=1e-12)
    np.testing.assert_allclose(frames[4, 2], [0, 0, 1])
    assert tangent_frames(make_mesh([[1.0, 2, 3]], None)).shape == (1, 3, 3)


@SOURCES
def test_gradients_of_linear_functions_are_exact(plane: tuple[np.ndarray, np.ndarray], source: str) -> None:
    verts, faces = plane
    operators = precompute((verts, faces if source == "mesh" else None), k=4)
    normal = random_rotation(1)[:, 2]
    for direction in np.random.default_rng(0).standard_normal((3, 3)):
        expected = direction - (direction @ normal) * normal
        found = gradient(operators, verts @ direction + 3)
        assert np.abs(found - expected).max() < 1e-5 * np.linalg.norm(expected)


@SOURCES
@KINDS
def test_gradient_turns_with_the_mesh(sphere: trimesh.Trimesh, source: str, kind: Any) -> None:
    verts, faces = arrays(sphere)
    # Noise makes the distances to neighbors differ.
    verts = verts * [1, 0.7, 0.5] + np.random.default_rng(0).normal(0, 0.01, verts.shape)
    faces = faces if source == "mesh" else None
    turn = random_rotation(3)
    f = np.sin(3 * verts[:, 0]) + verts[:, 1] * verts[:, 2]
    still, turned = (precompute((own, faces), k=8, laplacian=kind) for own in (verts, verts @ turn.T))
    before, after = gradient(still, f), gradient(turned, f)
    assert relative(np.linalg.norm(after, axis=1), np.linalg.norm(before, axis=1)) < 1e-4
    assert relative(after, before @ turn.T) < 1e-4
    np.testing.assert_allclose(turned.evals, still.evals, rtol=1e-4, atol=1e-5)


def test_slivers_do_not_blow_gradients_up() -> None:
    verts = np.array([[0.0, 0, 0], [1, 1e-5, 0], [2, 0, 0], [3, 1e-5, 0]])
    operators = precompute((verts, [[0, 1, 2], [1, 3, 2]]), k=2)
    assert np.abs(gradient(operators, np.array([0, 1, 0, 1.0]))).max() < 5


@KINDS
def test_laplacian_is_symmetric_and_semi_definite(sphere: trimesh.Trimesh, plane: Any, kind: Any) -> None:
    for source in (sphere, plane, moebius(), cloud_of(sphere)):
        laplacian, mass = laplacian_and_mass(load_mesh(source), kind)
        assert abs(laplacian - laplacian.T).max() == 0
        largest = abs(laplacian).max()
        assert np.abs(laplacian.sum(1)).max() < 1e-12 * largest
        assert scipy.linalg.eigvalsh(laplacian.toarray())[0] > -1e-10 * largest
        assert (mass > 0).all()
        assert laplacian.has_sorted_indices


@KINDS
def test_mass_is_the_area(sphere: trimesh.Trimesh, kind: Any) -> None:
    _, mass = laplacian_and_mass(load_mesh(sphere), kind)
    assert mass.sum() == pytest.approx(sphere.area, rel=1e-4)
    thirds = np.bincount(sphere.faces.ravel(), np.repeat(sphere.area_faces / 3, 3))
    if kind == "cotan":
        np.testing.assert_allclose(mass, thirds, rtol=1e-6)


VERTS, FACES = arrays(trimesh.creation.icosphere(2))


def bent(seed: int, jitter: float, stretch: float) -> np.ndarray:
    """The vertices of the ball, jittered and stretched.

    Without jitter, quadrilaterals are Delaunay with either diagonal, and the areas of vertices depend on the choice.
    """
    noise = np.random.default_rng(seed).standard_normal(VERTS.shape)
    return (VERTS + jitter * noise) * [1, 1, stretch]


def compare(verts: np.ndarray, faces: np.ndarray) -> None:
    found = delaunay_laplacian(verts, faces)
    laplacian, mass = found
    expected, expected_mass = robust_laplacian.mesh_laplacian(verts, faces)
    # Edges with weights above −10⁻⁶ aren't flipped.
    assert (abs(laplacian - expected) - 1e-6 * abs(expected)).max() <= 1e-5
    np.testing.assert_allclose(mass, expected_mass.diagonal(), rtol=1e-6, atol=1e-9)


@given(st.integers(1, 10_000), st.floats(0.01, 0.3), st.floats(1e-3, 1e3))
@example(0, 0.1, 1.0)  # crumpled
@example(0, 0.2, 1.0)
@example(0, 0.02, 8.0)  # long
@example(0, 0.01, 100.0)
@settings(max_examples=15, deadline=None)
def test_agrees_with_robust_laplacian(seed: int, jitter: float, stretch: float) -> None:
    verts = bent(seed, jitter, stretch)
    weights = -potpourri3d.cotan_laplacian(verts, FACES)
    weights.setdiag(0)
    assert seed or weights.min() < -0.1  # some edges of the examples must be flipped
    compare(verts / np.linalg.norm(verts, axis=1).max(), FACES)


def test_agrees_on_other_closed_surfaces(shared: Path) -> None:
    torus = bumpy_torus(1500)
    compare(torus.verts, torus.faces)
    compare(np.eye(4)[:, :3], np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [2, 0, 3]]))
    compare(np.eye(3), np.array([[0, 1, 2], [2, 1, 0]]))  # two sides of one triangle
    surface = load_mesh(min((shared / "data" / "rna" / "off").iterdir()))
    compare(normalize_positions(surface.verts), surface.faces)


def test_surfaces_that_are_not_closed_are_left_to_the_library() -> None:
    turned = FACES.copy()
    turned[0] = turned[0, ::-1]
    fin = np.concatenate([FACES, [[FACES[0, 0], FACES[0, 1], FACES[5, 2]]]])
    for faces in (FACES[1:], FACES[2:], turned, fin, np.concatenate([FACES, FACES[:1]]), np.concatenate([FACES] * 2)):
        assert delaunay_laplacian(VERTS, faces) is None


def test_endless_flips_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intrinsic_delaunay, "MAX_ROUNDS", 2)
    assert delaunay_laplacian(bent(0, 0.1, 8), FACES) is None


# ---- discretize_on: many meshes at once, compared with discretize, which takes one ----


def noisy_ball(jitter: float, stretch: float, seed: int = 0) -> Arrays:
    return bent(seed, jitter, stretch), FACES


def damaged(seed: int) -> Arrays:
    """A ball with holes, fins at edges, turned faces, and faces with a repeated corner."""
    verts, faces = noisy_ball(0.1, 1, seed)
    rng = np.random.default_rng(seed)
    faces = faces[rng.random(len(faces)) < 0.6]
    fins = faces[:9].copy()
    fins[:, 2] = (fins[:, 0] + 80) % len(verts)
    turned, repeated = faces[20:30, ::-1], faces[:3, [0, 0, 1]]
    return verts, np.concatenate([faces[:20], turned, faces[30:], fins, repeated])


def components() -> Arrays:
    """Two balls of different size with an unused vertex between them."""
    (verts, faces), (others, further) = noisy_ball(0.1, 8, 1), noisy_ball(0.02, 1, 2)
    return np.concatenate([verts, [[9.0, 9, 9]], 0.1 * others + 20]), np.concatenate([faces, further + len(verts) + 1])


MESHES: dict[str, Arrays] = {
    "round": noisy_ball(0, 1),  # rounding decides where some of its tangent frames start
    "crumpled": noisy_ball(0.2, 1),
    "long": noisy_ball(0.02, 8),
    "damaged": damaged(3),
    "components": components(),
    "moebius": moebius(),
    "tetrahedron": (np.eye(4)[:, :3], np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [2, 0, 3]])),
    # One face without area, and slivers that raise the smaller eigenvalue of the normal equations of the gradient.
    "slivers": (
        np.array([[0, 0, 0], [1, 0, 0], [0, 0.02, 0], [1, 0.03, 0.01], [0.5, 0, 0], [9, 9, 9]]),
        np.array([[0, 1, 2], [1, 3, 2], [0, 4, 1], [2, 2, 1]]),
    ),
}


def checked(mesh: Any, name: str = "mesh", **options: Any) -> Mesh:
    return replace(mesh_for_operators(mesh, **options), name=name)


def of_mesh(found: Discretized, number: int) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Laplacian and mass of a mesh in double precision."""
    problem, (first, end) = found.problem, found.operators.ptr[number : number + 2].tolist()
    return problem.on_host()[first:end, first:end], problem.mass[first:end].numpy()


@KINDS
def test_values_are_those_of_one_mesh_after_the_other(kind: LaplacianKind) -> None:
    meshes, options = [checked(mesh, name) for name, mesh in MESHES.items()], Options(4, kind)
    found = discretize_on("cpu", meshes, options)
    assert found.places == list(range(len(meshes)))
    for number, (mesh, entry) in enumerate(zip(meshes, entry_arrays(found.operators), strict=True)):
        expected = discretize(mesh, options)
        laplacian, mass = of_mesh(found, number)
        # Edges with weights above −10⁻⁶ aren't flipped.
        assert (abs(laplacian - expected.laplacian) - 1e-6 * abs(expected.laplacian)).max() <= 1e-5, mesh.name
        assert abs(laplacian - laplacian.T).max() == 0
        assert np.abs(laplacian.sum(1)).max() < 1e-12 * abs(laplacian).max()
        np.testing.assert_allclose(mass, expected.mass, rtol=1e-6, atol=1e-9)
        types, others = ({name: x.dtype for name, x in each.items()} for each in (entry, expected.arrays))
        assert types == others
        np.testing.assert_allclose(entry["mass"], expected.arrays["mass"], rtol=2e-6, atol=1e-9)
        np.testing.assert_allclose(entry["frames"], expected.arrays["frames"], atol=1e-6)
        largest = np.abs(expected.arrays["gradient"]).max()
        np.testing.assert_allclose(entry["gradient"], expected.arrays["gradient"], rtol=1e-5, atol=1e-6 * largest)
        for name in ("gradient_indptr", "gradient_indices", "row_order", "joined"):
            np.testing.assert_array_equal(entry[name], expected.arrays[name])


def of_entry(entry: dict[str, np.ndarray], mesh: Mesh) -> Operators:
    """Operators without eigenpairs."""
    pairs = {"evals": np.zeros(0, np.float32), "evecs": np.zeros((len(mesh.verts), 0), np.float32)}
    return Operators(**assembled_fields(entry | pairs, mesh.faces))


@KINDS
def test_the_bits_of_a_mesh_do_not_depend_on_the_others(kind: LaplacianKind) -> None:
    """Operators are those of the entries."""
    meshes, options = [checked(mesh, name) for name, mesh in MESHES.items()], Options(0, kind)
    together = discretize_on("cpu", meshes, options)
    parts = zip(meshes, entry_arrays(together.operators), together.operators.split(), strict=True)
    for number, (mesh, entry, operators) in enumerate(parts):
        assert_same(operators, of_entry(entry, mesh))
        alone = discretize_on("cpu", [mesh], options)
        [expected] = entry_arrays(alone.operators)
        for name, array in expected.items():
            np.testing.assert_array_equal(entry[name], array, err_msg=f"{mesh.name}: {name}")
        for a, b in zip(of_mesh(together, number), of_mesh(alone, 0), strict=True):
            assert abs(a - b).max() == 0


def test_rows_are_stored_along_the_surface_where_neighbors_are_far(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradient_module, packed_meshes):
        monkeypatch.setattr(module, "MAX_GAP", 42)
    verts, faces = noisy_ball(0.1, 1)
    number = np.random.default_rng(0).permutation(len(verts))
    mixed = np.empty_like(verts)
    mixed[number] = verts
    meshes = [checked(moebius()), checked((mixed, number[faces])), checked((verts, faces))]
    options = Options(4, "cotan")
    packed = discretize_on("cpu", meshes, options).operators
    entries = entry_arrays(packed)
    assert [len(entry["row_order"]) for entry in entries] == [0, len(verts), 0]
    for entry, mesh in zip(entries, meshes, strict=True):
        expected = discretize(mesh, options).arrays
        for name, array in expected.items():
            tolerance = 1e-5 if array.dtype == np.float32 else 0
            np.testing.assert_allclose(entry[name], array, rtol=tolerance, atol=tolerance)
    assert_same(packed.split()[1], of_entry(entries[1], meshes[1]))


def broken(change: Callable[[np.ndarray], Any]) -> Mesh:
    """The tetrahedron with other positions, which nobody has checked."""
    mesh = checked(MESHES["tetrahedron"])
    return replace(mesh, verts=np.asarray(change(mesh.verts.copy()), np.float64))


BROKEN = {
    "corners": checked((np.eye(3), [[0, 0, 1], [2, 1, 1]]), "corners"),
    "point": broken(np.ones_like),
    "line": checked(strip_on_a_line((1, 2, 3)), "line"),
    "nan": broken(lambda verts: verts * np.nan),
    "large": broken(lambda verts: 1e25 * verts),
}


@KINDS
def test_bad_meshes_are_left_to_the_host_and_the_others_go_on(kind: LaplacianKind) -> None:
    good, options = checked(MESHES["crumpled"]), Options(4, kind)
    found = discretize_on("cpu", [good, *BROKEN.values(), good], options)
    assert found.places == [0, len(BROKEN) + 1]
    for mesh in BROKEN.values():
        with pytest.raises(MeshError):
            discretize(mesh, options)
    alone = discretize_on("cpu", [good], options)
    for number in (0, 1):
        for a, b in zip(of_mesh(found, number), of_mesh(alone, 0), strict=True):
            assert abs(a - b).max() == 0
    assert discretize_on("cpu", list(BROKEN.values()), options) is None


def sheet() -> Arrays:
    """A square grid of points in long triangles. Flips make squares, whose diagonals are a matter of choice."""
    points = np.stack(np.meshgrid(np.arange(9.0), np.arange(9.0)), -1).reshape(-1, 2)
    faces = scipy.spatial.Delaunay(points @ [[1, 0], [0.5, 0.25]]).simplices.astype(np.int64)
    (x, y), (u, v) = ((points[faces[:, i]] - points[faces[:, 0]]).T for i in (1, 2))
    faces[x * v < y * u] = faces[x * v < y * u][:, ::-1]
    return np.pad(points, ((0, 0), (0, 1))), faces


def slab() -> Arrays:
    """Two sheets with walls between their rims."""
    verts, faces = sheet()
    count = len(verts)
    edges = {(a, b) for face in faces.tolist() for a, b in zip(face, face[1:] + face[:1], strict=True)}
    rim = np.array(sorted((a, b) for a, b in edges if (b, a) not in edges))
    a, b = rim.T
    walls = np.concatenate([np.stack([b, a, a + count], 1), np.stack([b, a + count, b + count], 1)])
    return np.concatenate([verts, verts - [0, 0, 1]]), np.concatenate([faces, faces[:, ::-1] + count, walls])


def test_edges_that_are_a_matter_of_choice_are_chosen_alike() -> None:
    mesh, options = checked(slab()), Options(4)
    laplacian, mass = of_mesh(discretize_on("cpu", [mesh], options), 0)
    expected = discretize(mesh, options)
    assert abs(laplacian - expected.laplacian).max() < 1e-6
    np.testing.assert_allclose(mass, expected.mass, rtol=1e-6)


def fan() -> Arrays:
    """Three faces at one edge, two of them at the same angle."""
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 2, 0.0], [0, 0, 1]])
    return verts, np.array([[0, 1, 2], [0, 1, 3], [1, 0, 4]])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (checked(cloud_of(trimesh.creation.icosphere(1))), Options(4)),
        (checked(MESHES["crumpled"], normals=np.ones((162, 3))), Options(4)),
        (checked(soup(MESHES["crumpled"])), Options(4, "cotan")),
        (checked(soup(MESHES["crumpled"])), Options(4, join="always")),
        (checked(fan()), Options(4, join="never")),
        (checked(sheet()), Options(4, join="never")),
    ],
    ids=["cloud", "normals", "auto", "always", "equal-angles", "choice-in-two-sheets"],
)
def test_meshes_that_are_left_to_the_host(mesh: Mesh, options: Options) -> None:
    assert discretize_on("cpu", [mesh, ellipsoid(0)], options).places == [1]


def test_what_else_is_left_and_what_is_not() -> None:
    verts, faces = MESHES["tetrahedron"]
    touching = np.concatenate([verts, 2 * verts - [1, 0, 0]]), np.concatenate([faces, faces + 4])
    assert discretize_on("cpu", [checked(touching)], Options(4)).places == [0]
    assert discretize_on("cpu", [ellipsoid(0)], Options(4, operators="original")) is None


def test_meshes_are_left_if_their_flips_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long ball takes more than two rounds, the tetrahedron none."""
    monkeypatch.setattr(packed_delaunay, "MAX_ROUNDS", 2)
    found = discretize_on("cpu", [checked(MESHES["long"]), checked(MESHES["tetrahedron"])], Options(4))
    assert found.places == [1]


@pytest.mark.gpu
@KINDS
def test_results_on_a_gpu_are_those_of_the_cpu_and_the_same_in_every_run(kind: LaplacianKind) -> None:
    meshes = [*(checked(mesh) for mesh in MESHES.values()), *(ellipsoid(seed, 5) for seed in range(8))]
    first, second, on_cpu = (discretize_on(device, meshes, Options(4, kind)) for device in ("cuda", "cuda", "cpu"))
    assert first.places == on_cpu.places
    assert torch.equal(first.problem.mass, second.problem.mass)
    assert torch.equal(first.problem.values, second.problem.values)
    entries = [entry_arrays(found.operators) for found in (first, second, on_cpu)]
    for a, b, expected in zip(*entries, strict=True):
        for name, array in expected.items():
            np.testing.assert_array_equal(a[name], b[name])
            np.testing.assert_allclose(a[name], array, rtol=1e-5, atol=1e-6 * np.abs(array).max(initial=0))


# ---- assemble: operators as functions of the positions ----


def scattered(mesh: trimesh.Trimesh, missing: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of a mesh with noise, and its faces without the last ones."""
    verts = torch.from_numpy(mesh.vertices.copy())
    noise = torch.randn(verts.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    faces = torch.from_numpy(mesh.faces[: len(mesh.faces) - missing])
    return verts + 0.1 * mesh.scale / len(verts) ** 0.5 * noise, faces


CLOSED = scattered(trimesh.creation.icosphere(1))
OPEN = scattered(trimesh.creation.torus(2, 0.5, major_sections=8, minor_sections=5), missing=7)
POOR = tuple(map(torch.from_numpy, MESHES["slivers"]))
SURFACES = {"closed": CLOSED, "open": OPEN, "poor": POOR}


def dense(matrix: SparseMatrix, which: int | None = None) -> np.ndarray:
    values = matrix.values if which is None else matrix.values[which]
    return SparseMatrix(matrix.pattern, values).to_scipy().toarray()


@KINDS
@pytest.mark.parametrize("name", SURFACES)
def test_values_are_those_of_preprocessing(name: str, kind: LaplacianKind) -> None:
    verts, faces = SURFACES[name]
    operators = assemble(verts, Connectivity(faces, len(verts)), kind)
    usable = [face for face in faces.tolist() if len(set(face)) == 3]
    mesh = make_mesh(verts.numpy(), np.array(usable))
    laplacian, mass = laplacian_and_mass(mesh, kind)
    frames, edges = tangent_frames(mesh), one_ring(mesh.faces, len(verts))
    np.testing.assert_allclose(operators.mass, mass, rtol=1e-12)
    np.testing.assert_allclose(dense(operators.laplacian), laplacian.toarray(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(operators.frames, frames, atol=1e-12)
    for component, values in enumerate(gradient_values(mesh.verts, frames, edges)):
        expected = scipy.sparse.csr_matrix((values, edges.indices, edges.indptr), edges.shape).toarray()
        np.testing.assert_allclose(dense(operators.gradient, component), expected, rtol=1e-9, atol=1e-9)


@KINDS
@pytest.mark.parametrize("name", ["closed", "open"])
def test_gradients_against_finite_differences(name: str, kind: LaplacianKind) -> None:
    verts, faces = SURFACES[name]
    connectivity = Connectivity(faces, len(verts))

    def values(verts: Tensor) -> tuple[Tensor, ...]:
        o = assemble(verts, connectivity, kind)
        return o.mass, o.laplacian.values, o.gradient.values, o.frames

    moving = verts.clone().requires_grad_()
    assert gradcheck(values, moving, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(values, moving, fast_mode=True, check_fwd_over_rev=True)


@KINDS
def test_gradients_where_faces_have_no_area_are_finite(kind: LaplacianKind) -> None:
    verts, faces = POOR
    moving = verts.clone().requires_grad_()
    o = assemble(moving, Connectivity(faces, len(verts)), kind)
    sum(values.square().sum() for values in (o.mass, o.gradient.values, o.frames)).backward()
    assert moving.grad.isfinite().all()
    assert moving.grad.any()


def test_gradients_through_implicit_diffusion() -> None:
    verts, faces = OPEN
    connectivity = Connectivity(faces, len(verts))
    x, time = torch.randn(len(verts), 2, dtype=torch.float64), torch.tensor([0.1, 0.01], dtype=torch.float64)

    def diffused(verts: Tensor) -> Tensor:
        o = assemble(verts, connectivity)
        return implicit_diffusion(x, time, o.laplacian, o.mass, o.ptr, o.lengths, tolerance=1e-12)

    assert gradcheck(diffused, verts.clone().requires_grad_(), fast_mode=True)
    assert gradgradcheck(diffused, verts.clone().requires_grad_(), fast_mode=True)


def test_a_network_feels_the_metric() -> None:
    verts, faces = (CLOSED[0].float().requires_grad_(), CLOSED[1])
    network = DiffusionNet(2, 3, width=8, blocks=1, diffusion="implicit", initial_times="spread").eval()
    network(torch.ones(len(verts), 2), assemble(verts, Connectivity(faces, len(verts)))).square().sum().backward()
    assert verts.grad.isfinite().all()
    assert verts.grad.any()


def test_a_batch_is_its_meshes() -> None:
    parts = [CLOSED, (1e3 * OPEN[0], OPEN[1]), CLOSED]
    lengths = [len(verts) for verts, _ in parts]
    starts = [sum(lengths[:i]) for i in range(len(parts))]
    faces = torch.cat([faces + start for (_, faces), start in zip(parts, starts, strict=True)])
    batch = assemble(torch.cat([verts for verts, _ in parts]), Connectivity(faces, sum(lengths), lengths))
    for one, (verts, faces) in zip(batch.split(), parts, strict=True):
        alone = assemble(verts, Connectivity(faces, len(verts)))
        for name in ("mass", "frames", "faces"):
            torch.testing.assert_close(getattr(one, name), getattr(alone, name), rtol=1e-12, atol=0)
        for name in ("laplacian", "gradient"):
            torch.testing.assert_close(getattr(one, name).values, getattr(alone, name).values, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(getattr(one, name).pattern.indices, alone.gradient.pattern.indices)


@pytest.mark.parametrize(
    ("faces", "vertices", "lengths", "message"),
    [
        (torch.tensor([[0, 1, 3]]), 3, None, "faces should be from 0 to 2, got 0 to 3"),
        (torch.tensor([[0, 1]]), 3, None, r"faces should have shape \(F, 3\)"),
        (torch.tensor([[0, 1, 2]]), 4, [2, 2], "a face joins vertices of two meshes"),
        (torch.tensor([[3, 4, 5], [0, 1, 2]]), 6, [3, 3], "faces should be mesh by mesh"),
        (torch.tensor([[0, 1, 2]]), 4, [3], "lengths should add up to the 4 rows"),
        (torch.tensor([[0, 1, 1]]), 3, None, "none of the 1 faces has three distinct corners"),
    ],
)
def test_faces_that_do_not_fit(faces: Tensor, vertices: int, lengths: list[int] | None, message: str) -> None:
    refused(ValueError, message, Connectivity, faces, vertices, lengths)


def test_arguments_of_other_types_and_shapes() -> None:
    refused(TypeError, "faces should be integers", Connectivity, torch.zeros(1, 3), 3)
    triangle = Connectivity(torch.tensor([[0, 1, 2]]), 3)
    refused(TypeError, "verts should be floating point", assemble, torch.zeros(3, 3, dtype=torch.int64), triangle)
    refused(ValueError, r"verts should have shape \(3, 3\), shape is \(4, 3\)", assemble, torch.zeros(4, 3), triangle)


@pytest.mark.gpu
def test_assembly_on_a_gpu_is_that_of_the_cpu_and_the_same_in_every_run() -> None:
    verts, faces = scattered(trimesh.creation.icosphere(5))

    def results(device: str) -> list[Tensor]:
        moving = verts.to(device).requires_grad_()
        o = assemble(moving, Connectivity(faces.to(device), len(verts)))
        values = [o.mass, o.laplacian.values, o.gradient.values, o.frames]
        sum(v.square().sum() for v in values).backward()
        return [v.detach() for v in (*values, moving.grad)]

    first, second, on_cpu = results("cuda"), results("cuda"), results("cpu")
    assert all(map(torch.equal, first, second))
    for found, expected in zip(first, on_cpu, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
