"""What preprocessing computes: its mathematical properties, on clean meshes, hard ones and random rubbish."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
import trimesh
from conftest import random_rotation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffnet.geometry import (
    LAPLACIANS,
    MeshError,
    Operators,
    collate,
    eigenbasis,
    gradient_values,
    hks,
    laplacian_and_mass,
    load_mesh,
    make_mesh,
    mesh_edges,
    normalize_positions,
    one_ring,
    patches,
    precompute,
    tangent_frames,
    with_k_ring,
    wks,
)
from diffnet.ops import SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", LAPLACIANS)
HARD = (
    "bunny_dupfaces.ply",
    "busted.STL",
    "capsule.obj",
    "chair_model.obj",
    "cycloidal.ply",
    "fan3.obj",
    "featuretype.ply",
    "hourglass_ico.obj",
    "joined_tetrahedra.obj",
    "moebius.obj",
    "rna_6CFJ_2B.off",
    "triple_vierbein.obj",
)
TETRAHEDRON = (
    np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1.0]]),
    np.array([[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]),
)


def arrays(mesh: trimesh.Trimesh) -> tuple[np.ndarray, np.ndarray]:
    return np.array(mesh.vertices), np.array(mesh.faces)


def cloud_of(mesh: trimesh.Trimesh) -> tuple[np.ndarray, None]:
    return np.array(mesh.vertices), None


def matrix(sparse: SparseMatrix, component: int | None = None) -> scipy.sparse.csr_matrix:
    """A float64 copy, for one of several sets of values."""
    values = sparse.values if component is None else sparse.values[component]
    entries = values.double().numpy(), sparse.pattern.indices.numpy(), sparse.pattern.indptr.numpy()
    return scipy.sparse.csr_matrix(entries, shape=sparse.pattern.shape)


def gradient(operators: Operators, f: np.ndarray) -> np.ndarray:
    """(V, 3) gradients in space."""
    g = [matrix(operators.gradient, i) @ f for i in range(2)]
    frames = operators.frames.double().numpy()
    return g[0][:, None] * frames[:, 0] + g[1][:, None] * frames[:, 1]


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


def gram(operators: Operators) -> np.ndarray:
    evecs = operators.evecs.double().numpy()
    return evecs.T @ (operators.mass.double().numpy()[:, None] * evecs)


def assert_sound(operators: Operators, k: int) -> None:
    """Everything that holds for any mesh whatever."""
    vertices = operators.num_vertices
    laplacian = matrix(operators.laplacian)
    for value in (
        operators.mass,
        operators.evals,
        operators.evecs,
        operators.laplacian.values,
        operators.gradient.values,
        operators.frames,
    ):
        assert value.dtype == torch.float32
        assert value.isfinite().all()
    assert (operators.mass >= 0).all()
    assert operators.mass.sum() > 0
    assert operators.evals.shape == (1, k)
    assert operators.evecs.shape == (vertices, k)
    assert (operators.evals >= 0).all()
    assert (operators.evals.diff() >= 0).all()
    assert operators.laplacian.pattern.shape == operators.gradient.pattern.shape == (vertices, vertices)
    largest = abs(laplacian).max()
    assert abs(laplacian - laplacian.T).max() <= 1e-6 * largest
    assert np.abs(laplacian.sum(1)).max() <= 1e-4 * largest
    frames = operators.frames.double().numpy()
    np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (vertices, 1, 1)), atol=1e-5)
    np.testing.assert_allclose(np.linalg.det(frames), 1, atol=1e-5)
    # Orthonormal vectors, and zero vectors behind them.
    found = min(k, int((operators.mass > 0).sum()))
    np.testing.assert_allclose(gram(operators), np.diag(np.arange(k) < found), atol=1e-4)
    assert (operators.evecs[operators.mass == 0] == 0).all()


# Hard meshes


@pytest.mark.parametrize("name", HARD)
@KINDS
def test_hard_meshes(shared: Path, name: str, kind: Any) -> None:
    mesh = load_mesh(shared / "data" / "hard_meshes" / name)
    operators = precompute(mesh, 16, kind)
    assert_sound(operators, 16)
    used = np.unique(mesh.faces[[len(set(f)) == 3 for f in mesh.faces.tolist()]])
    assert (operators.mass > 0).sum() == len(used)


def test_every_hard_mesh_is_tested(shared: Path) -> None:
    assert sorted(HARD) == sorted(p.name for p in (shared / "data" / "hard_meshes").iterdir())


def moebius(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    angle = np.arange(count) * 2 * np.pi / count
    rims = []
    for side in (-0.3, 0.3):
        radius = 1 + side * np.cos(angle / 2)
        rims.append(np.stack([radius * np.cos(angle), radius * np.sin(angle), side * np.sin(angle / 2)], 1))
    here = np.arange(count)
    after = (here + 1) % count
    twist = here == count - 1
    near, far = np.where(twist, after + count, after), np.where(twist, after, after + count)
    faces = np.concatenate([np.stack([here, near, here + count], 1), np.stack([near, far, here + count], 1)])
    return np.concatenate(rims), faces


def test_degenerate_faces_do_not_hide_the_spectrum(shared: Path) -> None:
    """Both Laplacians know the capsule, though its cotangents at 200 faces of zero area are 10⁷ and more."""
    path = shared / "data" / "hard_meshes" / "capsule.obj"
    robust, cotan = precompute(path, 40, "robust"), precompute(path, 40, "cotan")
    np.testing.assert_allclose(cotan.evals, robust.evals, rtol=1e-3, atol=1e-5)


@KINDS
def test_moebius_strip(kind: Any) -> None:
    operators = precompute(moebius(), 10, kind)
    assert_sound(operators, 10)
    assert (operators.evals[0] < 1e-4).sum() == 1


@KINDS
def test_non_manifold_fan(kind: Any) -> None:
    """Five half discs around one common diameter."""
    verts = [[0.0, 0, 0], [0, 0, 1]] + [[np.cos(a), np.sin(a), 0.5] for a in range(5)]
    operators = precompute((verts, [[0, 1, i] for i in range(2, 7)]), 7, kind)
    assert_sound(operators, 7)
    assert float(operators.mass.sum()) == pytest.approx(2.5, rel=1e-3)


@KINDS
def test_unreferenced_vertices_change_nothing(sphere: trimesh.Trimesh, kind: Any) -> None:
    """Nor do faces with a repeated corner, wherever the vertices lie."""
    verts, faces = arrays(sphere)
    far = np.array([[100.0, -50, 3], [0, 0, 0], [1e5, 0, 0]])
    more = np.concatenate([far[:1], verts, far[1:]])
    more_faces = np.concatenate([faces + 1, [[0, 0, 5], [643, 643, 643]]])
    clean, padded = precompute((verts, faces), 12, kind), precompute((more, more_faces), 12, kind)
    assert_sound(padded, 12)
    rest = slice(1, 643)
    np.testing.assert_allclose(padded.mass[rest], clean.mass, rtol=1e-5)
    np.testing.assert_allclose(padded.evals, clean.evals, atol=1e-4)
    np.testing.assert_allclose(padded.frames[rest, 2], clean.frames[:, 2], atol=1e-5)
    a, b = matrix(padded.laplacian), matrix(clean.laplacian)
    assert abs(a[rest, rest] - b).max() < 1e-4
    assert abs(a).sum() == pytest.approx(abs(b).sum())  # nothing elsewhere
    np.testing.assert_allclose(padded.evecs[rest, :1], clean.evecs[:, :1], atol=1e-6)
    f = np.concatenate([[7.0], verts[:, 0], [8.0, 9]])
    assert relative(gradient(padded, f)[rest], gradient(clean, verts[:, 0])) < 1e-5
    for unused in (0, 643, 644):
        assert padded.mass[unused] == 0
        assert (padded.evecs[unused] == 0).all()
        assert (gradient(padded, f)[unused] == 0).all()


@KINDS
def test_faults_of_faces(plane: tuple[np.ndarray, np.ndarray], kind: Any) -> None:
    verts, faces = plane
    line = [[0, 1, 0], [2, 2, 2]]  # no area
    assert_sound(precompute((verts, np.concatenate([faces, line])), 8, kind), 8)
    assert_sound(precompute((verts, np.concatenate([faces, faces[:20], faces[:5, ::-1]])), 8, kind), 8)
    flat = np.concatenate([verts, (verts[:1] + verts[1:2]) / 2])  # a face of zero area on an edge
    operators = precompute((flat, np.concatenate([faces, [[0, 1, 121]]])), 8, kind)
    assert_sound(operators, 8)
    assert operators.mass[121] > 0


@KINDS
def test_coincident_vertices(sphere: trimesh.Trimesh, kind: Any) -> None:
    """A triangle soup: every corner a vertex of its own."""
    verts, faces = arrays(sphere)
    operators = precompute((verts[faces[:200]].reshape(-1, 3), np.arange(600).reshape(-1, 3)), 12, kind)
    assert_sound(operators, 12)
    assert (operators.evals == 0).all()  # 200 components


@KINDS
@pytest.mark.parametrize(("k", "zeros"), [(128, 128), (310, 300), (1210, 300)])
def test_hundreds_of_components(kind: Any, k: int, zeros: int) -> None:
    verts, faces = TETRAHEDRON
    many = (
        np.concatenate([verts + np.array([3 * i, 0, 0]) for i in range(300)]),
        np.concatenate([faces + 4 * i for i in range(300)]),
    )
    operators = precompute(many, k, kind)
    assert_sound(operators, k)
    assert (operators.evals[0, :zeros] == 0).all()
    assert (operators.evals[0, zeros:] > 0.1).all()
    if k > 1200:
        assert (operators.evecs[:, 1200:] == 0).all()
        assert (operators.evals[0, 1200:] == operators.evals[0, 1199]).all()


@KINDS
def test_fewer_vertices_than_pairs(kind: Any) -> None:
    operators = precompute(TETRAHEDRON, 9, kind)
    assert_sound(operators, 9)
    assert (operators.evecs[:, 4:] == 0).all()
    assert (operators.evals[0, 3:] == operators.evals[0, 3]).all()
    assert operators.evals[0, 3] > operators.evals[0, 0] == 0


@pytest.mark.parametrize("source", ["mesh", "cloud"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@KINDS
def test_scaling_laws(sphere: trimesh.Trimesh, scale: float, kind: Any, source: str) -> None:
    verts, faces = arrays(sphere)
    faces = faces if source == "mesh" else None
    verts = verts * [1, 0.8, 0.6]  # no repeated eigenvalues
    unit, scaled = precompute((verts, faces), 10, kind), precompute((scale * verts, faces), 10, kind)
    assert relative(scaled.mass / scale**2, unit.mass) < 1e-5
    np.testing.assert_allclose(scaled.evals * scale**2, unit.evals, rtol=1e-4, atol=1e-6)
    assert abs(matrix(scaled.laplacian) - matrix(unit.laplacian)).max() < 1e-4
    f = np.sin(verts[:, 0])
    assert relative(gradient(scaled, f) * scale, gradient(unit, f)) < 1e-4
    assert relative(scaled.evecs.abs() * scale, unit.evecs.abs()) < 1e-3
    np.testing.assert_allclose(scaled.frames[:, 2], unit.frames[:, 2], atol=1e-4)


@KINDS
def test_far_from_the_origin(sphere: trimesh.Trimesh, kind: Any) -> None:
    verts, faces = arrays(sphere)
    stray = np.zeros((1, 3))  # a vertex that no face uses keeps nothing from being moved back
    here = precompute((np.concatenate([verts, stray]), faces), 9, kind)
    there = precompute((np.concatenate([verts + np.array([1e6, -1e6, 3e5]), stray]), faces), 9, kind)
    assert relative(there.mass, here.mass) < 1e-5
    np.testing.assert_allclose(there.evals, here.evals, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(there.frames, here.frames, atol=1e-4)
    assert relative(gradient(there, np.append(verts[:, 0], 0)), gradient(here, np.append(verts[:, 0], 0))) < 1e-4


def strip(direction: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Triangles whose vertices all lie on one line."""
    start = np.arange(9)
    return np.linspace(0, 1, 11)[:, None] * np.array(direction), np.stack([start, start + 1, start + 2], 1)


