"""`precompute`: its laws, options, warnings and determinism, point clouds, and broken and random meshes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
import trimesh
from conftest import random_rotation
from hypothesis import HealthCheck, example, given, settings, strategies as st
from operator_checks import assert_same, assert_sound, gradient, gram, matrix, relative
from refusals import refused
from shapes import TETRAHEDRON, arrays, cloud_of, degraded_sphere, ellipsoid, moebius, soup, strip_on_a_line

from diffnet.benchmarks.original.preprocessing import original_precompute
from diffnet.geometry import (
    LAPLACIANS,
    MeshError,
    Operators,
    eigenbasis,
    laplacian_and_mass,
    load_mesh,
    make_mesh,
    normalize_positions,
    patches,
    precompute,
    precompute_all,
    with_k_ring,
)
from diffnet.geometry.errors import OptionError
from diffnet.ops import SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", LAPLACIANS)
SOURCES = pytest.mark.parametrize("source", ["mesh", "cloud"])


@KINDS
def test_sphere_eigenvalues(sphere: trimesh.Trimesh, kind: Any) -> None:
    """The eigenvalues are l(l+1), each 2l+1 times."""
    operators = precompute(sphere, k=36, laplacian=kind)
    assert_sound(operators, 36)
    expected = np.repeat([l * (l + 1) for l in range(6)], [2 * l + 1 for l in range(6)])  # noqa: E741
    np.testing.assert_allclose(operators.evals[0], expected, rtol=0.06, atol=1e-6)
    np.testing.assert_allclose(operators.evals[0, :9], expected[:9], rtol=0.01, atol=1e-6)


@KINDS
@pytest.mark.parametrize("source", ["sphere", "plane", "cloud"])
def test_eigenpairs(request: pytest.FixtureRequest, source: str, kind: Any) -> None:
    mesh = request.getfixturevalue("sphere" if source == "cloud" else source)
    operators = precompute(cloud_of(mesh) if source == "cloud" else mesh, k=40, laplacian=kind)
    assert_sound(operators, 40)
    np.testing.assert_allclose(gram(operators), np.eye(40), atol=1e-6)
    evecs, mass = operators.evecs.double().numpy(), operators.mass.double().numpy()
    residual = matrix(operators.laplacian) @ evecs - mass[:, None] * evecs * operators.evals[0].double().numpy()
    assert np.linalg.norm(residual / np.sqrt(mass)[:, None], axis=0).max() < 1e-4 * float(operators.evals[0, -1])


def test_bad_options(sphere: trimesh.Trimesh) -> None:
    refused(ValueError, "k should be at least 0, got -1", precompute, sphere, k=-1)
    refused(ValueError, "k should be at least 0, got -2", eigenbasis, scipy.sparse.eye(3, format="csr"), np.ones(3), -2)
    with pytest.raises(ValueError, match="laplacian should be one of robust, cotan, got 'graph'"):
        precompute(sphere, k=4, laplacian="graph")
    for wrong in (4.5, "128", True):
        with pytest.raises(OptionError, match=f"k should be an integer, got {wrong!r} of type {type(wrong).__name__}$"):
            precompute(sphere, k=wrong)


def test_vertices_and_faces_as_two_arguments(sphere: trimesh.Trimesh) -> None:
    verts, faces = arrays(sphere)
    expected = precompute((verts, faces), k=8)
    for convert in (np.asarray, torch.tensor, np.ndarray.tolist):
        found = precompute(convert(verts), convert(faces), k=8)
        assert_same(found, expected)
    cloud = precompute((verts, None), k=4)
    for points in (verts, torch.tensor(verts), verts.tolist()):
        for found in (precompute(points, k=4), precompute(points, None, k=4), precompute(points, [], k=4)):
            assert_same(found, cloud)


def test_faces_beside_a_whole_mesh(sphere: trimesh.Trimesh) -> None:
    verts, faces = arrays(sphere)
    for mesh, words in (
        ("a.off", "the path 'a.off'"),
        (Path("a.off"), "the path 'a.off'"),
        (sphere, "Trimesh"),
        ((verts, faces), r"a tuple \(verts, faces\)"),
        (load_mesh(sphere), "Mesh"),
    ):
        refused(MeshError, f"faces were given beside {words}, which has its own", precompute, mesh, faces)
    for wrong, hint in ((64, "; write k=64"), (np.int64(64), "; write k=64"), ("cotan", "")):
        refused(MeshError, rf"faces should be an array \(F, 3\) or None, got .*{hint}$", precompute, sphere, wrong)
    refused(MeshError, r"faces should have shape \(F, 3\)", precompute, verts, faces.T)


def test_normalized_positions(sphere: trimesh.Trimesh, tmp_path: Path) -> None:
    verts, faces = arrays(sphere)
    far = 30 * verts + [5, 6, 7]
    expected = precompute(normalize_positions(far), faces, k=8)
    found = precompute(far, faces, k=8, normalize=True, cache_dir=tmp_path)
    assert torch.equal(found.evals, expected.evals)
    (also,) = precompute_all([(far, faces)], 8, cache_dir=tmp_path, normalize=True, jobs=1)
    assert torch.equal(also.evecs, expected.evecs)
    assert len(list(tmp_path.rglob("*.operators.safetensors"))) == 1


@pytest.mark.parametrize(
    ("device", "message"),
    [
        *((wrong, f"device should be cpu, cuda or cuda:N, got '{wrong}'") for wrong in ("gpu", "meta", None)),
        ("cpu:7", "device 'cpu:7' is not available: the only CPU device is cpu"),
        ("cuda:99", "device 'cuda:99' is not available"),
    ],
)
def test_unusable_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any, message: str) -> None:
    monkeypatch.setattr("diffnet.geometry.mesh.normalize.detached_mesh", None)  # the device is checked before
    refused(OptionError, message, precompute, "a.off", k=4, cache_dir=tmp_path, device=device)
    refused(OptionError, message, precompute_all, ["a.off"], 4, cache_dir=tmp_path, device=device, jobs=1)


def test_no_gpu(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"device 'cuda' is not available: PyTorch finds no GPU"):
        precompute(sphere, k=4, device=torch.device("cuda"))
    operators = precompute(sphere, k=4, device="cpu:0")
    assert operators.k == 4
    for move, device in ((operators.to, "cuda:1"), (operators.to, torch.device("cuda", 1)), (operators.cuda, 1)):
        refused(OptionError, r"device 'cuda:1' is not available: PyTorch finds no GPU", move, device)
    refused(OptionError, "device should be cpu, cuda, cuda:N or meta, got 'gpu'", operators.to, "gpu", torch.float64)
    assert operators.to(torch.device("meta"), torch.float64).device == torch.device("meta")
    assert operators.to(torch.device("cpu")) is operators


@SOURCES
@pytest.mark.parametrize("scale", [1e-6, 1e3], ids=lambda scale: f"scale={scale:g}")
@KINDS
def test_scaling_laws(sphere: trimesh.Trimesh, scale: float, kind: Any, source: str) -> None:
    verts, faces = arrays(sphere)
    faces = faces if source == "mesh" else None
    verts = verts * [1, 0.8, 0.6]  # no repeated eigenvalues
    unit, scaled = (precompute((size * verts, faces), k=10, laplacian=kind) for size in (1, scale))
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
    stray = np.zeros((1, 3))  # a vertex that no face uses must not keep the mesh from being moved back
    here = precompute((np.concatenate([verts, stray]), faces), k=9, laplacian=kind)
    there = precompute((np.concatenate([verts + np.array([1e6, -1e6, 3e5]), stray]), faces), k=9, laplacian=kind)
    assert relative(there.mass, here.mass) < 1e-5
    np.testing.assert_allclose(there.evals, here.evals, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(there.frames, here.frames, atol=1e-4)
    assert relative(gradient(there, np.append(verts[:, 0], 0)), gradient(here, np.append(verts[:, 0], 0))) < 1e-4


def test_faces_stay_those_of_the_mesh() -> None:
    """Degenerate and duplicate faces stay, so outputs at faces keep their places."""
    verts, faces = TETRAHEDRON
    odd = np.concatenate([[[0, 0, 1]], faces, faces[:1]])
    operators = precompute((verts, odd), k=3)
    np.testing.assert_array_equal(operators.faces, odd)
    assert operators.face_ptr.tolist() == [0, 6]


def test_rows_are_stored_along_the_surface() -> None:
    """This happens only if the vertices are numbered at random. The operators don't change otherwise."""
    side = 180
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
        for a, b in zip(*(m.values.reshape(-1, m.pattern.nnz) for m in (ours, theirs)), strict=True):
            x, y = (SparseMatrix(m.pattern, v).to_scipy() for m, v in ((ours, a), (theirs, b)))
            assert abs(x[place][:, place] - y).max() < 1e-4 * abs(y).max()
    taken = torch.empty(side * side, dtype=torch.int64)
    taken[order.long()] = torch.arange(side * side)
    apart = (taken[pattern.row_indices.long()] - taken[pattern.column_indices.long()]).abs().double().mean()
    assert apart < 2 * side
    rings = with_k_ring(shuffled, 2)
    assert torch.equal(rings.neighborhood.row_order, order)
    assert torch.equal(rings.neighborhood.row_lengths[place], with_k_ring(tidy, 2).neighborhood.row_lengths)
    tidy_patches, found = patches(tidy), patches(shuffled)
    assert sorted(found.order.tolist()) == list(range(side * side))
    assert len(found.mask) < 1.5 * len(tidy_patches.mask)


