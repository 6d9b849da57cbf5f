"""Outputs of each mesh, edges, normals, boundaries, and operations as functions of operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from conftest import random_rotation
from operator_checks import matrix, tiny_operators
from refusals import refused
from shapes import TETRAHEDRON, arrays, ellipsoid, moebius, soup
from torch import Tensor
from torch.nn.functional import normalize

import diffnet
from diffnet import DiffusionNet, Operators, collate, geometry, ops, precompute, wks
from diffnet.geometry import boundary_vertices, edges, mesh_edges, one_ring
from diffnet.ops import Pattern, SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def packed() -> Operators:
    """Three meshes and a point cloud."""
    return collate(tiny_operators())


# ---- unpack ----


@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "mesh", "global_mean"])
def test_outputs_of_each_mesh(packed: Operators, at: Any) -> None:
    torch.manual_seed(0)
    model = DiffusionNet(3, 5, width=8, blocks=1, outputs_at="global_mean" if at == "mesh" else at).eval()
    per_mesh = at in ("mesh", "global_mean")
    x = torch.randn(packed.num_vertices, 3)
    parts = packed.unpack(model(x, packed), at)
    assert len(parts) == 4
    features = packed.unpack(x)
    for part, own, operators in zip(parts, features, tiny_operators(), strict=True):
        if at in ("faces", "edges") and len(operators.faces) == 0:
            assert part.shape == (0, 5)
            continue
        expected = model(own, operators)
        torch.testing.assert_close(part, expected[0] if per_mesh else expected, rtol=1e-4, atol=1e-5)


def test_unpacking_another_dimension(packed: Operators) -> None:
    x = torch.randn(packed.num_vertices, 2)
    parts = packed.unpack(packed.gradient @ x, dim=1)
    for part, own, operators in zip(parts, packed.unpack(x), tiny_operators(), strict=True):
        torch.testing.assert_close(part, operators.gradient @ own)
    (alone,) = tiny_operators()[0].unpack(x[:42])
    assert torch.equal(alone, x[:42])


def test_values_that_do_not_fit(packed: Operators) -> None:
    refused(ValueError, r"84 vertices in dimension 0, shape is \(83, 2\)", packed.unpack, torch.zeros(83, 2))
    refused(ValueError, r"96 faces in dimension 1, shape is \(96,\)", packed.unpack, torch.zeros(96), "faces", dim=1)
    refused(ValueError, r"4 meshes in dimension 0, shape is \(84,\)", packed.unpack, torch.zeros(84), "mesh")
    with pytest.raises(ValueError, match="vertices, faces, edges, mesh, global_mean, got 'corners'"):
        packed.unpack(torch.zeros(4), "corners")  # type: ignore[arg-type]
    refused(TypeError, "y should be a tensor, got list", packed.unpack, [1, 2])


# ---- edges ----


def test_edges_of_each_mesh(packed: Operators) -> None:
    counts = [len(mesh_edges(o.faces.numpy())) for o in tiny_operators()]
    assert packed.edge_lengths == tuple(counts) == (120, 6, 18, 0)
    assert packed.edge_ptr.tolist() == [0, 120, 126, 144, 144]
    assert packed.edge_ptr.dtype == torch.int64
    moved = replace(packed).to(dtype=torch.float64)  # without the edges, then with them
    assert torch.equal(moved.edges, packed.edges)
    assert packed.to(dtype=torch.float64).edge_lengths == packed.edge_lengths
    empty = packed[2:2]
    assert empty.edges.shape == (0, 2)
    assert empty.edge_lengths == ()


def test_known_edges_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of meshes whose edges are known finds none again."""
    each = [replace(o) for o in tiny_operators()[:3]]
    expected = collate(each)
    for o in each:
        o.edges  # noqa: B018, found before
    packed = collate(each)
    monkeypatch.setattr(edges, "mesh_edges", None)
    assert torch.equal(packed.edges, torch.cat([o.edges + first for o, first in zip(each, (0, 42, 46), strict=True)]))
    assert packed.edge_lengths == (120, 6, 18)
    monkeypatch.undo()
    assert torch.equal(packed.edges, expected.edges)


def test_clouds_have_no_edges_of_faces() -> None:
    cloud = tiny_operators()[3]
    for points in (cloud, collate([cloud, cloud])):
        for read in (lambda o: o.edges, lambda o: o.edge_lengths, lambda o: o.edge_ptr):
            refused(ValueError, r"point clouds have no faces .* write \.edge_index\(\)", read, points)


