"""Surfaces that are inside out: which faces operators turn, and that features and predictions are then the same."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from shapes import arrays, ellipsoid, moebius, soup

from diffnet import DiffusionNet
from diffnet.data import Preprocessing, input_features, prepare
from diffnet.geometry import (
    Mesh,
    Operators,
    assemble,
    curvature,
    diagnose,
    is_inside_out,
    load_mesh,
    make_mesh,
    precompute,
    precompute_all,
)
from diffnet.geometry.discretize.connectivity import Connectivity
from diffnet.geometry.mesh.orientation import winding_number
from diffnet.geometry.mesh.polygons import corner_positions
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing.packed import discretize_on
from diffnet.geometry.preprocessing.worker import operators_path
from diffnet.geometry.store.cache import cache_key, entry_path

pytestmark = pytest.mark.usefixtures("one_thread")
FEATURES = "xyz+normals+curvature+diffused-curvature"


def reversed_faces(mesh: Mesh, where: slice = slice(None)) -> Mesh:
    """Some faces of a mesh, or all, in the other order of their corners."""
    faces = mesh.faces.copy()
    faces[where] = faces[where, ::-1]
    return replace(mesh, faces=faces)


def body(seed: int = 0, center: tuple[float, float, float] = (0, 0, 0), scale: float = 1.0) -> Mesh:
    """A closed surface with outward faces, whose eigenvalues differ."""
    mesh = ellipsoid(seed, 3)
    return replace(mesh, verts=scale * mesh.verts + np.array(center))


def together(*meshes: Mesh) -> Mesh:
    parts = [trimesh.Trimesh(mesh.verts, mesh.faces, process=False) for mesh in meshes]
    return make_mesh(*arrays(trimesh.util.concatenate(parts)))


def with_holes(mesh: Mesh, share: float = 0.1) -> Mesh:
    """The mesh without the faces at its two ends along x."""
    height = np.abs(mesh.verts[mesh.faces].mean(1)[:, 0])
    return make_mesh(mesh.verts, mesh.faces[height < np.quantile(height, 1 - share)])


WITH_SIDES = {
    "closed": body(),
    "with holes": with_holes(body()),
    "soup": make_mesh(*soup((body().verts, body().faces))),
    "hollow": together(body(), reversed_faces(body(scale=0.5))),
    "a body in a cavity": together(body(), reversed_faces(body(scale=0.6)), body(scale=0.3)),
    "beside each other": together(body(), body(1, (4, 0, 0))),
    "inconsistent": reversed_faces(body(), slice(7, 9)),
    "a repeated face": make_mesh(body().verts, [*body().faces, body().faces[5], [3, 3, 9]]),
}


@pytest.mark.parametrize("name", WITH_SIDES)
def test_both_orders_of_corners_give_the_same(name: str) -> None:
    mesh = WITH_SIDES[name]
    other, options = reversed_faces(mesh), Preprocessing(k=32)
    assert (is_inside_out(mesh), is_inside_out(other)) == (False, True)
    operators, turned = (prepare(each, options)[1] for each in (mesh, other))
    features, same = (input_features(*prepare(each, options), FEATURES) for each in (mesh, other))
    network = DiffusionNet(features.shape[1], 3, width=16).eval()
    assert torch.equal(turned.faces, torch.from_numpy(other.faces))
    torch.testing.assert_close(turned.normals, operators.normals, atol=1e-6, rtol=0)
    torch.testing.assert_close(same, features, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(network(same, turned), network(features, operators), atol=1e-3, rtol=1e-3)


def outward(operators: Operators, mesh: Mesh) -> torch.Tensor:
    return (operators.normals * torch.from_numpy(mesh.verts)).sum(1) > 0


def test_shells_point_outward_and_cavities_inward() -> None:
    for orders in range(8):
        parts = [body(), body(scale=0.6), body(scale=0.3), body(1, (4, 0, 0))]
        parts = [reversed_faces(mesh) if orders >> i & 1 else mesh for i, mesh in enumerate(parts)]
        mesh, count = together(*parts), len(parts[0].verts)
        found = outward(precompute(mesh, k=0), mesh)[: 3 * count].view(3, count)
        assert found.all(1).tolist() == [True, False, True]
        assert not found[1].any()
        assert diagnose(mesh).inside_out == (orders & 1) + (1 - (orders >> 1 & 1)) + (orders >> 2 & 1)


def test_a_ray_through_edges_and_corners() -> None:
    """The points are below and above corners, edges and diagonals of a box, and inside and outside of it."""
    box = corner_positions(*arrays(trimesh.creation.box(extents=(2, 2, 2))))
    steps = np.linspace(-1.5, 1.5, 13)
    for point in np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3):
        if not (np.abs(point).max() == 1 or np.abs(point[2]) == 1):
            assert winding_number(point, box) == (np.abs(point).max() < 1)
            assert winding_number(point, box[::-1]) == -int(np.abs(point).max() < 1)


def test_surfaces_without_an_outside_stay() -> None:
    ball = body()
    half = make_mesh(ball.verts, ball.faces[ball.verts[ball.faces].mean(1)[:, 2] > 0.1])
    sheet = make_mesh([[0, 0, 0], [1, 0, 0.1], [1, 1, 0], [0, 1, 0.1]], [[0, 1, 2], [0, 2, 3]])
    double = make_mesh(sheet.verts, [*sheet.faces, *sheet.faces[:, ::-1]])
    strip = make_mesh(*moebius())
    for mesh in (double, strip, reversed_faces(strip)):
        assert not is_inside_out(mesh)
    for mesh in (half, sheet):
        other = reversed_faces(mesh)
        assert not any(map(is_inside_out, (mesh, other)))
        normals, opposite = (precompute(each, k=0).normals[mesh.on_surface] for each in (mesh, other))
        torch.testing.assert_close(opposite, -normals, atol=1e-6, rtol=0)
    cloud, inward = make_mesh(ball.verts, None), reversed_faces(ball)
    assert not cloud.turned_faces.any()
    # Normals that are given stay, and so do those of the original's operators.
    normals = -precompute(ball, k=0).normals
    torch.testing.assert_close(precompute(inward, k=0, normals=normals).normals, normals)
    original = [precompute(mesh, k=0, operators="original").normals for mesh in (ball, inward)]
    torch.testing.assert_close(original[1], -original[0], atol=1e-6, rtol=0)


def test_packed_meshes_are_turned_alike() -> None:
    meshes = [reversed_faces(WITH_SIDES[name]) for name in ("closed", "with holes", "hollow")] + [body(2)]
    found = discretize_on("cpu", meshes, Options(0)).operators
    for operators, mesh in zip(found.split(), meshes, strict=True):
        torch.testing.assert_close(operators.frames, precompute(mesh, k=0).frames, atol=1e-6, rtol=0)
    # A worker that has found the turned faces sends them with the mesh.
    assert "turned_faces" in vars(pickle.loads(pickle.dumps(meshes[1])))
    faces, turned = (torch.from_numpy(array) for array in (meshes[1].faces, meshes[1].turned_faces))
    operators = assemble(torch.tensor(meshes[1].verts), Connectivity(faces, len(meshes[1].verts), turned_faces=turned))
    assert (curvature(operators)[meshes[1].on_surface, 0] > 0).all()


def test_entries_of_earlier_versions(tmp_path: Path) -> None:
    """They had other names, except for those in which nothing is turned."""
    mesh = make_mesh(body().verts.astype(np.float32), body().faces)
    for options in (Options(4), Options(4, operators="original")):
        for each in (mesh, make_mesh(mesh.verts, None)):
            content = {"verts": each.verts.astype(np.float32), "faces": each.faces.astype(np.int32)}
            earlier = entry_path(tmp_path, cache_key(content, **asdict(options)), "operators")
            is_turned = options.operators == "diffnet" and not each.is_point_cloud
            assert (operators_path(each, options, tmp_path) != earlier) == is_turned
    for _ in range(2):  # computed, and from the cache
        (operators,) = precompute_all([reversed_faces(mesh)], 4, cache_dir=tmp_path, jobs=1)
        assert outward(operators, mesh).all()


def test_bodies(shared: Path) -> None:
    """Four of the meshes are inside out, of which one has holes. Two are there with more vertices, too."""
    files = sorted((shared / "data" / "bodies").rglob("*.ply"))
    turned = [file.stem for file in files if is_inside_out(load_mesh(file))]
    assert sorted(turned) == ["ages_11", "odd_13", "odd_13", "stylised_07", "stylised_07", "volumes_04"]


def test_rna(shared: Path) -> None:
    """Cavities of RNA surfaces stay as they are, where most of their vertices are inside."""
    folder = shared / "data" / "rna" / "off"
    turned = {name: diagnose(load_mesh(folder / f"{name}.off")).inside_out for name in ("1KD1_B", "1VQK_9", "4V85_BB")}
    assert turned == {"1KD1_B": 0, "1VQK_9": 0, "4V85_BB": 1}
