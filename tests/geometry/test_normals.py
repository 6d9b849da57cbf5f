"""Own normals: read from files, given to `precompute`, and used for frames, gradients and Laplacians of clouds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import assert_same, assert_sound, gradient
from refusals import refused
from scipy.spatial import Delaunay
from shapes import arrays

from diffnet.geometry import MeshError, closest_points, load_mesh, make_mesh, precompute, precompute_all, tangent_frames
from diffnet.geometry.discretize.laplacian import local_triangles
from diffnet.geometry.errors import OptionError

pytestmark = pytest.mark.usefixtures("one_thread")


def ellipsoid(sphere: trimesh.Trimesh, thickness: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vertices, faces and the exact normals of a flat ellipsoid."""
    verts, faces = arrays(sphere)
    axes = np.array([1, 0.8, thickness])
    normals = verts / axes
    return verts * axes, faces, normals / np.linalg.norm(normals, axis=1, keepdims=True)


def ply(verts: np.ndarray, normals: np.ndarray, faces: np.ndarray) -> str:
    header = ["ply", "format ascii 1.0", f"element vertex {len(verts)}"]
    header += [f"property double {name}" for name in ("x", "y", "z", "nx", "ny", "nz")]
    header += [f"element face {len(faces)}", "property list uchar int vertex_indices", "end_header"]
    rows = [" ".join(map(repr, row)) for row in np.concatenate([verts, normals], axis=1).tolist()]
    return "\n".join([*header, *rows, *(f"3 {a} {b} {c}" for a, b, c in faces), ""])


def obj(verts: np.ndarray, normals: np.ndarray, faces: np.ndarray) -> str:
    rows = [f"{kind} {x!r} {y!r} {z!r}" for kind, of in (("v", verts), ("vn", normals)) for x, y, z in of.tolist()]
    return "\n".join([*rows, *(f"f {a}//{a} {b}//{b} {c}//{c}" for a, b, c in faces + 1), ""])


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, np.ndarray.tolist, lambda n: 1e200 * n])
def test_frames_have_own_normals(sphere: trimesh.Trimesh, convert: Any) -> None:
    verts, faces, normals = ellipsoid(sphere)
    for own in (faces, None):
        operators = precompute(verts, own, k=6, normals=convert(normals))
        assert_sound(operators, 6)
        np.testing.assert_allclose(operators.frames[:, 2], normals, atol=1e-6)
        # The gradient of a linear function is the tangential part of its direction.
        direction = np.array([1.0, 2, 3])
        expected = direction - (normals @ direction)[:, None] * normals
        assert np.median(np.abs(gradient(operators, verts @ direction) - expected)) < 0.05


def test_clouds_with_own_normals_are_as_accurate_as_meshes(sphere: trimesh.Trimesh) -> None:
    verts, faces, normals = ellipsoid(sphere)
    mesh = precompute(verts, faces, k=12)
    own = precompute(verts, k=12, normals=normals)
    estimated = precompute(verts, k=12)
    assert abs(float(own.mass.sum() / mesh.mass.sum()) - 1) < 0.01
    np.testing.assert_allclose(own.evals[0, 1:], mesh.evals[0, 1:], rtol=0.02)

    def tilt(frames: torch.Tensor) -> float:
        return float(np.abs((frames[:, 2].numpy() * normals).sum(1)).min())

    assert tilt(own.frames) > 0.9999 > tilt(estimated.frames)
    assert not torch.equal(own.laplacian.values, estimated.laplacian.values)


def test_thin_clouds_with_own_normals(sphere: trimesh.Trimesh) -> None:
    """Neighbors include points of the other side. With estimated normals, the area is half too large."""
    verts, faces, normals = ellipsoid(sphere, 0.1)
    mesh, own = precompute(verts, faces, k=6), precompute(verts, k=6, normals=normals)
    assert abs(float(own.mass.sum() / mesh.mass.sum()) - 1) < 0.03
    np.testing.assert_allclose(own.evals[0, 1:3], mesh.evals[0, 1:3], rtol=0.05)