@pytest.mark.parametrize("shuffled", [False, True], ids=["tidy", "shuffled"])
def test_edge_index_of_a_mesh(shuffled: bool) -> None:
    """Both directions of the edges of the faces, also if the patterns store their rows in another order."""
    verts, faces = arrays(trimesh.creation.icosphere(2))
    if shuffled:
        order = np.random.default_rng(0).permutation(len(verts))
        verts, faces = verts[order], np.argsort(order)[faces]
    operators = precompute((verts, faces), k=2)
    if shuffled:
        stored = operators.gradient.with_row_order(torch.from_numpy(order))  # as precompute does for large meshes
        operators = replace(operators, gradient=stored)
    edges = mesh_edges(faces)
    both = np.concatenate([edges, edges[:, ::-1]])
    expected = both[np.lexsort(both.T[::-1])].T
    found = operators.edge_index()
    assert found.dtype == torch.int64
    np.testing.assert_array_equal(found, expected)
    looped = operators.edge_index(self_loops=True)
    loops = looped[0] == looped[1]
    assert torch.equal(looped[:, ~loops], found)
    assert torch.equal(looped[0, loops], torch.arange(len(verts)))


def test_edge_index_of_clouds(packed: Operators) -> None:
    *_, cloud = tiny_operators()
    found = cloud.edge_index()
    keys = found[0] * 30 + found[1]
    assert torch.equal(keys, keys.unique())  # sorted, none twice
    assert torch.equal((found[1] * 30 + found[0]).sort().values, keys)  # both directions
    joined = matrix(cloud.gradient, 0).toarray() != 0
    np.fill_diagonal(joined, False)
    assert (joined | joined.T)[tuple(found.numpy())].all()
    assert len(set(found[0].tolist())) == 30
    # In a batch, each mesh has its own edges.
    offsets = packed.ptr.tolist()
    expected = torch.cat([o.edge_index() + offsets[b] for b, o in enumerate(tiny_operators())], dim=1)
    assert torch.equal(packed.edge_index(), expected)
    assert packed[2:2].edge_index(self_loops=True).shape == (2, 0)


# ---- normals and boundaries ----


def test_boundaries() -> None:
    verts, faces = arrays(trimesh.creation.icosphere(2))
    assert not precompute((verts, faces), k=2).boundary.any()
    hole = precompute((verts, faces[faces.min(1) > 0]), k=10)  # without the faces around vertex 0
    around = np.unique(faces[(faces == 0).any(1)])
    assert hole.boundary.nonzero()[:, 0].tolist() == sorted(set(around.tolist()) - {0})
    assert boundary_vertices(torch.from_numpy(moebius(12)[1]), 24).all()
    assert not collate([hole, tiny_operators()[3]]).boundary[-30:].any()
    assert collate([tiny_operators()[0], hole]).boundary[42:].equal(hole.boundary)
    verts, faces = soup(arrays(trimesh.creation.icosphere(1)))  # joined vertices count once
    assert boundary_vertices(torch.from_numpy(faces), len(verts)).all()
    operators = precompute((verts, faces), k=2)
    assert operators.joined is not None
    assert not operators.boundary.any()


def test_faces_that_have_no_boundary() -> None:
    for wrong, error, words in (
        ([[0, 1, 2]], TypeError, "faces should be a tensor, got list"),
        (torch.zeros(1, 3), TypeError, "faces should be integers, got torch.float32"),
        (torch.zeros(1, 4, dtype=torch.int64), ValueError, r"\(F, 3\), shape is \(1, 4\)"),
    ):
        refused(error, words, boundary_vertices, wrong, 3)
    assert boundary_vertices(torch.zeros(0, 3, dtype=torch.int64), 0).shape == (0,)
    folded = torch.tensor([[0, 0, 1], [2, 3, 4]], dtype=torch.int32)  # the first face has a repeated corner
    assert boundary_vertices(folded, 6).tolist() == [False, False, True, True, True, False]


# ---- functions of operators ----