BROKEN = soup(arrays(trimesh.creation.icosphere(1)))


def caught(call: Any) -> list[str]:
    """The warnings of a call. They name the line of the caller."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    assert {warning.filename for warning in record} <= {__file__}
    return [str(warning.message) for warning in record]


def test_components_that_leave_no_other_eigenpairs_are_reported(tmp_path: Path) -> None:
    """Once for each mesh, computed or read from the cache."""
    mesh = BROKEN
    for cache_dir in (None, tmp_path, tmp_path):
        (message,) = caught(lambda cache_dir=cache_dir: precompute(mesh, k=12, cache_dir=cache_dir, join="never"))
        assert message.startswith("arrays: every eigenvalue is 0")
        assert "The mesh has 80 components, and k is 12. Use k > 80" in message
        assert "198 vertices at the position of another" in message
        assert 'With join="always", it would have 1' in message
    other = trimesh.util.concatenate([trimesh.creation.icosphere(1).apply_translation([4 * i, 0, 0]) for i in range(3)])
    broken = soup(arrays(other))
    messages = caught(lambda: precompute_all([mesh, other, broken], 3, join="never", jobs=2))
    assert len(messages) == 3
    assert sum("every eigenvalue is 0" in message for message in messages) == 3
    (message,) = (message for message in messages if "has 3 components" in message)
    assert "join" not in message
    assert caught(lambda: precompute(mesh, k=12)) == []
    (message,) = caught(lambda: precompute(broken, k=3))  # joining leaves three components
    assert "The mesh has 3 components" in message
    assert "join" not in message


def test_the_warning_counts_components_of_reordered_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffnet.geometry.discretize.gradient.MAX_GAP", 0)
    operators = []
    (message,) = caught(lambda: operators.append(precompute(BROKEN, k=12, join="never")))
    assert operators[0].gradient.pattern.row_order is not None
    assert "80 components" in message
    extra = np.concatenate([soup(arrays(trimesh.creation.icosphere(0)))[0], np.ones((5, 3))])
    unused = extra, np.arange(60).reshape(-1, 3)  # 5 vertices that no face uses
    (message,) = caught(lambda: precompute(unused, k=12, join="never"))
    assert "20 components" in message


def test_enough_eigenpairs_give_no_warning(sphere: trimesh.Trimesh) -> None:
    small = soup(arrays(trimesh.creation.icosphere(0)))
    for mesh, k in ((sphere, 1), (sphere, 0), (sphere, 2), (small, 21), (soup(arrays(sphere)), 2)):
        assert caught(lambda mesh=mesh, k=k: precompute(mesh, k=k)) == []
    assert caught(lambda: precompute(cloud_of(sphere), k=2)) == []


def test_small_and_flat_point_clouds() -> None:
    rng = np.random.default_rng(0)
    for points in (rng.random((4, 3)), rng.random((5, 3)), rng.random((31, 3))):
        assert_sound(precompute((points, None), k=6), 6)
    flat = np.c_[rng.random((300, 2)), np.zeros(300)] @ random_rotation(2).T
    operators = precompute((flat, None), k=6)
    assert_sound(operators, 6)
    assert float(operators.mass.sum()) == pytest.approx(1, abs=0.15)
    normals = operators.frames[:, 2].double().numpy()
    np.testing.assert_allclose(np.abs(normals @ random_rotation(2)[:, 2]), 1, atol=1e-5)


@pytest.mark.parametrize("copies", [3, 40], ids=lambda copies: f"{copies}-copies")
def test_coincident_points(sphere: trimesh.Trimesh, copies: int) -> None:
    points = np.array(sphere.vertices)[:60]
    assert_sound(precompute((np.concatenate([points, np.repeat(points[:1], copies, 0)]), None), k=6), 6)
    everywhere = np.repeat(points, copies, 0), None
    operators = precompute(everywhere, k=6)
    assert_sound(operators, 6)
    distinct = precompute((points, None), k=6)
    assert torch.equal(operators.evals, distinct.evals)
    assert torch.equal(operators.evecs, distinct.evecs.repeat_interleave(copies, 0))
    assert torch.equal(operators.frames, distinct.frames.repeat_interleave(copies, 0))
    f = np.sin(3 * points[:, 0])
    np.testing.assert_allclose(gradient(operators, np.repeat(f, copies)), np.repeat(gradient(distinct, f), copies, 0))
    assert relative(operators.mass, distinct.mass.repeat_interleave(copies) / copies) < 1e-6
    if copies < 30:  # the number of neighbors that a local triangulation has
        assert_sound(precompute(everywhere, k=6, join="never"), 6)
    else:
        refused(MeshError, r"arrays: the robust Laplacian can't be computed", precompute, everywhere, k=6, join="never")


def test_point_cloud_operators_resemble_those_of_the_surface(sphere: trimesh.Trimesh) -> None:
    mesh, cloud = precompute(sphere, k=9), precompute(cloud_of(sphere), k=9)
    assert_sound(cloud, 9)
    assert float(cloud.mass.sum()) == pytest.approx(4 * np.pi, rel=0.1)
    np.testing.assert_allclose(cloud.evals, mesh.evals, rtol=0.1, atol=0.02)
    f = np.array(sphere.vertices)[:, 0]
    assert relative(gradient(cloud, f), gradient(mesh, f)) < 0.1
    assert len(cloud.faces) == 0
    assert cloud.face_ptr.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"no faces and so no \.edges; write \.edge_index\(\)"):
        cloud.edges  # noqa: B018


def test_dense_point_clouds_keep_their_area() -> None:
    """Each point is much closer to its neighbors than to the origin."""
    points = np.random.default_rng(0).normal(size=(8_000, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    laplacian, mass = laplacian_and_mass(make_mesh(points, None))
    assert mass.sum() == pytest.approx(4 * np.pi, rel=0.01)
    for f in points.T:  # the coordinates are eigenfunctions with the eigenvalue 2
        assert f @ (laplacian @ f) / (f @ (mass * f)) == pytest.approx(2, rel=0.06)


# ---- broken and random meshes: the operators are sound, or the mesh is refused ----


@KINDS
def test_hard_meshes(shared: Path, kind: Any) -> None:
    paths = sorted((shared / "data" / "hard_meshes").iterdir())
    assert len(paths) == 12
    for path in paths:
        mesh = load_mesh(path)
        operators = precompute(mesh, k=16, laplacian=kind)
        assert_sound(operators, 16)
        used = np.unique(mesh.faces[[len(set(f)) == 3 for f in mesh.faces.tolist()]])
        assert (operators.mass > 0).sum() == len(used), path


def test_degenerate_faces_do_not_hide_the_spectrum(shared: Path) -> None:
    """The capsule has 200 faces of zero area with cotangents above 10⁷. Both Laplacians still find its spectrum."""
    path = shared / "data" / "hard_meshes" / "capsule.obj"
    robust, cotan = precompute(path, k=40, laplacian="robust"), precompute(path, k=40, laplacian="cotan")
    np.testing.assert_allclose(cotan.evals, robust.evals, rtol=1e-3, atol=1e-5)


@KINDS
def test_moebius_strip_and_non_manifold_fan(kind: Any) -> None:
    """The fan is five half discs around one common diameter."""
    operators = precompute(moebius(), k=10, laplacian=kind)
    assert_sound(operators, 10)
    assert (operators.evals[0] < 1e-4).sum() == 1
    verts = [[0.0, 0, 0], [0, 0, 1]] + [[np.cos(a), np.sin(a), 0.5] for a in range(5)]
    operators = precompute((verts, [[0, 1, i] for i in range(2, 7)]), k=7, laplacian=kind)
    assert_sound(operators, 7)
    assert float(operators.mass.sum()) == pytest.approx(2.5, rel=1e-3)


@KINDS
def test_unreferenced_vertices_change_nothing(sphere: trimesh.Trimesh, kind: Any) -> None:
    """The vertices may lie anywhere. Faces with a repeated corner change nothing either."""
    verts, faces = arrays(sphere)
    far = np.array([[100.0, -50, 3], [0, 0, 0], [1e5, 0, 0]])
    more = np.concatenate([far[:1], verts, far[1:]])
    more_faces = np.concatenate([faces + 1, [[0, 0, 5], [643, 643, 643]]])
    clean, padded = (precompute(mesh, k=12, laplacian=kind) for mesh in ((verts, faces), (more, more_faces)))
    assert_sound(padded, 12)
    rest = slice(1, 643)
    np.testing.assert_allclose(padded.mass[rest], clean.mass, rtol=1e-5)
    np.testing.assert_allclose(padded.evals, clean.evals, atol=1e-4)
    np.testing.assert_allclose(padded.frames[rest, 2], clean.frames[:, 2], atol=1e-5)
    a, b = matrix(padded.laplacian), matrix(clean.laplacian)
    assert abs(a[rest, rest] - b).max() < 1e-4
    assert abs(a).sum() == pytest.approx(abs(b).sum())  # no other entries
    np.testing.assert_allclose(padded.evecs[rest, :1], clean.evecs[:, :1], atol=1e-6)
    f = np.concatenate([[7.0], verts[:, 0], [8.0, 9]])
    assert relative(gradient(padded, f)[rest], gradient(clean, verts[:, 0])) < 1e-5
    for unused in (0, 643, 644):
        assert padded.mass[unused] == 0
        assert (padded.evecs[unused] == 0).all()
        assert (gradient(padded, f)[unused] == 0).all()


@KINDS
def test_faulty_faces(plane: tuple[np.ndarray, np.ndarray], kind: Any) -> None:
    verts, faces = plane
    repeated = [[0, 1, 0], [2, 2, 2]]  # faces without area
    assert_sound(precompute((verts, np.concatenate([faces, repeated])), k=8, laplacian=kind), 8)
    assert_sound(precompute((verts, np.concatenate([faces, faces[:20], faces[:5, ::-1]])), k=8, laplacian=kind), 8)
    flat = np.concatenate([verts, (verts[:1] + verts[1:2]) / 2])  # a face of zero area on an edge
    operators = precompute((flat, np.concatenate([faces, [[0, 1, 121]]])), k=8, laplacian=kind)
    assert_sound(operators, 8)
    assert operators.mass[121] > 0


@KINDS
@pytest.mark.parametrize(("k", "zeros"), [(40, 40), (110, 100), (410, 100)])
def test_a_hundred_components(kind: Any, k: int, zeros: int) -> None:
    verts, faces = TETRAHEDRON
    moved = np.concatenate([verts + np.array([3 * i, 0, 0]) for i in range(100)])
    many = moved, np.concatenate([faces + 4 * i for i in range(100)])
    operators = precompute(many, k=k, laplacian=kind)
    assert_sound(operators, k)
    assert (operators.evals[0, :zeros] == 0).all()
    assert (operators.evals[0, zeros:] > 0.1).all()
    if k > 400:
        assert (operators.evecs[:, 400:] == 0).all()
        assert (operators.evals[0, 400:] == operators.evals[0, 399]).all()


WITHOUT_SURFACE: dict[str, tuple[Any, str]] = {
    "triangle in one point": ((np.ones((5, 3)), [[0, 1, 2]]), "one point"),
    "cloud in one point": ((np.ones((5, 3)), None), "at least 4 different points, this has 1"),
    "repeated corners": ((np.eye(3), [[0, 0, 1], [2, 2, 2]]), "none of the 2 faces"),
    "strip along x": (strip_on_a_line((1, 0, 0)), "no area"),
    "strip askew": (strip_on_a_line((1, 2, 3)), "no area"),
    "cloud on a line": ((strip_on_a_line((1, 2, 3))[0], None), "no area"),
    "triangle on a line": ((np.array([[0, 0, 0], [1, 0, 0], [2, 0, 0], [0, 1, 0.0]]), [[0, 1, 2]]), "no area"),
    "three points": ((np.eye(3), None), "at least 4 different points, this has 3"),
    "too large": ((1e39 * np.eye(4)[:, :3], [[0, 1, 2]]), "single precision"),
    "too small": ((1e-30 * np.eye(4)[:, :3], [[0, 1, 2]]), "single precision"),
}


@KINDS
@pytest.mark.parametrize("case", WITHOUT_SURFACE)
def test_meshes_without_surface_are_refused(case: str, kind: Any) -> None:
    source, message = WITHOUT_SURFACE[case]
    refused(MeshError, f"^arrays: .*{message}", precompute, source, k=4, laplacian=kind)


def test_exceptions_of_libraries_name_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["diffnet.geometry.discretize.laplacian"]
    fail = Mock(side_effect=RuntimeError("assertion in C++"))
    monkeypatch.setattr(module.robust_laplacian, "mesh_laplacian", fail)
    monkeypatch.setattr(module.potpourri3d, "cotan_laplacian", fail)
    for kind in LAPLACIANS:
        with pytest.raises(MeshError, match=r"arrays: .*assertion in C\+\+"):
            precompute((TETRAHEDRON[0], TETRAHEDRON[1][:3]), k=4, laplacian=kind)


@st.composite
def random_mesh(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    vertices = draw(st.integers(1, 10))
    coordinate = st.integers(0, draw(st.integers(1, 3)))
    verts = draw(st.lists(st.tuples(coordinate, coordinate, coordinate), min_size=vertices, max_size=vertices))
    corner = st.integers(0, vertices - 1)
    faces = draw(st.lists(st.tuples(corner, corner, corner), max_size=14))
    faces += faces[: draw(st.integers(0, 3))]
    return np.array(verts, np.float64), np.array(faces, np.int64).reshape(-1, 3)


FLAT_TWICE = (  # a face of zero area beside a face that occurs twice
    np.array([[0, 0, 2], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 2], [0, 1, 0.0]]),
    np.array([[0, 2, 4], [0, 2, 5], [0, 2, 4]]),
)


@KINDS
@given(source=random_mesh(), k=st.integers(0, 12))
@example(source=FLAT_TWICE, k=4)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_meshes_are_sound_or_refused(kind: Any, source: tuple[np.ndarray, np.ndarray], k: int) -> None:
    operators, message = None, "arrays: "
    try:
        operators = precompute(source, k=k, laplacian=kind)
    except MeshError as e:
        message = str(e)
    assert message.startswith("arrays: ")
    if operators is not None:
        assert_sound(operators, k)


@KINDS
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 50), marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:block Lanczos failed")
def test_degraded_meshes_are_sound_or_refused(kind: Any, seeds: range) -> None:
    """These meshes are large enough for the Lanczos iteration. At most 2 % may have too little surface left."""
    refusals = 0
    for seed in seeds:
        try:
            assert_sound(precompute(degraded_sphere(seed), k=40, laplacian=kind), 40)
        except MeshError:
            refusals += 1
    assert refusals <= 0.02 * len(seeds)


# ---- the original's operators, and normalization by area ----


def test_the_recipe_of_the_original() -> None:
    """Against a loop over the vertices and SciPy's eigenpairs of L + 1e-8 I."""
    mesh = ellipsoid(0, 2)
    mesh.verts[:] = mesh.verts.astype(np.float32)
    ours, theirs = precompute(mesh, k=20, operators="original"), original_precompute(mesh.verts, mesh.faces, 20)
    assert relative(ours.mass, theirs["mass"]) < 1e-6
    assert abs(matrix(ours.laplacian) - theirs["laplacian"]).max() < 1e-6
    np.testing.assert_allclose(ours.frames, theirs["frames"], atol=1e-6)
    f = np.random.default_rng(0).standard_normal(len(mesh.verts))
    found = matrix(ours.gradient, 0) @ f + 1j * (matrix(ours.gradient, 1) @ f)
    assert relative(found, theirs["gradient"] @ f) < 1e-6
    np.testing.assert_allclose(ours.evals[0], theirs["evals"], rtol=1e-5, atol=1e-9)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # normals of lone vertices in NumPy
