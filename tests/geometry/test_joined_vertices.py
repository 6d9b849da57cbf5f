"""Vertices at the same position: which are joined, and operators of the mesh with all its vertices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import assert_same, assert_sound, gradient, matrix, relative
from refusals import refused
from shapes import Arrays, arrays, cloud_of

from diffnet import DiffusionNet
from diffnet.geometry import (
    LAPLACIANS,
    Operators,
    collate,
    diagnose,
    joined_vertices,
    load_mesh,
    mesh_edges,
    precompute,
    precompute_all,
    with_k_ring,
    with_nearest,
)
from diffnet.geometry.errors import OptionError
from diffnet.ops import Pattern, SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", LAPLACIANS)


def ellipsoid_arrays(subdivisions: int = 2) -> Arrays:
    verts, faces = arrays(trimesh.creation.icosphere(subdivisions))
    return verts * [1, 0.8, 0.6], faces


def soup(mesh: Arrays, seed: int | None = 0) -> tuple[Arrays, np.ndarray]:
    """Each face with three vertices of its own, numbered at random. Also the original vertex of each new one."""
    verts, faces = mesh
    corners = faces.reshape(-1)
    number = np.arange(len(corners)) if seed is None else np.random.default_rng(seed).permutation(len(corners))
    source = np.empty_like(corners)
    source[number] = corners
    return (verts[source], number.reshape(-1, 3)), source


def both(*meshes: Arrays) -> Arrays:
    """Several meshes as one, with separate vertices."""
    return arrays(trimesh.util.concatenate([trimesh.Trimesh(*mesh, process=False) for mesh in meshes]))


def grid(columns: int = 5, rows: int = 4, at: tuple[float, float] = (0, 0)) -> Arrays:
    """A rectangle of unit squares, two triangles each, with its lower left corner at a point."""
    x, y = np.meshgrid(np.arange(columns + 1.0), np.arange(rows + 1.0))
    verts = np.stack([x + at[0], y + at[1], 0 * x], axis=-1).reshape(-1, 3)
    number = np.arange(len(verts)).reshape(rows + 1, columns + 1)
    a, b, c, d = (part.reshape(-1) for part in (number[:-1, :-1], number[:-1, 1:], number[1:, :-1], number[1:, 1:]))
    return verts, np.concatenate([np.stack([a, b, d], 1), np.stack([a, d, c], 1)])


def tube(count: int = 8, length: int = 3) -> Arrays:
    """A tube cut open along a line: the vertices of the first and the last column coincide."""
    flat, faces = grid(count, length)
    angle = 2 * np.pi * (flat[:, 0] % count) / count
    return np.stack([np.cos(angle), np.sin(angle), flat[:, 1]], 1), faces


def octahedron(x: float) -> Arrays:
    """A closed surface with vertices at x − 1 and x + 1 on the first axis."""
    corners = np.concatenate([np.eye(3), -np.eye(3)]) + np.array([x, 0, 0])
    faces = [[0, 1, 2], [1, 3, 2], [3, 4, 2], [4, 0, 2], [1, 0, 5], [3, 1, 5], [4, 3, 5], [0, 4, 5]]
    return corners, np.array(faces)


# ---- which vertices are joined ----

CASES: dict[str, tuple[Callable[[], Arrays], int, int]] = {  # the mesh, and the vertices joined by auto and by always
    "soup": (lambda: soup(ellipsoid_arrays())[0], 960 - 162, 960 - 162),
    "soup of an open surface": (lambda: soup(grid())[0], 120 - 30, 120 - 30),
    "soup of both sides": (lambda: soup((grid()[0], np.concatenate([grid()[1], grid()[1][:, ::-1]])))[0], 210, 210),
    "two triangles": (lambda: soup(grid(1, 1))[0], 2, 2),
    "two halves with a seam": (lambda: both(grid(), grid(at=(5, 0))), 5, 5),
    "two halves and a small part": (lambda: both(grid(), grid(at=(5, 0)), grid(1, 1, at=(20, 0))), 5, 5),
    "two small halves beside a large part": (lambda: both(grid(1, 1), grid(1, 1, (1, 0)), grid(at=(20, 0))), 0, 2),
    "one part that is cut open": (tube, 0, 4),
    "connected": (grid, 0, 0),
    "closed surfaces that touch in a vertex": (lambda: both(octahedron(0), octahedron(2)), 0, 1),
    "open surfaces that touch in a vertex": (lambda: both(grid(), grid(at=(5, 4))), 0, 1),
    "a closed surface twice": (lambda: both(octahedron(0), octahedron(0)), 0, 6),
    "a sheet with a front and a back": (lambda: both(grid(), (grid()[0], grid()[1][:, ::-1])), 18, 30),
    "touching closed surfaces beside a soup": (
        lambda: both(octahedron(0), octahedron(2), soup(octahedron(9))[0], soup(octahedron(20))[0]),
        0,
        2 * (24 - 6) + 1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_which_vertices_are_joined(case: str) -> None:
    make, auto, always = CASES[case]
    mesh = load_mesh(make())
    numbers = np.arange(len(mesh.verts))
    for rule, count in (("never", 0), ("auto", auto), ("always", always)):
        first = joined_vertices(mesh, rule)
        assert (first != numbers).sum() == count, rule
        assert (first <= numbers).all()
        assert (first[first] == first).all()
        assert (mesh.verts[first] == mesh.verts).all()
    found = diagnose(mesh)
    assert (found.joined_by_default, found.coincident_vertices) == (auto, always)


def test_half_of_the_faces_are_not_most() -> None:
    """A soup of two triangles beside a part of two triangles, and then of four."""
    other = grid(1, 1, at=(9, 0))
    assert (joined_vertices(load_mesh(both(soup(grid(1, 1))[0], other))) == np.arange(10)).all()
    assert (joined_vertices(load_mesh(both(soup(grid(2, 1))[0], other))) != np.arange(16)).sum() == 6


def test_vertices_that_no_face_uses_stay_apart() -> None:
    verts, faces = soup(ellipsoid_arrays(1), None)[0]
    more = np.concatenate([verts[:1], verts]), np.concatenate([faces + 1, [[0, 0, 1]]])  # a face without area
    for rule in ("auto", "always"):
        first = joined_vertices(load_mesh(more), rule)
        assert first[0] == 0
        assert (first[1:] == joined_vertices(load_mesh((verts, faces)), rule) + 1).all()
        operators = precompute(more, k=8, join=rule)
        assert_sound(operators, 8)
        assert operators.mass[0] == 0


def test_zeros_of_either_sign_are_one_position() -> None:
    (verts, faces), _ = soup(grid(1, 1), None)
    verts[verts == 0] *= np.where(np.arange((verts == 0).sum()) % 2, 1.0, -1.0)
    assert np.signbit(verts).any()
    assert joined_vertices(load_mesh((verts, faces))).tolist() == [0, 1, 2, 0, 2, 5]


def test_positions_are_compared_in_single_precision() -> None:
    (verts, faces), _ = soup(ellipsoid_arrays(1))
    verts = verts * (1 + 1e-13 * np.random.default_rng(0).standard_normal(verts.shape))
    operators = precompute((verts, faces), k=6)
    assert len(operators.joined.unique()) == 42
    assert diagnose(load_mesh((verts, faces))).joined_by_default == 240 - 42


def test_an_unknown_rule_is_refused() -> None:
    for rule in ("yes", True, None):
        refused(OptionError, "join should be one of auto, always, never, got", precompute, grid(), k=4, join=rule)
        refused(OptionError, "join should be one of auto, always, never, got", joined_vertices, load_mesh(grid()), rule)


# ---- operators ----


@KINDS
def test_a_soup_has_the_operators_of_the_connected_mesh(kind: Any) -> None:
    mesh = ellipsoid_arrays()
    broken, source = soup(mesh)
    whole, split = precompute(mesh, k=20, laplacian=kind), precompute(broken, k=20, laplacian=kind)
    assert_sound(split, 20)
    np.testing.assert_allclose(split.evals, whole.evals, rtol=1e-6, atol=1e-6)
    expected = whole.evecs[source]
    assert relative(split.evecs * (split.evecs * expected).sum(0).sign(), expected) < 1e-5
    copies = np.bincount(source)
    assert relative(split.mass, whole.mass.numpy()[source] / copies[source]) < 1e-6
    np.testing.assert_allclose(split.frames[:, 2], whole.frames[source, 2], atol=1e-6)
    np.testing.assert_array_equal(split.faces, broken[1])
    np.testing.assert_array_equal(split.edges, mesh_edges(broken[1]))
    f = np.sin(3 * mesh[0][:, 0]) + mesh[0][:, 1]
    assert relative(gradient(split, f[source]), gradient(whole, f)[source]) < 1e-6
    ours, theirs = split.with_gradient_evecs().gradient_evecs, whole.with_gradient_evecs().gradient_evecs
    assert relative(ours.square().sum(0), theirs.square().sum(0)[source]) < 1e-5
    np.testing.assert_array_equal(split.joined, joined_vertices(load_mesh(broken)))
    assert len(np.unique(np.stack([split.joined, source]), axis=1).T) == len(mesh[0])


@KINDS
@pytest.mark.parametrize("source", ["soup", "seam", "tube"])
def test_the_laplacian_of_the_copies(source: str, kind: Any) -> None:
    """It is symmetric and positive semi-definite, and agrees with the joined Laplacian on functions that are joined."""
    mesh = {"soup": soup(ellipsoid_arrays(1))[0], "seam": both(grid(), grid(at=(5, 0))), "tube": tube()}[source]
    operators = precompute(mesh, k=8, laplacian=kind, join="always")
    assert_sound(operators, 8)
    laplacian, mass = matrix(operators.laplacian).toarray(), operators.mass.double().numpy()
    np.testing.assert_array_equal(laplacian, laplacian.T)
    eigenvalues = np.linalg.eigvalsh(laplacian)
    assert eigenvalues[0] > -1e-6 * eigenvalues[-1]
    assert eigenvalues[1] > 1e-4 * eigenvalues[-1]  # constants alone have no energy
    evecs, evals = operators.evecs.double().numpy(), operators.evals[0].double().numpy()
    assert relative(laplacian @ evecs, mass[:, None] * evecs * evals) < 1e-4


def test_vertices_that_share_no_position_keep_their_rows() -> None:
    mesh = both(grid(), grid(at=(5, 0)))
    whole, split = precompute((mesh[0], mesh[1]), k=4, join="never"), precompute(mesh, k=4)
    seam = np.isin(split.joined.numpy(), np.flatnonzero(split.joined.numpy() != np.arange(60)))
    seam |= np.isclose(mesh[0][:, 0], 5)
    inside = (matrix(split.gradient, 0)[:, seam].getnnz(axis=1) == 0) & ~seam
    assert inside.sum() == 40
    for ours, theirs in ((split.laplacian, whole.laplacian), (split.gradient, whole.gradient)):
        component = None if ours.values.ndim == 1 else 0
        assert abs(matrix(ours, component)[inside] - matrix(theirs, component)[inside]).max() == 0
    assert torch.equal(split.mass[torch.from_numpy(inside)], whole.mass[torch.from_numpy(inside)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient": "spectral", "outputs_at": "faces"},
        {"attention_heads": 2, "outputs_at": "global_mean"},
        {"diffusion": "implicit", "attention_heads": 2},
    ],
)
def test_a_network_sees_the_connected_mesh(options: dict[str, Any]) -> None:
    """The outputs at all copies are those of the connected mesh."""
    mesh = ellipsoid_arrays(1)
    broken, source = soup(mesh)
    whole, split = precompute(mesh, k=12), precompute(broken, k=12)
    if "attention_heads" in options and "diffusion" not in options:
        whole, split = with_k_ring(whole, 2), with_k_ring(split, 2)
    model = DiffusionNet(3, 4, width=8, blocks=2, **options).eval()
    for block in model.blocks:
        torch.nn.init.uniform_(block.diffusion.time, 0.01, 0.1)
    x = torch.from_numpy(mesh[0]).float()
    expected, found = model(x, whole), model(x[source], split)
    if options.get("outputs_at", "vertices") == "vertices":
        expected = expected[source]
    assert found.shape == expected.shape
    assert relative(found.detach(), expected.detach()) < 1e-4


def mask_of(pattern: Pattern | None) -> torch.Tensor:
    assert pattern is not None
    return SparseMatrix(pattern, torch.ones(pattern.nnz, dtype=torch.bool)).to_dense()


def test_neighborhoods_hold_first_copies() -> None:
    """Each copy has the neighbors of its joined vertex, at their first copies, for all kinds and sizes."""
    mesh = ellipsoid_arrays(1)
    broken, source = soup(mesh)
    whole = precompute(mesh, k=2)
    both = collate([whole, precompute(broken, k=2)])
    firsts = np.unique(both.joined.numpy()[42:]) - 42
    positions = torch.rand(42, 3)[np.concatenate([np.arange(42), source])]

    def check(ours: Operators, of_whole: Operators) -> None:
        found, near = (mask_of(o.neighborhood) for o in (ours, of_whole))
        lifted = torch.zeros(len(source), len(source), dtype=torch.bool)
        lifted[:, firsts] = near[source][:, source[firsts]]
        assert torch.equal(found, torch.block_diag(near, lifted))

    for k in range(3):
        check(with_k_ring(both, k), with_k_ring(whole, k))
    for k in (1, 5):
        check(with_nearest(both, positions, k), with_nearest(whole, positions[:42], k))


@KINDS
@pytest.mark.parametrize("source", ["sphere", "plane", "cloud", "cut open"])
def test_nothing_changes_where_nothing_is_joined(request: pytest.FixtureRequest, source: str, kind: Any) -> None:
    mesh = tube() if source == "cut open" else request.getfixturevalue("sphere" if source == "cloud" else source)
    mesh = cloud_of(mesh) if source == "cloud" else mesh
    auto, never = (precompute(mesh, k=12, laplacian=kind, join=join) for join in ("auto", "never"))
    assert auto.joined is never.joined is None
    assert_same(auto, never)


def test_thousands_of_copies_of_one_vertex() -> None:
    """Faces that have collapsed into a point. The matrices grow with the number of copies, not with its square."""
    (verts, faces), _ = soup(ellipsoid_arrays(1), None)
    collapsed = np.repeat(verts[:1], 9000, 0), np.arange(9000).reshape(-1, 3)
    operators = precompute(both((verts, faces), collapsed), k=6)
    assert_sound(operators, 6)
    assert len(operators.joined.unique()) == 42
    assert operators.laplacian.pattern.nnz < 20 * 9240
    np.testing.assert_allclose(operators.evals, precompute((verts, faces), k=6).evals, rtol=1e-6, atol=1e-6)


def test_rows_along_the_surface(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = soup(ellipsoid_arrays(1))[0]
    expected = precompute(broken, k=8)
    monkeypatch.setattr("diffnet.geometry.discretize.gradient.MAX_GAP", 0)
    found = precompute(broken, k=8, basis="bfloat16")
    assert found.gradient.pattern.row_order is not None
    for ours, theirs in ((found.laplacian, expected.laplacian), (found.gradient, expected.gradient)):
        x = torch.randn(240, 2)
        assert relative(ours @ x, theirs @ x) < 1e-6
    assert relative(found.evecs, expected.evecs) < 1e-2


# ---- containers, cache and batches ----


def test_batches_keep_the_map(sphere: trimesh.Trimesh) -> None:
    broken = precompute(soup(ellipsoid_arrays(1))[0], k=6)
    whole = precompute(sphere, k=6)
    batch = collate([whole, broken, whole, broken])
    for part in (batch.split()[3], batch[1], batch[1:3][0], batch.to(dtype=torch.float64)[-1].to(torch.float32)):
        assert_same(part, broken)
    assert torch.equal(batch[0].joined, torch.arange(642))
    assert collate([whole, whole]).joined is None
    assert batch.to("meta").joined.is_meta
    x = torch.randn(batch.num_vertices, 3)
    model = DiffusionNet(3, 2, width=8, blocks=1).eval()
    assert relative(model(x, batch)[642:882].detach(), model(x[642:882], broken).detach()) < 1e-5


def test_many_meshes() -> None:
    meshes = [soup(ellipsoid_arrays(1), seed)[0] for seed in range(2)]
    for mesh, found in zip(meshes, precompute_all(meshes, 6, jobs=2), strict=True):
        assert_same(found, precompute(mesh, k=6))
    assert all(o.joined is None for o in precompute_all(meshes, 81, join="never", jobs=1))


def test_the_arrays_passed_in_stay() -> None:
    verts, faces = soup(ellipsoid_arrays(1))[0]
    mesh = load_mesh((verts, faces))
    before = verts.copy(), faces.copy(), mesh.verts.copy(), mesh.faces.copy()
    operators = precompute(mesh, k=4)
    assert operators.num_vertices == len(verts)
    for now, then in zip((verts, faces, mesh.verts, mesh.faces), before, strict=True):
        np.testing.assert_array_equal(now, then)