def test_functions_of_operators(packed: Operators) -> None:
    o = packed
    torch.manual_seed(0)
    x, time = torch.randn(o.num_vertices, 3), torch.rand(3)
    coefficients = ops.to_spectral(x, o.evecs, o.mass, o.ptr)
    assert torch.equal(diffnet.to_spectral(x, o), coefficients)
    assert torch.equal(diffnet.from_spectral(coefficients, o), ops.from_spectral(coefficients, o.evecs, o.ptr))
    spread = ops.from_spectral(ops.diffuse(coefficients, o.evals, time), o.evecs, o.ptr)
    assert torch.equal(diffnet.diffuse(x, o, time), spread)
    same = ops.diffuse(coefficients[:, :, :1].expand(-1, -1, 3), o.evals, time)
    torch.testing.assert_close(diffnet.diffuse(x[:, 0], o, time), ops.from_spectral(same, o.evecs, o.ptr).mT)
    torch.testing.assert_close(diffnet.diffuse(x[:, 0], o, time[0]), spread[:, 0])
    with pytest.raises(ValueError, match=r"time should have shape \(T,\)"):
        diffnet.diffuse(x[:, 0], o, time[None])
    assert torch.equal(diffnet.gradient(x, o), o.gradient @ x)
    assert torch.equal(diffnet.mesh_mean(x, o), ops.segment_mean(x, o.mass, o.ptr))


def test_gradients_of_functions_of_operators() -> None:
    o = collate(tiny_operators()[1:3]).to(torch.float64)
    x, time = torch.randn(12, 2, dtype=torch.float64).requires_grad_(), torch.rand(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, t: diffnet.diffuse(x, o, t), (x, time.requires_grad_()))
    assert torch.autograd.gradcheck(lambda x: diffnet.gradient(x, o), (x,))
    assert torch.autograd.gradcheck(lambda x: diffnet.mesh_mean(x, o), (x,))