@pytest.mark.parametrize(("k", "lone_pairs"), [(24, 0), (40, 1)])
def test_two_components_and_lone_vertices_as_in_the_original(k: int, lone_pairs: int) -> None:
    """The pairs of lone vertices, whose eigenvalue is 30, are beyond the others or among them."""
    mesh = ellipsoid(0, 2)
    verts = np.concatenate([mesh.verts, 0.6 * mesh.verts + 3, [[9, 0, 0], [8, 0, 0]]]).astype(np.float32).astype(float)
    faces = np.concatenate([mesh.faces, mesh.faces + 162])
    ours, theirs = precompute(verts, faces, k=k, operators="original"), original_precompute(verts, faces, k)
    np.testing.assert_allclose(ours.evals[0], theirs["evals"], rtol=1e-5, atol=1e-9)
    assert relative(ours.mass, theirs["mass"]) < 1e-6
    assert not ours.gradient.values[:, -2:].any()
    np.testing.assert_allclose(gram(ours), np.eye(k), atol=1e-6)
    assert ours.evecs[-2:].count_nonzero(dim=1).tolist() == [lone_pairs, lone_pairs]


def test_more_pairs_than_the_original_has() -> None:
    """Values repeat the last one, and vectors are 0."""
    padded = precompute(TETRAHEDRON, k=9, operators="original")
    assert (padded.evals[0, 4:] == padded.evals[0, 3]).all()
    assert not padded.evecs[:, 4:].any()


