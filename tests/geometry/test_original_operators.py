"""`precompute(…, operators="original")` and normalization by area. tests/golden compares with stored operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import gradient, matrix, relative
from shapes import arrays, cloud_of, degraded_sphere, ellipsoid, soup

from diffnet.benchmarks.original.preprocessing import original_precompute
from diffnet.geometry import MeshError, Operators, load_mesh, normalize_positions, precompute, precompute_all
from diffnet.geometry.discretize.original import original_parts
from diffnet.geometry.eigen.shifted import shifted_pairs
from diffnet.geometry.errors import OptionError

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_eigenpairs_of_the_shifted_laplacian() -> None:
    """With two components, and with lone vertices whose pairs are among the others."""
    ball = trimesh.creation.icosphere(1)
    verts = np.concatenate([ball.vertices, 0.6 * ball.vertices + 3, [[9.0, 0, 0], [8.0, 0, 0]]])
    parts = original_parts(load_mesh((verts, np.concatenate([ball.faces, ball.faces + len(ball.vertices)]))))
    assert np.flatnonzero(parts.lone_mass).tolist() == [84, 85]
    shift, live = 1e-4, parts.lone_mass == 0
    lone = np.where(live, 0, [shift / 2.5] * 84 + [shift / 2.5, shift / 40])
    mass = np.where(live, parts.mass, lone)
    root = 1 / np.sqrt(mass)
    all_pairs = np.linalg.eigh(root[:, None] * parts.laplacian.toarray() * root + np.diag(shift * root**2))

    inner = np.linalg.eigh((root[:, None] * parts.laplacian.toarray() * root)[:84, :84])
    vectors = np.zeros((86, 84))
    vectors[:84] = root[:84, None] * inner[1]
    evals, evecs = shifted_pairs((inner[0][:10], vectors[:, :10]), lone, shift)
    np.testing.assert_allclose(evals, all_pairs[0][:10], atol=1e-6)
    np.testing.assert_allclose(evecs.T @ (mass[:, None] * evecs), np.eye(10), atol=1e-10)
    assert np.abs(evecs[84]).max() == pytest.approx(1 / np.sqrt(lone[84]))
    assert np.abs(evecs[85]).max() == 0  # its eigenvalue is 40
    # More pairs than there are: values repeat the last one, vectors are 0.
    padded = shifted_pairs((np.array([0.0, 2.0, 2.0]), np.eye(4)[:, :3] * [1, 1, 0]), np.zeros(4), shift)
    assert padded[0].tolist() == [shift, 2 + shift, 2 + shift]
    assert not padded[1][:, 2].any()


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


def test_vertices_without_faces() -> None:
    verts, faces = arrays(trimesh.creation.icosphere(2))
    with_others = np.concatenate([verts, verts[:3] * 2])
    plain, operators = (precompute(v, faces, k=8, operators="original") for v in (verts, with_others))
    assert relative(operators.evals, plain.evals) < 1e-6
    assert operators.mass[-1] == pytest.approx(1e-8 * float(operators.mass.mean()), rel=1e-4)
    assert not operators.gradient.values[:, -1].any()
    assert torch.equal(operators.evecs[-3:], torch.zeros(3, 8))


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
        assert torch.equal(found.gradient.values, original.gradient.values)
    with pytest.raises(OptionError, match="the original's operators have the cotangent Laplacian; leave out laplacian"):
        computed(operators="original", laplacian="robust")
    with pytest.raises(OptionError, match="operators should be one of diffnet, original, got 'Original'"):
        computed(operators="Original")


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


def test_unusable_normalization() -> None:
    cloud = np.random.default_rng(0).random((40, 3)), None
    with pytest.raises(MeshError, match='no area to normalize; use normalize="radius"'):
        precompute(cloud, k=2, normalize="area")
    with pytest.raises(OptionError, match=r'scale="area" needs faces \(F, 3\)'):
        normalize_positions(cloud[0], scale="area")
    with pytest.raises(OptionError, match=r'normalize should be True, False, "radius", .* or "all-area", got \'bbox\''):
        precompute(cloud, k=2, normalize="bbox")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="normalize should be"):
        precompute_all([cloud], 2, normalize=1)