def test_what_programs_around_a_network_need() -> None:
    """Times of each mesh, rows of each mesh, padding with a mask, and the divergence, with their gradients."""
    each = [o.to(torch.float64) for o in tiny_operators()[1:3]]
    o, lengths = collate(each), [4, 8]
    x, time = torch.randn(12, 2, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    alone = [diffnet.diffuse(part, mesh, t) for part, mesh, t in zip(o.unpack(x), each, time, strict=True)]
    torch.testing.assert_close(diffnet.diffuse(x, o, time), torch.cat(alone))
    refused(ValueError, "time should be finite and at least 0, got -1", diffnet.diffuse, x, o, time - time - 1)
    assert torch.equal(geometry.spread(time, o), time[[0] * 4 + [1] * 8])
    padded, mask = geometry.to_padded(x, o)
    assert mask.sum(1).tolist() == lengths
    assert torch.equal(padded[mask], x)
    assert not padded[~mask].any()
    assert torch.equal(geometry.from_padded(padded, o), x)
    refused(ValueError, r"rows should have shape \(2, …\), got \(3,\)", geometry.spread, torch.zeros(3), o)
    refused(ValueError, r"padded should have shape \(2, 8 or more, …\)", geometry.from_padded, padded[:, :7], o)
    tangents = torch.randn(2, 12, 2, dtype=torch.float64)
    inner = (o.mass[:, None] * x * geometry.divergence(tangents, o)).sum()
    torch.testing.assert_close(inner, -(o.mass[:, None] * diffnet.gradient(x, o) * tangents).sum())
    for function, argument in (
        (lambda t: diffnet.diffuse(x, o, t), time),
        (lambda rows: geometry.spread(rows, o), time),
        (lambda x: geometry.from_padded(geometry.to_padded(x, o)[0].square(), o), x),
        (lambda v: geometry.divergence(v, o), tangents),
    ):
        assert torch.autograd.gradcheck(function, argument.clone().requires_grad_(), fast_mode=True)


def test_functions_of_wrong_arguments() -> None:
    x, none = torch.zeros(4, 1), precompute(TETRAHEDRON, k=0)
    for name, call in (
        ("to_spectral", lambda o: diffnet.to_spectral(x, o)),
        ("from_spectral", lambda o: diffnet.from_spectral(x[None], o)),
        ("diffuse", lambda o: diffnet.diffuse(x, o, torch.zeros(1))),
    ):
        refused(ValueError, f"{name} needs eigenpairs, but the operators have k = 0", call, none)
        refused(TypeError, "operators should be Operators, got Tensor", call, x)
    for function in (diffnet.gradient, diffnet.mesh_mean):
        refused(TypeError, "operators should be Operators, got list", function, x, [none])
        assert function(x, none).isfinite().all()
        for wrong in (torch.zeros(3, 1), torch.zeros(4)):
            refused(ValueError, rf"x should have shape \(4, C\), shape is \({len(wrong)},", function, wrong, none)


# ---- products ----


@pytest.mark.parametrize("ordered", [False, True], ids=["own-order", "reordered"])
def test_products_with_vectors(ordered: bool) -> None:
    pattern = Pattern.from_row_lengths(torch.tensor([2, 0, 1]), torch.tensor([0, 3, 1]), 4)
    values = torch.randn(2, 3, dtype=torch.float64)
    dense = torch.zeros(2, 3, 4, dtype=torch.float64)
    dense[:, pattern.row_indices, pattern.column_indices] = values
    several = SparseMatrix(pattern, values)
    several = several.with_row_order(torch.tensor([2, 0, 1])) if ordered else several
    single = SparseMatrix(several.pattern, several.values[0])
    assert several.shape == (2, 3, 4)
    assert single.mT.shape == (4, 3)
    x, rows = torch.randn(4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(several @ x, dense @ x)
    torch.testing.assert_close(single @ x, dense[0] @ x)
    torch.testing.assert_close(single @ x[:, None], dense[0] @ x[:, None])
    torch.testing.assert_close(single.mT @ rows, dense[0].mT @ rows)
    torch.testing.assert_close(single.mT @ rows[:, None], dense[0].mT @ rows[:, None])

    def product(x: Tensor, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        matrix = SparseMatrix(single.pattern, values)
        return matrix @ x, matrix.mT @ rows

    leaves = [t.clone().requires_grad_() for t in (x, rows, single.values)]
    assert torch.autograd.gradcheck(product, leaves)
    with pytest.raises(ValueError, match="dense factor"):
        single @ rows


# ---- the stored order of rows ----


def test_stored_rows_cannot_be_mistaken() -> None:
    ring = one_ring(np.array([[0, 1, 2], [2, 1, 3]]), 4)
    plain = SparseMatrix.from_scipy(ring).pattern
    assert plain.indptr is plain.stored_indptr
    assert plain.indices is plain.stored_indices is plain.column_indices
    stored, entries = plain.with_row_order(torch.tensor([3, 1, 0, 2]))
    for name in ("indptr", "indices"):
        refused(ValueError, rf"row_order, so it has no \.{name} .* is \.stored_{name}", getattr, stored, name)
    assert torch.equal(stored.column_indices, plain.indices[entries])
    shuffled = SparseMatrix(stored, torch.rand(stored.nnz))
    assert (shuffled.to_scipy().toarray() == shuffled.to_torch().to_dense().numpy()).all()


@pytest.mark.gpu
def test_on_a_gpu(packed: Operators) -> None:
    there = packed.to("cuda", non_blocking=True)
    assert torch.equal(there.edge_index(self_loops=True).cpu(), packed.edge_index(self_loops=True))
    assert there.edge_ptr.tolist() == packed.edge_ptr.tolist()
    assert torch.equal(there.boundary.cpu(), packed.boundary)
    assert torch.equal(there.normals.cpu(), packed.normals)
    x = torch.randn(packed.num_vertices, 3)
    for here, found in zip(packed.unpack(x), there.unpack(x.cuda()), strict=True):
        assert torch.equal(here, found.cpu())
    torch.testing.assert_close(diffnet.gradient(x.cuda(), there).cpu(), diffnet.gradient(x, packed))
    wide = packed.to("cuda", torch.float64)
    assert wide.evecs.dtype == torch.float64
    found = diffnet.to_spectral(x.cuda().double(), wide).cpu()
    torch.testing.assert_close(found, diffnet.to_spectral(x.double(), packed.to(torch.float64)))


# ---- functional maps: batches of pairs give what each pair gives alone ----


EIGENPAIRS = 12


@pytest.fixture(scope="module")
def pairs() -> tuple[Operators, Operators]:
    """Two pairs of ellipsoids with 42 and 162, and with 162 and 42 vertices."""
    levels = (1, 2)
    a = collate([precompute(ellipsoid(i, level), k=EIGENPAIRS) for i, level in enumerate(levels)])
    return a, collate([precompute(ellipsoid(i, level), k=EIGENPAIRS) for i, level in enumerate(reversed(levels))])


@pytest.fixture
def features(pairs: tuple[Operators, Operators]) -> list[Tensor]:
    return [normalize(torch.randn(side.num_vertices, 7), dim=1).requires_grad_() for side in pairs]


@pytest.mark.parametrize("k", [None, 5])
def test_batches_of_pairs(pairs: tuple[Operators, Operators], features: list[Tensor], k: int | None) -> None:
    """Maps of features and of points, with their gradients."""
    a, b = pairs

    def maps(x: Tensor, y: Tensor, a: Operators, b: Operators) -> list[Tensor]:
        solved = diffnet.functional_map(x, y, a, b, k=k)
        matches = diffnet.point_map(solved, a, b)
        return [
            solved,
            diffnet.functional_map(x, y, a, b, k=k, regularizer="squared_difference", weight=0.1),
            diffnet.soft_functional_map(x, y, a, b, k=k),
            diffnet.functional_map_from_points(matches, a, b, k=k),
            diffnet.zoomout(solved, a, b, step=3),
        ]

    packed = maps(*features, a, b)
    split = [x.split(list(side.lengths)) for x, side in zip(features, pairs, strict=True)]
    alone = [torch.cat(found) for found in zip(*map(maps, *split, a, b), strict=True)]
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for one, other in zip(packed[:3], alone[:3], strict=True):
        for x, y in zip(*(torch.autograd.grad(m.square().sum(), features) for m in (one, other)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3 * y.abs().max().item())


def test_missing_eigenpairs_of_a_batch_change_no_map() -> None:
    """Meshes of other numbers of eigenpairs may be in the batch, and a mesh may have fewer vertices than asked for."""

    def bar(seed: int, k: int) -> Operators:
        ball = trimesh.creation.icosphere(2)
        noise = 0.05 * np.random.default_rng(seed).normal(size=ball.vertices.shape)
        return precompute((ball.vertices * [6, 1, 0.8] + noise, ball.faces), k=k, normalize=True)

    a, b, large = bar(0, 16), bar(1, 16), bar(2, 100)
    first, second = collate([a, large]), collate([b, large])
    c = diffnet.functional_map(wks(a, 60), wks(b, 60), a, b)
    packed = diffnet.functional_map(wks(first, 60), wks(second, 60), first, second)
    torch.testing.assert_close(packed[0, :16, :16], c[0], rtol=1e-3, atol=1e-5)
    assert not packed[0, 16:].any()
    assert not packed[0, :, 16:].any()
    both = torch.zeros(2, 100, 100)
    both[0, :16, :16], both[1] = c[0], torch.eye(100)
    assert torch.equal(second.unpack(diffnet.point_map(both, first, second))[0], diffnet.point_map(c, a, b))
    for start in (6, 16):
        refined = diffnet.zoomout(both[:, :start, :start], first, second)
        alone = diffnet.zoomout(c[:, :start, :start], a, b)
        assert torch.equal(refined[0], torch.nn.functional.pad(alone[0], (0, 84, 0, 84)))
    refused(
        ValueError,
        "k should be from 16, as in c, to 100 eigenvectors, got 120",
        diffnet.zoomout,
        both[:, :16, :16],
        first,
        second,
        k=120,
    )
    few = precompute(trimesh.creation.icosphere(1))  # 42 vertices
    whole, live = (diffnet.functional_map(wks(o, 128), wks(o, 128), o, o)[0] for o in (few, few.truncated(42)))
    torch.testing.assert_close(whole, torch.nn.functional.pad(live, (0, 86, 0, 86)), rtol=0, atol=1e-6)


def test_matches_count_within_a_mesh(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    a, b = pairs
    matches = diffnet.point_map(diffnet.functional_map(*features, a, b), a, b)
    assert [int(m.max()) < n for m, n in zip(b.unpack(matches), a.lengths, strict=True)] == [True, True]


def test_soft_maps_are_those_of_all_pairs(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    a, b = pairs[0][0], pairs[1][0]
    x, y = features[0][: a.num_vertices], features[1][: b.num_vertices]
    expected = b.evecs.mT @ (b.mass[:, None] * (torch.softmax(y @ x.mT / 0.07, 1) @ a.evecs))
    torch.testing.assert_close(diffnet.soft_functional_map(x, y, a, b)[0], expected, rtol=1e-4, atol=1e-5)


def test_autocast_leaves_descriptors_and_means_alone(pairs: tuple[Operators, Operators]) -> None:
    o = pairs[0]
    vectors, x = torch.randn(2, o.num_vertices, 2), torch.randn(o.num_vertices, 2)
    found: list[list[Tensor]] = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            values = [geometry.divergence(vectors, o), geometry.gradient(x, o), geometry.mesh_mean(x, o)]
            found.append([*values, geometry.hks(o), wks(o), wks(o, unit=True), geometry.curvature(o)])
    for plain, under_autocast in zip(*found, strict=True):
        assert torch.equal(plain, under_autocast)


def test_autocast_changes_nothing(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    """Neither maps nor losses, nor their gradients."""
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", enabled=enabled):
            c, of_points = diffnet.functional_map(*features, *pairs), diffnet.soft_functional_map(*features, *pairs)
            matches = diffnet.functional_map_from_points(diffnet.point_map(c, *pairs), *pairs)
            loss = ops.orthogonality_loss(c) + ops.bijectivity_loss(c, c) + ops.coupling_loss(c, of_points)
        results.append([c, of_points, matches, *torch.autograd.grad(loss, features)])
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)


@pytest.mark.parametrize("regularizer", ["resolvent", "squared_difference"])
def test_maps_of_other_numbers_of_eigenpairs(
    pairs: tuple[Operators, Operators], features: list[Tensor], regularizer: Any
) -> None:
    """On both sides, by the first ones of each."""
    (a, b), (x, y) = pairs, features
    few = a.truncated(5)
    there = diffnet.functional_map(x, y, few, b, regularizer=regularizer)
    back = diffnet.functional_map(y, x, b, few, regularizer=regularizer)
    assert (there.shape, back.shape) == ((2, 12, 5), (2, 5, 12))
    spectra = diffnet.to_spectral(x, a)[:, :5], diffnet.to_spectral(y, b)
    torch.testing.assert_close(there, ops.functional_map(*spectra, a.evals[:, :5], b.evals, regularizer=regularizer))
    assert ops.bijectivity_loss(there, back).isfinite()
    assert torch.equal(diffnet.point_map(there, few, b), diffnet.point_map(there, a, b))
    assert diffnet.soft_functional_map(x, y, few, b).shape == (2, 12, 5)


def test_a_turned_and_renumbered_shape_is_matched() -> None:
    """From descriptors alone. ZoomOut finds every vertex, from a map of 10 eigenpairs."""
    mesh = trimesh.creation.icosphere(2)
    verts = mesh.vertices * [1.0, 0.8, 0.6]
    verts = verts * (1 + 0.3 * np.sin(3 * verts.sum(1, keepdims=True)) + 0.1 * verts[:, :1])
    order = np.random.default_rng(0).permutation(len(verts))
    faces = np.argsort(order)[mesh.faces]
    a, b = (precompute(shape, k=40) for shape in ((verts, mesh.faces), (verts[order] @ random_rotation(3), faces)))
    x, y = (wks(side) for side in (a, b))
    c = diffnet.functional_map(x, y, a, b, k=10)
    refined = diffnet.zoomout(c, a, b)
    assert np.array_equal(diffnet.point_map(refined, a, b), order)
    soft = diffnet.soft_functional_map(*(torch.nn.functional.normalize(s, dim=1) for s in (x, y)), a, b)
    hits = [(diffnet.point_map(soft, a, b, orthogonal=o).numpy() == order).mean() for o in (False, True)]
    assert hits[0] < 0.2 < 0.9 < hits[1]  # maps of soft maps are weak
    truth = diffnet.functional_map_from_points(torch.from_numpy(order), a, b)
    torch.testing.assert_close(refined, truth)
    torch.testing.assert_close(truth[0].abs(), torch.eye(40), rtol=0, atol=1e-2)


def test_refusals(pairs: tuple[Operators, Operators], features: list[Tensor]) -> None:
    (a, b), (x, y) = pairs, features
    matches = torch.full((b.num_vertices,), 42)
    c = diffnet.functional_map(x, y, a, b)
    refused(ValueError, "the batches have 2 and 1 meshes", diffnet.functional_map, *features, a, b[0])
    refused(ValueError, "k should be at most 12", diffnet.soft_functional_map, *features, a, b, k=13)
    refused(ValueError, r"x_b should have 204 rows, shape is \(3, 7\)", diffnet.soft_functional_map, x, y[:3], a, b)
    refused(ValueError, r"c should have shape \(2, K_b, K_a\), shape is \(12, 12\)", diffnet.point_map, c[0], a, b)
    refused(TypeError, "operators should be Operators, got Tensor", diffnet.functional_map, x, a, y, b)
    with pytest.raises(ValueError, match="functional_map needs eigenpairs"):
        diffnet.functional_map(*features, precompute(ellipsoid(0), k=0), b)
    refused(IndexError, "matches should be from 0 to 41", diffnet.functional_map_from_points, matches, a, b)