def test_the_result_depends_on_the_size() -> None:
    mesh = ellipsoid(1, 2)
    small = precompute((mesh.verts * 1e-3, mesh.faces), k=4, operators="original")
    large = precompute((mesh.verts, mesh.faces), k=4, operators="original")
    ratio = np.linalg.norm(small.gradient.values) / np.linalg.norm(large.gradient.values)
    assert ratio < 100  # 1000 without the regularizer


@pytest.mark.parametrize("seed", range(3))
def test_broken_meshes(seed: int) -> None:
    verts, faces = degraded_sphere(seed)
    operators = precompute((verts, faces), k=8, operators="original", normalize=True)
    for values in (operators.mass, operators.evecs, operators.frames, operators.gradient.values):
        assert values.isfinite().all()
    assert (operators.mass > 0).all()
    assert (operators.evals.diff() >= 0).all()


def test_point_clouds(sphere: trimesh.Trimesh) -> None:
    """The robust Laplacian, and gradients from the 30 nearest neighbors."""
    cloud = precompute(cloud_of(sphere), k=9, operators="original")
    assert np.diff(cloud.gradient.pattern.indptr).tolist() == [31] * len(sphere.vertices)
    np.testing.assert_allclose(cloud.evals[0], precompute(sphere, k=9).evals[0], rtol=0.1, atol=1e-4)
    normals = cloud.frames[:, 2].double().numpy()
    assert np.abs((normals * sphere.vertices).sum(1)).min() > 0.99
    along = gradient(cloud, np.array(sphere.vertices)[:, 0])
    expected = np.array([1.0, 0, 0]) - normals[:, :1] * normals
    assert relative(along, expected) < 0.05
    with pytest.raises(MeshError, match='more than 30 points, this cloud has 30; use operators="diffnet"'):
        precompute((np.random.default_rng(0).random((30, 3)), None), k=4, operators="original")


