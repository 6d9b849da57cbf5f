"""Copies of training meshes with other proportions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from shapes import ellipsoid

from diffnet.data import MeshPairs, PairShape
from diffnet.data.pairs.shapes import with_stretched
from diffnet.geometry import SurfacePoints, make_mesh


def two_shapes(stretch: float) -> tuple[MeshPairs, MeshPairs]:
    """Two ellipsoids with normals that differ from those of their triangles, and the set with their copies."""
    shapes = []
    for seed in range(2):
        mesh = ellipsoid(seed, 1)
        normals = mesh.verts / np.linalg.norm(mesh.verts, axis=1, keepdims=True)
        normals[0] = 0  # not known
        shapes.append(PairShape("ab"[seed], replace(mesh, normals=normals), np.arange(len(mesh.verts))))
    maps = {("a", "b"): np.arange(42), ("c", "d"): np.arange(3)}
    data = MeshPairs(shapes, [PairShape("c", ellipsoid(2, 1))], [(0, 1)], [], maps=maps)
    return data, with_stretched(data, stretch)


def test_copies_are_linear_images() -> None:
    data, found = two_shapes(0.3)
    assert [shape.name for shape in found.train] == ["a", "b", "a, stretched", "b, stretched"]
    assert found.train[:2] == data.train
    assert found.test == data.test
    every = []
    for shape, copy in zip(data.train, found.train[2:], strict=True):
        np.testing.assert_array_equal(copy.mesh.faces, shape.mesh.faces)
        linear, *_ = np.linalg.lstsq(shape.mesh.verts, copy.mesh.verts, rcond=None)
        np.testing.assert_allclose(shape.mesh.verts @ linear, copy.mesh.verts, atol=1e-12)
        np.testing.assert_allclose(linear, linear.T, atol=1e-12)  # it scales along orthogonal axes
        every.append(np.linalg.eigvalsh(linear))
        # Edges orthogonal to a normal stay so.
        assert copy.mesh.normals is not None
        edges = np.cross(shape.mesh.verts[1:], [0.3, -0.2, 0.5])
        assert np.abs(np.sum(edges @ linear * copy.mesh.normals[1:], axis=1)).max() < 1e-12
        np.testing.assert_allclose(np.linalg.norm(copy.mesh.normals, axis=1), [0] + [1] * 41)
    factors = np.log(np.concatenate(every))
    assert np.abs(factors).max() <= 0.3
    assert np.abs(factors).max() > 0.15
    assert not np.allclose(every[0], every[1])
    again = two_shapes(0.3)[1]
    np.testing.assert_array_equal(again.train[3].mesh.verts, found.train[3].mesh.verts)


def test_copies_take_part_in_pairs_and_correspondences() -> None:
    data, found = two_shapes(0.3)
    assert found.train_pairs == [(0, 1), (0, 3), (2, 1), (2, 3)]
    stretched = ("a", "b, stretched"), ("a, stretched", "b"), ("a, stretched", "b, stretched")
    assert found.maps.keys() == {*data.maps, *stretched}
    for i, j in found.train_pairs:
        truth = found.truth(found.train[i], found.train[j])
        assert truth is not None
        np.testing.assert_array_equal(truth.points, np.arange(42))


def test_points_in_faces_stay_in_their_faces() -> None:
    mesh = make_mesh(np.eye(3), np.array([[0, 1, 2]]))
    points = SurfacePoints(np.zeros(2, np.int64), np.array([[0.2, 0.3, 0.5], [1, 0, 0]]))
    shape = PairShape("a", mesh, points)
    copy = with_stretched(MeshPairs([shape], [], [], []), 1.0).train[1]
    assert copy.template is points
    linear = copy.mesh.verts  # the images of the unit vectors
    found = points.interpolate(copy.mesh.faces, copy.mesh.verts)
    np.testing.assert_allclose(found, points.interpolate(mesh.faces, mesh.verts) @ linear)