@KINDS
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((np.ones((5, 3)), [[0, 1, 2]]), "one point"),
        ((np.ones((5, 3)), None), "one point"),
        ((np.eye(3), [[0, 0, 1], [2, 2, 2]]), "none of the 2 faces"),
        (strip((1, 0, 0)), "no area"),
        (strip((1, 2, 3)), "no area"),
        ((strip((1, 2, 3))[0], None), "no area"),
        ((np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0.0]]), [[0, 1, 2]]), "no area"),
        ((np.eye(3), None), "at least 4 points, this has 3"),
        ((np.zeros((1, 3)), None), "at least 4 points, this has 1"),
        ((1e39 * np.eye(4)[:, :3], [[0, 1, 2]]), "single precision"),
        ((1e-30 * np.eye(4)[:, :3], [[0, 1, 2]]), "single precision"),
    ],
)
def test_no_surface(source: Any, message: str, kind: Any) -> None:
    with pytest.raises(MeshError, match=message) as e:
        precompute(source, 4, kind)
    assert str(e.value).startswith("arrays: ")


def test_exceptions_of_libraries_name_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["diffnet.geometry.discretize.laplacian"]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("assertion in C++")

    monkeypatch.setattr(module.robust_laplacian, "mesh_laplacian", fail)
    monkeypatch.setattr(module.potpourri3d, "cotan_laplacian", fail)
    for kind in LAPLACIANS:
        with pytest.raises(MeshError, match=r"arrays: .*assertion in C\+\+"):
            precompute((TETRAHEDRON[0], TETRAHEDRON[1][:3]), 4, kind)