def test_given_normals(sphere: trimesh.Trimesh) -> None:
    normals = np.random.default_rng(0).standard_normal(sphere.vertices.shape)
    for mesh in (sphere, cloud_of(sphere)):
        frames = precompute(mesh, k=2, operators="original", normals=normals).frames.double().numpy()
        np.testing.assert_allclose(frames[:, 2], normals / np.linalg.norm(normals, axis=1)[:, None], atol=1e-6)
        np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (642, 1, 1)), atol=1e-5)


def test_joined_vertices() -> None:
    """None by default, as in the original. `join` decides otherwise."""
    verts, faces = arrays(trimesh.creation.icosphere(1))
    broken = soup((verts, faces))
    with pytest.warns(UserWarning, match="every eigenvalue is 0"):
        assert precompute(broken, k=5, operators="original").joined is None
    joined = precompute(broken, k=5, operators="original", join="always")
    assert joined.joined is not None
    assert relative(joined.evals, precompute(verts, faces, k=5, operators="original").evals) < 1e-4


def test_options(tmp_path: Path) -> None:
    mesh = ellipsoid(2)

    def entries() -> int:
        return len(list(tmp_path.rglob("*.operators.safetensors")))

    def computed(**options: str) -> Operators:
        return precompute(mesh, k=4, cache_dir=tmp_path, **options)  # type: ignore[arg-type]

    original = computed(operators="original")
    assert entries() == 1
    for options in ({}, {"laplacian": "cotan"}):
        assert not torch.equal(computed(**options).gradient.values, original.gradient.values)
    assert entries() == 3
    again = computed(operators="original", laplacian="cotan")
    (listed,) = precompute_all([mesh], 4, cache_dir=tmp_path, operators="original")
    assert entries() == 3
    for found in (again, listed):
        assert_same(found, original)
    with pytest.raises(OptionError, match="the original's operators have the cotangent Laplacian; leave out laplacian"):
        computed(operators="original", laplacian="robust")
    refused(OptionError, "operators should be one of diffnet, original, got 'Original'", computed, operators="Original")


