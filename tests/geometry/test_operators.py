"""Batches of operators: packing, splitting, moving; samples as batches; operators as trees of tensors and in files."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import trimesh
from lightning_utilities.core.apply_func import apply_to_collection
from operator_checks import assert_same, matrix, relative, tiny_operators
from refusals import refused
from shapes import TETRAHEDRON
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from diffnet.data import MeshBatches
from diffnet.geometry import Operators, PerMesh, Rows, collate, from_spectral, precompute, to_spectral, with_k_ring
from diffnet.geometry.store import transfer
from diffnet.ops import SparseMatrix, spmm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("with_gradient", [False, True], ids=["plain", "with-gradient-evecs"])
def test_split_undoes_collate(with_gradient: bool) -> None:
    each = [o.with_gradient_evecs() if with_gradient else o for o in tiny_operators()]
    packed = collate(each)
    assert len(packed) == 4
    assert packed.num_vertices == sum(o.num_vertices for o in each)
    assert packed.lengths == (42, 4, 8, 30)
    assert packed.ptr.tolist() == [0, 42, 46, 54, 84]
    assert packed.face_ptr.tolist() == [0, 80, 84, 96, 96]
    assert (packed.gradient_evecs is not None) == with_gradient
    parts = packed.split()
    assert len(parts) == 4
    for part, original in zip(parts, each, strict=True):
        assert_same(part, original)
    assert_same(collate(parts), packed)
    nested = collate([collate(each[:2]), collate(each[2:])])  # a batch of two batches
    assert_same(nested, packed)
    (operators, *_) = each  # a batch of one mesh
    assert len(operators) == 1
    assert_same(collate([operators]), operators)
    for (part,) in (operators.split(), operators):
        assert_same(part, operators)


def test_gradient_evecs_are_dropped_unless_all_have_them() -> None:
    a, b, *_ = tiny_operators()
    assert collate([a.with_gradient_evecs(), b]).gradient_evecs is None
    assert a.gradient_evecs is None  # the original doesn't change


def test_operators_that_cannot_be_packed() -> None:
    a, b, *_ = tiny_operators()
    refused(ValueError, r"different k .*0, 10", collate, [a, precompute(TETRAHEDRON, k=0)])
    refused(ValueError, r"different dtype .*float32.*float64", collate, [a, b.to(dtype=torch.float64)])
    refused(ValueError, r"different device .*cpu.*meta", collate, [a, b.to("meta")])
    refused(ValueError, "empty", collate, [])


@pytest.mark.parametrize("on_basis", [False, True], ids=["plain", "with-gradient-evecs"])
def test_other_numbers_of_eigenpairs(on_basis: bool) -> None:
    """The first pairs, and batches that are padded as a mesh with fewer vertices than pairs is."""
    a, b, *_ = [o.with_gradient_evecs() if on_basis else o for o in tiny_operators()]
    few, k = a.truncated(4), a.k
    for name in ("evals", "evecs", "gradient_evecs")[: 2 + on_basis]:
        assert torch.equal(getattr(few, name), getattr(a, name)[..., :4])
    assert few.laplacian is a.laplacian
    padded, other = collate([few, b]).split()
    assert_same(other, b)
    assert torch.equal(padded.evals, few.evals[:, [0, 1, 2, *[3] * (k - 3)]])
    assert torch.equal(padded.evecs, torch.nn.functional.pad(few.evecs, (0, k - 4)))
    assert_same(padded.truncated(4), few)
    assert a.truncated(k) is a
    refused(ValueError, f"k should be at most {k}, the number of eigenpairs, got {k + 1}", a.truncated, k + 1)
    refused(ValueError, "k should be at least 1, got 0", a.truncated, 0)


def test_bases_of_any_functions() -> None:
    """A hybrid basis: eigenvectors and the positions, which it then holds exactly."""
    balls = [trimesh.creation.icosphere(n).apply_scale([1, 0.8, 0.6]) for n in (2, 1)]
    a, b = (precompute(ball, k=8).with_gradient_evecs() for ball in balls)
    batch, verts = collate([a, b]), torch.cat([torch.as_tensor(ball.vertices).float() for ball in balls])
    spanned = batch.with_span(torch.cat([100 * batch.evecs, verts], 1))
    assert spanned.k == 11
    assert_same(spanned[0], a.with_span(torch.cat([100 * a.evecs, verts[:162]], 1)))
    torch.testing.assert_close(from_spectral(to_spectral(verts, spanned), spanned), verts, atol=1e-4, rtol=1e-4)
    one, evecs = spanned[1], spanned[1].evecs
    torch.testing.assert_close(to_spectral(evecs, one)[0], torch.eye(11), atol=1e-4, rtol=0)
    images = spmm(one.laplacian.pattern, one.laplacian.values, evecs)
    torch.testing.assert_close(evecs.T @ images, one.evals[0].diag(), atol=1e-3, rtol=1e-4)
    assert_same(one, replace(one, gradient_evecs=None).with_gradient_evecs())
    same = batch.with_span(batch.evecs @ torch.randn(8, 8))
    torch.testing.assert_close(same.evals, batch.evals, atol=1e-3, rtol=1e-3)
    twice = torch.cat([verts[:, :2], verts[:, :2].sum(1, keepdim=True)], 1)
    refused(ValueError, "linearly independent on each mesh, those on mesh 0 are not", batch.with_span, twice)


def test_other_libraries_convert_operators_and_look_for_a_batch_size() -> None:
    """Lightning asks whether a batch is `Iterable`, and sets the fields of copies of dataclasses."""
    batch = collate(tiny_operators())
    _ = batch.gradient.pattern.transpose
    for operators in (batch, batch[0]):
        assert not isinstance(operators, Iterable)
        for each, expected in zip(operators, operators.split(), strict=True):
            assert_same(each, expected)
        wide = apply_to_collection(operators, Tensor, lambda x: x.double() if x.is_floating_point() else x)
        assert type(wide) is Operators
        assert_same(wide, operators.to(torch.float64))
        # What the pattern remembers stays with unchanged indices, and goes with others.
        assert wide.gradient.pattern._transpose is operators.gradient.pattern._transpose
        with pytest.raises(FrozenInstanceError):
            wide.mass = operators.mass
    moved = apply_to_collection(batch, Tensor, lambda x: x.to("meta"))
    assert moved.gradient.pattern._transpose is None
    assert moved.laplacian.pattern.device.type == "meta"
    assert_same(copy.deepcopy(batch), batch)
    assert copy.deepcopy(batch).mass is not batch.mass


def test_gradient_on_the_basis() -> None:
    operators = collate(tiny_operators())
    with_gradient = operators.with_gradient_evecs()
    expected = np.stack([matrix(operators.gradient, i) @ operators.evecs.double().numpy() for i in range(2)])
    assert relative(with_gradient.gradient_evecs, expected) < 1e-5
    assert with_gradient.with_gradient_evecs() is with_gradient


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
    assert_same(operators.to(torch.float64), wide)
    assert operators.to(torch.float32) is operators
    both = operators.to("meta", torch.float64)
    assert (both.device.type, both.mass.dtype) == ("meta", torch.float64)
    single = operators.laplacian.to(torch.float64)
    assert (single.values.dtype, single.pattern.column_indices.dtype) == (torch.float64, torch.int32)
    refused(TypeError, r"floating point, got torch\.int64", operators.to, torch.int64)
    for wrong in (operators, operators.laplacian):
        refused(TypeError, r"one dtype, got torch\.float16 and torch\.float64", wrong.to, torch.float16, torch.float64)
    assert operators.to("meta").device.type == "meta"
    assert operators.device.type == "cpu"


def test_indices_and_slices() -> None:
    each = tiny_operators()
    packed = collate(each).with_gradient_evecs()
    alone = packed.split()
    for i in (0, 1, 3, -1, -4, np.int64(2)):
        assert_same(packed[i], alone[i])
    for part, expected in zip(packed, alone, strict=True):
        assert_same(part, expected)
    for s in (slice(0, 2), slice(1, None), slice(-3, -1), slice(None, None, 2), slice(None, None, -1)):
        assert_same(packed[s], collate(alone[s]))
    assert packed[:] is packed
    assert each[0][0] is each[0]
    empty = packed[2:2]
    assert len(empty) == empty.num_vertices == len(empty.faces) == 0
    assert empty.ptr.tolist() == [0]
    assert empty.k == 10
    rings = [with_k_ring(o, 2) for o in each]  # neighborhoods move along
    for part, expected in zip(collate(rings), rings, strict=True):
        assert_same(part, expected)
    for number in (4, -5):
        with pytest.raises(IndexError, match=f"4 meshes, there is no mesh {number}"):
            packed[number]
    for index in (1.0, "0", True, None, (0, 1)):
        with pytest.raises(TypeError, match="the number of a mesh should be an integer, got"):
            packed[index]  # type: ignore[index]


def test_representation_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = collate(tiny_operators())
    assert repr(packed) == "Operators(meshes=4, vertices=84, faces=96, k=10, dtype=torch.float32, device=cpu)"
    assert "device=meta" in repr(packed.to("meta"))
    assert packed.cpu() is packed
    devices = []
    monkeypatch.setattr(Operators, "to", lambda self, device, non_blocking: devices.append(device))
    for device in ((), (1,), ("cuda:2",), (torch.device("cuda", 3),)):
        packed.cuda(*device)
    assert [str(d) for d in devices] == ["cuda", "cuda:1", "cuda:2", "cuda:3"]


def test_meta_operators_say_what_they_cannot_do() -> None:
    meta = collate(tiny_operators()).to("meta")
    assert len(meta) == 4
    with pytest.raises(ValueError, match="meta device hold no extents; split them before"):
        meta[0]
    with pytest.raises(ValueError, match="meta device hold no faces"):
        meta.edges  # noqa: B018
    with pytest.raises(ValueError, match=r"read \.lengths before"):
        replace(meta).lengths  # noqa: B018, the copy doesn't know them


# ---- samples of tensors, labels and operators as one batch ----


class Pair(NamedTuple):
    features: Tensor
    operators: Operators


def features(operators: Operators, channels: int = 3) -> Tensor:
    return torch.arange(float(operators.num_vertices * channels)).reshape(-1, channels)


def test_tuples_of_tensors_and_labels() -> None:
    each = tiny_operators()
    x, o, labels, share = collate([(features(m), m, i, i / 2) for i, m in enumerate(each)])
    assert torch.equal(x, torch.cat([features(m) for m in each]))
    assert o.lengths == (42, 4, 8, 30)
    assert torch.equal(labels, torch.arange(4))
    assert torch.equal(share, torch.tensor([0, 0.5, 1, 1.5]))
    *_, single = collate([(features(each[0]), each[0], 7)])
    assert torch.equal(single, torch.tensor([7]))


def test_rows_decide_how_tensors_are_packed() -> None:
    each = tiny_operators()[:3]
    samples = [
        {
            "operators": m,
            "labels": torch.full((m.num_vertices,), i),
            "of faces": torch.full((len(m.faces), 2), i),
            "of edges": np.full(len(m.edges), i),
            "of mesh": torch.full((2,), i),
            "matrix": np.full((3, 3), float(i)),
            "number": torch.tensor(i),
            "numpy": np.float64(i),
            "flag": i > 0,
        }
        for i, m in enumerate(each)
    ]
    for count in (1, 3):
        batch = collate(samples[:count])
        assert list(batch) == list(samples[0])
        for name, lengths in (
            ("labels", batch["operators"].lengths),
            ("of faces", batch["operators"].face_lengths),
            ("of edges", batch["operators"].edge_lengths),
        ):
            parts = batch[name].split(lengths)
            assert all((part == i).all() for i, part in enumerate(parts)), name
        assert batch["of mesh"].tolist() == [[i, i] for i in range(count)]
        assert batch["matrix"].shape == (count, 3, 3)
        assert batch["matrix"].dtype == torch.float64
        for name, dtype in (("number", torch.int64), ("numpy", torch.float64), ("flag", torch.bool)):
            assert batch[name].shape == (count,), name
            assert batch[name].dtype == dtype, name


def test_the_meaning_of_rows_is_declared() -> None:
    """A vector of each mesh, rows of other numbers, and matrices between two resolutions."""
    a, b = (precompute(TETRAHEDRON, k=3) for _ in range(2))
    matrices = [SparseMatrix.from_torch(torch.rand(2, 4).to_sparse_csr()) for _ in range(2)]
    samples = [
        {"mesh": o, "vector": PerMesh(torch.full((4,), i)), "marks": Rows(range(i)), "pool": m}
        for i, (o, m) in enumerate(zip((a, b), matrices, strict=True))
    ]
    batch = collate(samples)
    assert batch["vector"].tolist() == [[0] * 4, [1] * 4]
    assert batch["marks"].lengths == (0, 1)
    assert [part.tolist() for part in batch["marks"].split()] == [[], [0]]
    assert collate([batch["marks"], Rows(torch.ones(2))]).lengths == (0, 1, 2)
    expected = torch.block_diag(*(m.to_torch().to_dense() for m in matrices))
    assert torch.equal(batch["pool"].to_torch().to_dense(), expected)


def test_nested_samples() -> None:
    """Pairs of meshes, as siamese networks take them. A label may stand outside of the part with its operators."""
    a, b, c, d = tiny_operators()
    samples = [
        {"pair": (Pair(features(x), x), [features(y, 2), y]), "labels": torch.zeros(y.num_vertices), "name": name}
        for x, y, name in ((a, b, "one"), (c, d, "two"))
    ]
    batch = collate(samples)
    first, second = batch["pair"]
    assert isinstance(first, Pair)
    assert isinstance(second, list)
    assert first.operators.lengths == (42, 8)
    assert first.features.shape == (50, 3)
    assert second[0].shape == (34, 2)
    assert batch["labels"].shape == (34,)
    assert batch["name"] == ["one", "two"]
    assert collate([(a, None, Path("x")), (b, None, Path("y"))])[1:] == ([None, None], [Path("x"), Path("y")])


def test_tensors_of_packed_operators() -> None:
    """A sample may hold a packed batch."""
    each = tiny_operators()
    x, o = collate([(features(collate(each[:2])), collate(each[:2])), (features(each[2]), each[2])])
    assert x.shape == (54, 3)
    assert o.lengths == (42, 4, 8)
    (again,) = collate([(collate(each),)])
    assert again.lengths == collate(collate(each)).lengths == (42, 4, 8, 30)  # type: ignore[arg-type]


def test_samples_that_cannot_be_packed() -> None:
    a, b, *_ = tiny_operators()
    samples = [(a, torch.zeros(5)), (b, torch.zeros(7))]
    refused(ValueError, r"sample\[1\] .* \[\(5,\), \(7,\)\].*\[\[42, 4\]\]", collate, samples)
    refused(ValueError, r"shapes are \[\(42,\), \(\)\]", collate, [(a, torch.zeros(42)), (b, torch.tensor(0.0))])
    refused(ValueError, "numbers of vertices are ", collate, [(torch.zeros(42),), (torch.zeros(4),)])
    refused(TypeError, r"sample\[1\] should have one type in all samples, got int, str", collate, [(a, 1), (b, "1")])
    refused(TypeError, "sample should have one type in all samples, got Operators, tuple", collate, [a, (b,)])
    refused(TypeError, "sample should have the same length, 2", collate, [(a, 1), (b,)])
    refused(TypeError, r"same keys, \['x'\]", collate, [{"x": a}, {"y": b}])
    refused(TypeError, "one type in all samples, got dict, tuple", collate, [{"x": a}, (b,)])
    refused(TypeError, r"sample\[1\] is of type object", collate, [(a, object()), (b, object())])
    refused(TypeError, r"sample\['x'\]\[1\] should have one type", collate, [{"x": (a, 1)}, {"x": (b, None)}])
    refused(ValueError, "different device", collate, [(a, 1), (a.to("meta"), 1)])


def numbered_samples() -> list[Any]:
    return [{"x": features(o), "mesh": (o, number)} for number, o in enumerate(tiny_operators())]


def test_loaders_with_workers() -> None:
    batches = MeshBatches([o.num_vertices for o in tiny_operators()], max_vertices=50)
    loader = DataLoader(numbered_samples(), batch_sampler=batches, collate_fn=collate, num_workers=1)
    found = list(loader)
    assert [batch["mesh"][1].tolist() for batch in found] == [[0, 1], [2, 3]]
    for batch, part in zip(found, (tiny_operators()[:2], tiny_operators()[2:]), strict=True):
        operators, expected = batch["mesh"][0], collate(part)
        assert torch.equal(batch["x"], torch.cat([features(o) for o in part]))
        assert_same(operators, expected)
        x = torch.randn(operators.num_vertices, 2)
        torch.testing.assert_close(operators.gradient @ x, expected.gradient @ x)


def test_pinned_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader with pin_memory=True does with a batch. Copies stand for pinned memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    monkeypatch.setattr(transfer, "empty_pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x, device=None: x.clone())
    batch = collate(numbered_samples())
    source = batch["mesh"][0]
    source.edges  # noqa: B018, found before, so that it moves along
    pinned = pin_memory(batch)
    assert pinned["x"].data_ptr() != batch["x"].data_ptr()
    operators, labels = pinned["mesh"]
    assert_same(operators, source)
    assert torch.equal(operators.edges, source.edges)
    for name in ("ptr", "mass", "evals", "evecs", "frames", "faces", "face_ptr", "edges"):
        assert getattr(operators, name).data_ptr() != getattr(source, name).data_ptr()
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_loaders_with_pinned_memory() -> None:
    loader = DataLoader(numbered_samples(), batch_size=2, collate_fn=collate, num_workers=1, pin_memory=True)
    for batch in loader:
        operators, labels = batch["mesh"]
        assert batch["x"].is_pinned()
        assert labels.is_pinned()
        assert operators.evecs.is_pinned()
        there = operators.to("cuda", non_blocking=True)
        assert torch.equal(there.evecs.cpu(), operators.evecs)
    moved = [{"x": s["x"].cuda(), "mesh": (s["mesh"][0].cuda(), s["mesh"][1])} for s in numbered_samples()[:2]]
    assert collate(moved)["mesh"][1].is_cuda


# ---- trees of tensors, and files of torch.save ----


@pytest.mark.parametrize("kind", ["mesh", "batch", "all fields", "row order"])
def test_leaves_are_all_tensors(kind: str) -> None:
    mesh, *others = tiny_operators()
    order = torch.arange(mesh.num_vertices - 1, -1, -1)
    operators = {
        "mesh": mesh,
        "batch": collate([mesh, *others]),
        "all fields": with_k_ring(mesh.with_gradient_evecs(), 2),
        "row order": replace(mesh, laplacian=mesh.laplacian.with_row_order(order)),
    }[kind]
    leaves, structure = pytree.tree_flatten(operators)
    assert_same(pytree.tree_unflatten(leaves, structure), operators)
    assert_same(pytree.tree_map_only(torch.Tensor, torch.clone, operators), operators)
    shapes = pytree.tree_map_only(torch.Tensor, lambda x: x.shape, operators)  # no tensors
    assert shapes.mass == operators.mass.shape
    if kind != "all fields":  # other meshes have another structure only if they have other fields
        assert structure == pytree.tree_structure(precompute(trimesh.creation.box(), k=2))
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(operators)[0]]
    assert {".mass", ".laplacian['values']", ".gradient['indptr']"} <= set(paths)


def test_edges_stay_known() -> None:
    mesh = tiny_operators()[0]
    assert torch.equal(pytree.tree_map(lambda x: x, mesh).edges, mesh.edges)
    edges = pytree.tree_leaves(mesh)[-1]
    assert torch.equal(edges, mesh.edges)


def test_saved_operators_load_as_weights(tmp_path: Path) -> None:
    batch = collate(tiny_operators()[:3])
    _ = batch.edges
    torch.save({"operators": batch}, tmp_path / "operators.pt")
    loaded = torch.load(tmp_path / "operators.pt", weights_only=True)["operators"]
    assert_same(loaded, batch)
    assert torch.equal(loaded.edges, batch.edges)


def test_without_diffnet_the_error_says_what_to_import(tmp_path: Path) -> None:
    torch.save(tiny_operators()[0], tmp_path / "operators.pt")
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # as in a process that has not imported diffnet
    try:
        with pytest.raises(pickle.UnpicklingError, match=r"diffnet\.geometry\.operators\.Operators"):
            torch.load(tmp_path / "operators.pt", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(known)


def test_original_tuple_and_back() -> None:
    for kind in ("diffnet", "original"):
        operators = precompute(trimesh.creation.icosphere(2), k=12, operators=kind)
        parts = operators.to_reference()
        shapes = [(162, 3, 3), (162,), (162, 162), (12,), (162, 12), (162, 162), (162, 162)]
        assert [tuple(part.shape) for part in parts] == shapes
        assert all(parts[i].layout == torch.sparse_coo and parts[i].is_coalesced() for i in (2, 5, 6))
        assert_same(Operators.from_reference(parts, operators.faces), operators)
    with pytest.raises(ValueError, match=r"holds one mesh, got 2; write \[o\.to_reference\(\) for o in operators\]"):
        collate([operators, operators]).to_reference()