# Point clouds


def test_small_and_flat_point_clouds() -> None:
    rng = np.random.default_rng(0)
    for points in (rng.random((4, 3)), rng.random((5, 3)), rng.random((31, 3))):
        assert_sound(precompute((points, None), 6), 6)
    flat = np.c_[rng.random((300, 2)), np.zeros(300)] @ random_rotation(2).T
    operators = precompute((flat, None), 6)
    assert_sound(operators, 6)
    assert float(operators.mass.sum()) == pytest.approx(1, abs=0.15)
    normals = operators.frames[:, 2].double().numpy()
    np.testing.assert_allclose(np.abs(normals @ random_rotation(2)[:, 2]), 1, atol=1e-5)


@pytest.mark.parametrize("copies", [2, 3, 10, 40])
def test_coincident_points(sphere: trimesh.Trimesh, copies: int) -> None:
    points = np.array(sphere.vertices)[:60]
    assert_sound(precompute((np.concatenate([points, np.repeat(points[:1], copies, 0)]), None), 6), 6)
    everywhere = np.repeat(points, copies, 0), None
    if copies < 30:  # the number of neighbors that a local triangulation has
        assert_sound(precompute(everywhere, 6), 6)
    else:
        with pytest.raises(MeshError, match=r"arrays: the robust Laplacian can't be computed"):
            precompute(everywhere, 6)