# ---- gradients ----

VERTS, FACES = (torch.tensor(x) for x in TETRAHEDRON)
MOVING = VERTS.float().requires_grad_()


@pytest.mark.parametrize(
    ("call", "warns"),
    [
        (lambda: precompute(MOVING, FACES, k=2), True),
        (lambda: precompute((MOVING, FACES), k=2, laplacian="cotan"), True),
        (lambda: precompute(SimpleNamespace(pos=MOVING, face=FACES.T), k=2), True),
        (lambda: precompute(VERTS, FACES, k=2, normals=1 + MOVING), True),
        (lambda: precompute_all([(VERTS, FACES), (2 * MOVING, FACES)], 2, jobs=1), True),
        (lambda: Operators.from_parts(mass=torch.ones(4), laplacian=torch.zeros(4, 4), verts=MOVING, k=2), True),
        (lambda: load_mesh((MOVING, FACES)), True),
        (lambda: load_mesh(MOVING), True),
        (lambda: load_mesh(SimpleNamespace(pos=VERTS, face=FACES.T, normal=1 + MOVING)), True),
        (lambda: load_mesh((MOVING.detach(), FACES)), False),
        (lambda: torch.no_grad()(load_mesh)((MOVING, FACES)), False),
        (lambda: precompute(MOVING.detach(), FACES, k=2), False),
        (lambda: torch.no_grad()(precompute)(MOVING, FACES, k=2), False),
    ],
)
def test_vertices_that_require_a_gradient_point_to_assemble(call: Callable[[], Any], warns: bool) -> None:
    """The warning names the line of the caller."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    files = [each.filename for each in found if "assemble of diffnet.geometry does" in str(each.message)]
    assert files == [__file__] * warns


# ---- normalization by area ----


def area_of(verts: np.ndarray, faces: np.ndarray) -> float:
    return float(trimesh.Trimesh(verts, faces, process=False).area)


def test_positions_of_area_1() -> None:
    mesh = ellipsoid(3)
    moved = 7 * mesh.verts + 100
    scaled = normalize_positions(moved, mesh.faces, "area")
    assert area_of(scaled, mesh.faces) == pytest.approx(1)
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-12)
    as_tensor = normalize_positions(torch.from_numpy(moved), torch.from_numpy(mesh.faces), "area")
    np.testing.assert_allclose(as_tensor, scaled, atol=1e-12)
    np.testing.assert_array_equal(normalize_positions(np.ones((3, 3)), np.array([[0, 1, 2]]), "area"), np.zeros((3, 3)))
    for normalize in (True, "radius"):
        assert precompute(mesh, k=2, normalize=normalize).mass.sum() > 2  # type: ignore[arg-type]
    unit = precompute((moved, mesh.faces), k=2, normalize="area")
    (listed,) = precompute_all([(moved, mesh.faces)], 2, normalize="area")
    assert float(unit.mass.sum()) == pytest.approx(1, rel=1e-5)
    assert torch.equal(listed.mass, unit.mass)
    for fixed, area in (("none", area_of(moved, mesh.faces)), (7.0, area_of(mesh.verts, mesh.faces))):
        assert float(precompute((moved, mesh.faces), k=2, normalize=fixed).mass.sum()) == pytest.approx(area, rel=1e-5)
        assert np.abs(normalize_positions(moved, mesh.faces, fixed).mean(0)).max() < 1e-10


def test_unusable_normalization() -> None:
    cloud = np.random.default_rng(0).random((40, 3)), None
    refused(MeshError, 'no area to normalize; use normalize="radius"', precompute, cloud, k=2, normalize="area")
    refused(OptionError, r'scale="area" needs faces \(F, 3\)', normalize_positions, cloud[0], scale="area")
    words = r'normalize should be True, False, "radius", .* positive float, got \'bbox\''
    refused(OptionError, words, precompute, cloud, k=2, normalize="bbox")
    refused(OptionError, "normalize should be", precompute_all, [cloud], 2, normalize=1)
    refused(OptionError, "normalize should be", precompute_all, [cloud], 2, normalize=-2.0)