@pytest.mark.parametrize("write", [ply, obj])
def test_normals_of_files(tmp_path: Path, sphere: trimesh.Trimesh, write: Any) -> None:
    """By default they are used for clouds only."""
    verts, faces, normals = ellipsoid(sphere)
    cache = tmp_path / "cache"
    for own, name in ((faces, "mesh"), (faces[:0], "cloud")):
        path = tmp_path / f"{name}.{write.__name__}"
        path.write_text(write(verts, 3 * normals, own))
        for _ in range(2):  # parsed, and from the cache
            mesh = load_mesh(path, cache)
            np.testing.assert_allclose(mesh.normals, normals, atol=1e-12)
        given = precompute(verts, own, k=6, normals=mesh.normals)
        by_geometry = precompute(verts, own, k=6)
        default = given if name == "cloud" else by_geometry
        for rule, expected in ((None, default), ("file", given), ("geometry", by_geometry)):
            (of_many,) = precompute_all([path], 6, cache_dir=cache, normals=rule, jobs=1)
            for found in (precompute(path, k=6, normals=rule), of_many):
                assert_same(found, expected)
    assert len(list(cache.rglob("*.operators.safetensors"))) == 4


def test_the_entry_of_a_mesh_without_own_normals_stays(tmp_path: Path, sphere: trimesh.Trimesh) -> None:
    verts, faces, normals = ellipsoid(sphere)
    with_normals = make_mesh(verts, faces, normals=normals)
    for mesh in (with_normals, replace(with_normals, normals=None), (verts, faces)):
        precompute(mesh, k=4, cache_dir=tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    turned = precompute(verts, faces, k=4, cache_dir=tmp_path, normals=normals)
    other = precompute(verts, faces, k=4, cache_dir=tmp_path, normals=normals[:, ::-1])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    assert torch.equal(turned.laplacian.values, other.laplacian.values)
    assert not torch.equal(turned.frames, other.frames)


def test_corners_of_obj_files(tmp_path: Path) -> None:
    """A vertex with several normals has their mean, a vertex with none has 0, and indices may be negative."""
    text = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 5 5 5\nv 0 0 1\nvn 0 0 2\nvn 0 1 0\nvn 1 0 0\n"
    path = tmp_path / "a.obj"
    path.write_text(text + "f 1//1 2/7/1 3//-3\nf 1//2 2//2 5//3\n")
    root = np.sqrt(0.5)
    expected = [[0, root, root], [0, root, root], [0, 0, 1], [0, 0, 0], [1, 0, 0]]
    np.testing.assert_allclose(load_mesh(path).normals, expected)
    own = precompute(path, k=2, normals="file")
    np.testing.assert_allclose(own.frames[:, 2], [*expected[:3], [0, 0, 1], expected[4]], atol=1e-6)
    for rest in ("f 1 2 3\n", "f 1//9 2//9 3//9\n", "f 1/1 2/1 3/1\n"):
        path.write_text(text + rest)
        assert load_mesh(path).normals is None
    path.write_text(text + "vn 1 0\nf 1 2 3\n")
    refused(MeshError, "line 9: a normal with 2 coordinates", load_mesh, path)


def test_unusable_normals_of_a_cloud_are_estimated(tmp_path: Path, sphere: trimesh.Trimesh) -> None:
    verts, faces, normals = ellipsoid(sphere)
    normals[::2] = 0
    normals[1] = np.nan
    path = tmp_path / "a.ply"
    path.write_text(ply(verts, normals, faces[:0]))
    operators, estimated = precompute(path, k=0), precompute(verts, k=0)
    given = np.abs(np.nan_to_num(normals)).max(1) > 0
    assert given.sum() == len(verts) // 2 - 1
    np.testing.assert_allclose(operators.frames[given, 2], normals[given], atol=1e-6)
    assert torch.equal(operators.frames[~given], estimated.frames[~given])
    path.write_text(ply(verts, 0 * verts, faces[:0]))
    assert load_mesh(path).normals is None


def test_joined_vertices_share_a_normal(sphere: trimesh.Trimesh) -> None:
    verts, faces = arrays(sphere)
    soup, corners = verts[faces.reshape(-1)], np.arange(faces.size).reshape(-1, 3)
    tilted = soup + np.random.default_rng(0).normal(0, 0.1, soup.shape)
    operators = precompute(soup, corners, k=4, normals=tilted)
    first = operators.joined.numpy()
    assert len(np.unique(first)) == len(verts)
    assert torch.equal(operators.frames, operators.frames[first])
    assert ((operators.frames[:, 2].numpy() * soup).sum(1) > 0.95).all()


def test_wrong_normals(sphere: trimesh.Trimesh) -> None:
    verts, faces, normals = ellipsoid(sphere)
    zero, infinite = normals.copy(), normals.copy()
    zero[7], infinite[9, 1] = 0, np.inf
    for wrong, message in (
        (normals[1:], r"normals should have shape \(642, 3\), one for each vertex, shape is \(641, 3\)"),
        (normals[faces[:, 0]], r"shape is \(1280, 3\)"),
        (zero, r"1 are not; the first is normals\[7\] = \[0.0, 0.0, 0.0\]"),
        (infinite, r"1 are not; the first is normals\[9\]"),
        (0 * normals, r"642 are not"),
        ([["a"]], "normals are not an array of numbers"),
        (normals + 0j, r"normals are not an array of numbers \(they are complex\)"),
        ("file", "it has no normals; PLY files"),
    ):
        for own in (faces, None):
            refused(MeshError, message, precompute, verts, own, k=4, normals=wrong)
    for call in (
        lambda: precompute(verts, k=4, normals="faces"),
        lambda: precompute_all([sphere], 4, normals="faces"),
        lambda: precompute_all([sphere], 4, normals=normals),
    ):
        refused(OptionError, r'normals should be .*None, "file" or "geometry", got', call)


def test_local_triangles_against_delaunay() -> None:
    """With all points as neighbors in one plane, each Delaunay triangle is found at its three corners."""
    rng = np.random.default_rng(0)
    flat = np.tile(np.eye(3), (100, 1, 1))
    points = rng.uniform(size=(100, 2))
    found = local_triangles(np.c_[points, np.zeros(100)], flat, 99)
    expected = {tuple(sorted(t)) for t in Delaunay(points).simplices.tolist()}
    assert {tuple(sorted(t)) for t in found.tolist()} == expected
    assert len(found) == 3 * len(expected)


def test_area_of_a_grid_with_normals() -> None:
    """The four points of a cell lie on a circle. All of them must take the same of its two triangulations."""
    grid = np.stack(np.meshgrid(np.arange(20), np.arange(20), [0]), -1).reshape(-1, 3) / 19
    operators = precompute(grid, k=4, normals=np.tile([0, 0, 1], (400, 1)))
    assert abs(float(operators.mass.sum()) - 1) < 0.01
    small = precompute(grid[[0, 1, 20, 21]], k=2, normals=np.tile([0, 0, 1], (4, 1)))
    assert abs(float(small.mass.sum()) * 19**2 - 1) < 0.01


def test_tangent_frames_with_normals(sphere: trimesh.Trimesh) -> None:
    mesh = load_mesh(sphere)
    for call, wrong, message in (
        (tangent_frames, mesh.verts[1:], r"normals should have shape \(642, 3\), shape is \(641, 3\)"),
        (tangent_frames, mesh.verts * 1j, r"normals are not an array of numbers \(they are complex\)"),
        (closest_points, mesh.verts * 1j, r"points are not an array of numbers \(they are complex\)"),
    ):
        refused(ValueError, message, call, mesh, wrong)
    normals = np.where(np.arange(642)[:, None] < 9, 0, [0, 3.0, 0])
    frames = tangent_frames(mesh, normals)
    np.testing.assert_allclose(frames[9:, 2], np.tile([0, 1, 0], (633, 1)))
    np.testing.assert_array_equal(frames[:9], tangent_frames(mesh)[:9])
    np.testing.assert_allclose(frames @ frames.transpose(0, 2, 1), np.tile(np.eye(3), (642, 1, 1)), atol=1e-12)