def test_point_cloud_operators_resemble_those_of_the_surface(sphere: trimesh.Trimesh) -> None:
    mesh, cloud = precompute(sphere, 9), precompute(cloud_of(sphere), 9)
    assert_sound(cloud, 9)
    assert float(cloud.mass.sum()) == pytest.approx(4 * np.pi, rel=0.1)
    np.testing.assert_allclose(cloud.evals, mesh.evals, rtol=0.1, atol=0.02)
    f = np.array(sphere.vertices)[:, 0]
    assert relative(gradient(cloud, f), gradient(mesh, f)) < 0.1
    assert len(cloud.faces) == 0
    assert cloud.face_ptr.tolist() == [0, 0]
    assert cloud.edges.shape == (0, 2)


# Random rubbish


@st.composite
def rubbish(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    vertices = draw(st.integers(1, 10))
    coordinate = st.integers(0, draw(st.integers(1, 3)))
    verts = draw(st.lists(st.tuples(coordinate, coordinate, coordinate), min_size=vertices, max_size=vertices))
    corner = st.integers(0, vertices - 1)
    faces = draw(st.lists(st.tuples(corner, corner, corner), max_size=14))
    faces += faces[: draw(st.integers(0, 3))]
    return np.array(verts, np.float64), np.array(faces, np.int64).reshape(-1, 3)


@KINDS
@given(source=rubbish(), k=st.integers(0, 12))
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_meshes_are_sound_or_refused(kind: Any, source: tuple[np.ndarray, np.ndarray], k: int) -> None:
    operators, message = None, "arrays: "
    try:
        operators = precompute(source, k, kind)
    except MeshError as e:
        message = str(e)
    assert message.startswith("arrays: ")
    if operators is not None:
        assert_sound(operators, k)


def degraded_sphere(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Squeezed, noisy, with vertices that coincide, faces that are missing, doubled or turned, and corners moved."""
    rng = np.random.default_rng(seed)
    ball = trimesh.creation.icosphere(3)
    count = len(ball.vertices)
    verts = ball.vertices * 10.0 ** rng.uniform(-6, 0, 3)
    verts += rng.normal(size=verts.shape) * 10.0 ** rng.uniform(-8, 0)
    snapped = rng.random(count) < rng.uniform(0, 0.3)
    verts[snapped] = verts[rng.integers(0, count, snapped.sum())]
    faces = ball.faces[rng.random(len(ball.faces)) < rng.uniform(0.2, 1)]
    faces = np.concatenate([faces, faces[rng.random(len(faces)) < 0.1][:, ::-1]])
    target = np.arange(count)
    moved = rng.random(count) < rng.uniform(0, 0.1)
    target[moved] = rng.integers(0, count, moved.sum())
    return verts, target[faces]


@KINDS
@pytest.mark.filterwarnings("ignore:block Lanczos failed")
def test_degraded_meshes_are_sound_or_refused(kind: Any) -> None:
    """Large enough for the iteration that finds eigenvectors of large meshes."""
    refused = 0
    for seed in range(200):
        try:
            assert_sound(precompute(degraded_sphere(seed), 40, kind), 40)
        except MeshError:
            refused += 1
    assert refused <= 4


# Laplacian and eigenbasis


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


def test_cotangents_written_out(plane: tuple[np.ndarray, np.ndarray]) -> None:
    verts, faces = plane
    expected = np.zeros((121, 121))
    for face in faces:
        for i in range(3):
            a, b, c = face[i], face[(i + 1) % 3], face[(i + 2) % 3]
            u, v = verts[a] - verts[c], verts[b] - verts[c]
            half = u @ v / np.linalg.norm(np.cross(u, v)) / 2
            expected[[a, b], [b, a]] -= half
            expected[[a, b], [a, b]] += half
    laplacian, _ = laplacian_and_mass(make_mesh(verts, faces), "cotan")
    np.testing.assert_allclose(laplacian.toarray(), expected, atol=1e-8)


@KINDS
def test_sphere_eigenvalues(sphere: trimesh.Trimesh, kind: Any) -> None:
    """l(l+1), each 2l+1 times."""
    operators = precompute(sphere, 36, kind)
    assert_sound(operators, 36)
    expected = np.repeat([l * (l + 1) for l in range(6)], [2 * l + 1 for l in range(6)])  # noqa: E741
    np.testing.assert_allclose(operators.evals[0], expected, rtol=0.06, atol=1e-6)
    np.testing.assert_allclose(operators.evals[0, :9], expected[:9], rtol=0.01, atol=1e-6)


@KINDS
@pytest.mark.parametrize("source", ["sphere", "plane", "cloud"])
def test_eigenpairs(request: pytest.FixtureRequest, source: str, kind: Any) -> None:
    mesh = request.getfixturevalue("sphere" if source == "cloud" else source)
    operators = precompute(cloud_of(mesh) if source == "cloud" else mesh, 40, kind)
    assert_sound(operators, 40)
    np.testing.assert_allclose(gram(operators), np.eye(40), atol=1e-6)
    evecs, mass = operators.evecs.double().numpy(), operators.mass.double().numpy()
    residual = matrix(operators.laplacian) @ evecs - mass[:, None] * evecs * operators.evals[0].double().numpy()
    assert np.linalg.norm(residual / np.sqrt(mass)[:, None], axis=0).max() < 1e-4 * float(operators.evals[0, -1])


@KINDS
def test_no_pairs(sphere: trimesh.Trimesh, kind: Any) -> None:
    operators = precompute(sphere, 0, kind)
    assert_sound(operators, 0)
    assert operators.k == 0
    assert operators.with_gradient_evecs().gradient_evecs.shape == (2, 642, 0)


def test_bad_options(sphere: trimesh.Trimesh) -> None:
    with pytest.raises(ValueError, match="k should be at least 0, got -1"):
        precompute(sphere, -1)
    with pytest.raises(ValueError, match="k should be at least 0, got -2"):
        eigenbasis(scipy.sparse.eye(3, format="csr"), np.ones(3), -2)
    with pytest.raises(ValueError, match="laplacian should be one of robust, cotan, got 'graph'"):
        precompute(sphere, 4, "graph")
    with pytest.raises(TypeError):
        precompute(sphere, 4.5)


@KINDS
@pytest.mark.parametrize("source", ["mesh", "cloud"])
def test_same_at_every_call(sphere: trimesh.Trimesh, kind: Any, source: str) -> None:
    mesh = sphere if source == "mesh" else cloud_of(sphere)
    a, b = precompute(mesh, 20, kind), precompute(mesh, 20, kind)
    for name in ("mass", "evals", "evecs", "frames"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.laplacian.values, b.laplacian.values)
    assert torch.equal(a.gradient.values, b.gradient.values)


def test_positions_are_taken_at_single_precision(sphere: trimesh.Trimesh) -> None:
    """Whoever holds them in double precision gets the very same operators."""
    verts, faces = arrays(sphere)
    a, b = precompute((verts, faces), 8), precompute((verts.astype(np.float32), faces), 8)
    for name in ("mass", "evals", "evecs", "frames"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.gradient.values, b.gradient.values)


# Frames and gradient


@pytest.mark.parametrize("source", ["mesh", "cloud"])
def test_frames_of_a_sphere(sphere: trimesh.Trimesh, source: str) -> None:
    mesh = load_mesh(sphere if source == "mesh" else cloud_of(sphere))
    frames = tangent_frames(mesh)
    np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (642, 1, 1)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(frames), 1, atol=1e-12)
    assert ((frames[:, 2] * mesh.verts).sum(1) > 0.99).all()  # outward


def test_normals_of_a_cloud_agree_between_neighbors() -> None:
    """On a surface that is neither closed nor convex, where "outward" says little."""
    rng = np.random.default_rng(0)
    angle, height = rng.uniform(0, 3 * np.pi, 3000), rng.uniform(0, 6, 3000)
    radius = 2 + angle / np.pi  # a scroll, with 2 between its turns
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


@pytest.mark.parametrize("source", ["mesh", "cloud"])
def test_gradients_of_linear_functions_are_exact(plane: tuple[np.ndarray, np.ndarray], source: str) -> None:
    verts, faces = plane
    operators = precompute((verts, faces if source == "mesh" else None), 4)
    normal = random_rotation(1)[:, 2]
    for direction in np.random.default_rng(0).standard_normal((3, 3)):
        expected = direction - (direction @ normal) * normal
        found = gradient(operators, verts @ direction + 3)
        assert np.abs(found - expected).max() < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("source", ["mesh", "cloud"])
def test_gradients_of_constants_are_zero(sphere: trimesh.Trimesh, source: str) -> None:
    operators = precompute(sphere if source == "mesh" else cloud_of(sphere), 4)
    largest = float(operators.gradient.values.abs().max())
    assert np.abs(gradient(operators, np.ones(642))).max() < 1e-6 * largest


@pytest.mark.parametrize("source", ["mesh", "cloud"])
@KINDS
def test_gradient_turns_with_the_mesh(sphere: trimesh.Trimesh, source: str, kind: Any) -> None:
    verts, faces = arrays(sphere)
    verts = verts * [1, 0.7, 0.5] + np.random.default_rng(0).normal(0, 0.01, verts.shape)  # no ties between neighbors
    faces = faces if source == "mesh" else None
    turn = random_rotation(3)
    f = np.sin(3 * verts[:, 0]) + verts[:, 1] * verts[:, 2]
    still, turned = precompute((verts, faces), 8, kind), precompute((verts @ turn.T, faces), 8, kind)
    before, after = gradient(still, f), gradient(turned, f)
    assert relative(np.linalg.norm(after, axis=1), np.linalg.norm(before, axis=1)) < 1e-4
    assert relative(after, before @ turn.T) < 1e-4
    np.testing.assert_allclose(turned.evals, still.evals, rtol=1e-4, atol=1e-5)


def test_gradient_against_a_loop(sphere: trimesh.Trimesh) -> None:
    mesh = load_mesh(sphere)
    frames, pattern = tangent_frames(mesh), one_ring(mesh.faces, 642)
    values = gradient_values(mesh.verts, frames, pattern)
    f = np.random.default_rng(0).standard_normal(642)
    found = np.stack([scipy.sparse.csr_matrix((v, pattern.indices, pattern.indptr)) @ f for v in values], 1)
    neighbors: list[set[int]] = [set() for _ in range(642)]
    for face in mesh.faces.tolist():
        for i in face:
            neighbors[i] |= set(face) - {i}
    for i, ring in enumerate(neighbors):
        ids = sorted(ring)
        edges = (mesh.verts[ids] - mesh.verts[i]) @ frames[i, :2].T
        np.testing.assert_allclose(found[i], np.linalg.lstsq(edges, f[ids] - f[i])[0], atol=1e-8)


def test_slivers_do_not_blow_gradients_up() -> None:
    verts = np.array([[0.0, 0, 0], [1, 1e-5, 0], [2, 0, 0], [3, 1e-5, 0]])
    operators = precompute((verts, [[0, 1, 2], [1, 3, 2]]), 2)
    assert np.abs(gradient(operators, np.array([0, 1, 0, 1.0]))).max() < 5


# Descriptors


def tiny_operators() -> list[Operators]:
    meshes = [
        arrays(trimesh.creation.icosphere(1)),
        TETRAHEDRON,
        arrays(trimesh.creation.box()),
        (np.random.default_rng(0).random((30, 3)), None),
    ]
    return [precompute(mesh, 10) for mesh in meshes]


def test_hks_against_a_loop() -> None:
    (operators, *_) = tiny_operators()
    scales = torch.tensor([0.1, 0.5, 2.0])
    expected = np.zeros((42, 3))
    for v in range(42):
        for t in range(3):
            for k in range(10):
                weight = np.exp(-float(operators.evals[0, k]) * float(scales[t]))
                expected[v, t] += weight * float(operators.evecs[v, k]) ** 2
    assert relative(hks(operators, scales=scales), expected) < 1e-6
    default = hks(operators, scales=torch.tensor([10 ** (-2 + 2 * i / 7) for i in range(8)]))
    assert relative(hks(operators, 8), default) < 1e-6
    assert hks(operators).shape == (42, 16)


def test_wks_against_a_loop() -> None:
    (operators, *_) = tiny_operators()
    log = np.log(operators.evals[0, 1:].double().numpy())
    sigma = (log[-1] - log[0]) * 7 / 128
    energies = np.linspace(log[0] + 2 * sigma, log[-1] - 2 * sigma, 5)
    expected = np.zeros((42, 5))
    for t, energy in enumerate(energies):
        weights = np.exp(-((energy - log) ** 2) / (2 * sigma**2))
        for v in range(42):
            for k in range(9):
                expected[v, t] += weights[k] / weights.sum() * float(operators.evecs[v, k + 1]) ** 2
    assert relative(wks(operators, 5), expected) < 1e-4


def test_descriptors_of_a_batch_are_those_of_its_meshes() -> None:
    each = tiny_operators()
    packed = collate(each)
    for descriptor in (hks, wks):
        expected = torch.cat([descriptor(o) for o in each])
        assert expected.isfinite().all()
        torch.testing.assert_close(descriptor(packed), expected)
        assert descriptor(packed.to(dtype=torch.float64)).dtype == torch.float64


def test_missing_pairs_add_nothing_to_descriptors() -> None:
    all_pairs, padded = precompute(TETRAHEDRON, 4), precompute(TETRAHEDRON, 9)
    for descriptor in (hks, wks):
        torch.testing.assert_close(descriptor(padded), descriptor(all_pairs))
        assert (descriptor(padded) >= 0).all()


def test_wks_does_not_depend_on_the_scale(sphere: trimesh.Trimesh) -> None:
    verts, faces = arrays(sphere)
    verts = verts * [1, 0.8, 0.6]
    small = wks(precompute((verts, faces), 20))
    large = wks(precompute((100 * verts, faces), 20))
    assert relative(large * 1e4, small) < 1e-3  # φ² is 1/area


def test_descriptors_with_nothing_to_say(sphere: trimesh.Trimesh) -> None:
    many = precompute((np.array(sphere.vertices)[sphere.faces[:9]].reshape(-1, 3), np.arange(27).reshape(-1, 3)), 5)
    for k in (0, 1):
        operators = precompute(sphere, k)
        for descriptor in (hks, wks):
            assert descriptor(operators).shape == (642, 16)
            assert descriptor(operators).isfinite().all()
    assert (wks(many) == 0).all()  # null vectors only
    assert hks(many).isfinite().all()


def test_normalized_positions(sphere: trimesh.Trimesh) -> None:
    verts = np.array(sphere.vertices) * [3, 2, 1] + 7
    unit = normalize_positions(verts)
    np.testing.assert_allclose(unit.mean(0), 0, atol=1e-12)
    assert np.linalg.norm(unit, axis=1).max() == pytest.approx(1)
    assert relative(unit * (np.ptp(verts) / np.ptp(unit)), verts - verts.mean(0)) < 1e-12
    tensor = normalize_positions(torch.tensor(verts, dtype=torch.float32))
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(tensor, unit, atol=1e-6)
    np.testing.assert_array_equal(normalize_positions(verts[:1]), np.zeros((1, 3)))
    np.testing.assert_array_equal(normalize_positions(torch.ones(3, 3)), np.zeros((3, 3)))


# Batches


def assert_same(a: Operators, b: Operators) -> None:
    for field in fields(Operators):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype, field.name
            assert torch.equal(x, y), field.name
        elif isinstance(x, SparseMatrix):
            assert torch.equal(x.values, y.values), field.name
            assert torch.equal(x.pattern.indptr, y.pattern.indptr), field.name
            assert torch.equal(x.pattern.indices, y.pattern.indices), field.name
            assert x.pattern.columns == y.pattern.columns, field.name
        elif field.name == "_lengths":
            assert a.lengths == b.lengths
        else:
            assert x is y is None, field.name


@pytest.mark.parametrize("pushed", [False, True])
def test_split_undoes_collate(pushed: bool) -> None:
    each = [o.with_gradient_evecs() if pushed else o for o in tiny_operators()]
    packed = collate(each)
    assert len(packed) == 4
    assert packed.num_vertices == sum(o.num_vertices for o in each)
    assert packed.lengths == (42, 4, 8, 30)
    assert packed.ptr.tolist() == [0, 42, 46, 54, 84]
    assert packed.face_ptr.tolist() == [0, 80, 84, 96, 96]
    assert (packed.gradient_evecs is not None) == pushed
    parts = packed.split()
    assert len(parts) == 4
    for part, original in zip(parts, each, strict=True):
        assert_same(part, original)
    assert_same(collate(parts), packed)
    nested = collate([collate(each[:2]), collate(each[2:])])  # a batch of batches
    assert_same(nested, packed)


def test_one_mesh() -> None:
    (operators, *_) = tiny_operators()
    assert len(operators) == 1
    assert_same(collate([operators]), operators)
    (part,) = operators.split()
    assert_same(part, operators)


def test_gradient_evecs_are_dropped_unless_all_have_them() -> None:
    a, b, *_ = tiny_operators()
    assert collate([a.with_gradient_evecs(), b]).gradient_evecs is None
    assert a.gradient_evecs is None  # the original is left alone


def test_what_can_not_be_packed() -> None:
    a, b, *_ = tiny_operators()
    with pytest.raises(ValueError, match=r"different k .*10, 5"):
        collate([a, precompute(TETRAHEDRON, 5)])
    with pytest.raises(ValueError, match=r"different dtype .*float32.*float64"):
        collate([a, b.to(dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"different device .*cpu.*meta"):
        collate([a, b.to("meta")])
    with pytest.raises(ValueError, match="empty"):
        collate([])


def test_packed_matrices_act_as_the_separate_ones() -> None:
    each = tiny_operators()
    packed = collate(each)
    x = torch.randn(packed.num_vertices, 3, generator=torch.Generator().manual_seed(0))
    pieces = x.split(list(packed.lengths))
    expected = torch.cat([o.laplacian @ p for o, p in zip(each, pieces, strict=True)])
    torch.testing.assert_close(packed.laplacian @ x, expected)
    expected = torch.cat([o.gradient @ p for o, p in zip(each, pieces, strict=True)], dim=1)
    torch.testing.assert_close(packed.gradient @ x, expected)
    backward = torch.cat([o.laplacian.to_torch().mT @ p for o, p in zip(each, pieces, strict=True)])
    x.requires_grad_()
    (packed.laplacian @ x).backward(x.detach())
    torch.testing.assert_close(x.grad, backward)


def test_gradient_on_the_basis() -> None:
    operators = collate(tiny_operators())
    pushed = operators.with_gradient_evecs()
    expected = np.stack([matrix(operators.gradient, i) @ operators.evecs.double().numpy() for i in range(2)])
    assert relative(pushed.gradient_evecs, expected) < 1e-5
    assert pushed.with_gradient_evecs() is pushed


def test_to_converts_real_fields_only() -> None:
    operators = collate(tiny_operators()).with_gradient_evecs()
    wide = operators.to(dtype=torch.float64)
    for name in ("mass", "evals", "evecs", "frames", "gradient_evecs"):
        assert getattr(wide, name).dtype == torch.float64, name
        torch.testing.assert_close(getattr(wide, name).float(), getattr(operators, name))
    for name in ("ptr", "faces", "face_ptr"):
        assert getattr(wide, name).dtype == torch.int64, name
    for name in ("laplacian", "gradient"):
        assert getattr(wide, name).values.dtype == torch.float64
        assert getattr(wide, name).pattern.indices.dtype == torch.int32
    assert wide.lengths == operators.lengths
    assert_same(wide.to(dtype=torch.float32), operators)
    assert operators.to("meta").device.type == "meta"
    assert operators.device.type == "cpu"


def test_edges_of_a_batch() -> None:
    each = tiny_operators()
    packed = collate(each)
    offsets = packed.ptr.tolist()
    expected = np.concatenate([mesh_edges(o.faces.numpy()) + offsets[b] for b, o in enumerate(each)])
    assert packed.edges.dtype == torch.int64
    np.testing.assert_array_equal(packed.edges, expected)


def test_faces_stay_those_of_the_mesh() -> None:
    """Also the ones that take no part, so that outputs at faces keep their places."""
    verts, faces = TETRAHEDRON
    odd = np.concatenate([[[0, 0, 1]], faces, faces[:1]])
    operators = precompute((verts, odd), 3)
    np.testing.assert_array_equal(operators.faces, odd)
    assert operators.face_ptr.tolist() == [0, 6]


def test_rows_are_stored_along_the_surface() -> None:
    """Where numbers say nothing about who is near whom, and there only; operators are the same either way."""
    side = 200
    x, y = np.meshgrid(np.arange(side), np.arange(side))
    verts = np.stack([x, y, np.sin(x / 9) * np.sin(y / 9)], axis=-1).reshape(-1, 3).astype(float)
    number = np.arange(side * side).reshape(side, side)
    a, b, c, d = number[:-1, :-1], number[:-1, 1:], number[1:, :-1], number[1:, 1:]
    faces = np.concatenate([np.stack(t, axis=-1).reshape(-1, 3) for t in ((a, b, d), (a, d, c))])
    place = np.random.default_rng(0).permutation(len(verts))
    shuffled_verts = np.empty_like(verts)
    shuffled_verts[place] = verts
    tidy, shuffled = precompute((verts, faces), k=0), precompute((shuffled_verts, place[faces]), k=0)
    assert tidy.gradient.pattern.row_order is None
    order = shuffled.gradient.pattern.row_order
    assert order is not None
    assert shuffled.laplacian.pattern.row_order is order
    pattern = shuffled.gradient.pattern
    for ours, theirs in ((shuffled.laplacian, tidy.laplacian), (shuffled.gradient, tidy.gradient)):
        for a, b in zip(
            ours.values.reshape(-1, ours.pattern.nnz), theirs.values.reshape(-1, ours.pattern.nnz), strict=True
        ):
            x, y = (SparseMatrix(m.pattern, v).to_scipy() for m, v in ((ours, a), (theirs, b)))
            assert abs(x[place][:, place] - y).max() < 1e-4 * abs(y).max()
    taken = torch.empty(side * side, dtype=torch.int64)
    taken[order.long()] = torch.arange(side * side)
    apart = (taken[pattern.row_indices.long()] - taken[pattern.indices.long()]).abs().double().mean()
    assert apart < 2 * side
    rings = with_k_ring(shuffled, 2)
    assert rings.neighborhood is not None
    assert torch.equal(rings.neighborhood.row_order, order)
    assert torch.equal(rings.neighborhood.row_lengths[place], with_k_ring(tidy, 2).neighborhood.row_lengths)
    tidy_patches, found = patches(tidy), patches(shuffled)
    assert sorted(found.order.tolist()) == list(range(side * side))
    assert len(found.mask) < 1.5 * len(tidy_patches.mask)
