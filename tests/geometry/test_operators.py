"""Batches of operators: packing, splitting, moving."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from operator_checks import assert_same, matrix, relative, tiny_operators
from shapes import TETRAHEDRON

from diffnet.geometry import Operators, collate, precompute, transfer, with_k_ring

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


def test_a_batch_of_one_mesh() -> None:
    (operators, *_) = tiny_operators()
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
    with pytest.raises(ValueError, match=r"different k .*10, 5"):
        collate([a, precompute(TETRAHEDRON, k=5)])
    with pytest.raises(ValueError, match=r"different dtype .*float32.*float64"):
        collate([a, b.to(dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"different device .*cpu.*meta"):
        collate([a, b.to("meta")])
    with pytest.raises(ValueError, match="empty"):
        collate([])


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


def test_neighborhoods_move_along() -> None:
    packed = collate([with_k_ring(o, 2) for o in tiny_operators()])
    for part, expected in zip(packed, tiny_operators(), strict=True):
        assert_same(part, with_k_ring(expected, 2))


def test_wrong_indices_are_refused() -> None:
    packed = collate(tiny_operators())
    for number in (4, -5):
        with pytest.raises(IndexError, match=f"4 meshes, there is no mesh {number}"):
            packed[number]
    for index in (1.0, "0", True, None, (0, 1)):
        with pytest.raises(TypeError, match="the number of a mesh should be an integer, got"):
            packed[index]  # type: ignore[index]


def test_representation() -> None:
    packed = collate(tiny_operators())
    assert repr(packed) == "Operators(meshes=4, vertices=84, faces=96, k=10, dtype=torch.float32, device=cpu)"
    assert "device=meta" in repr(packed.to("meta"))


def test_cpu_cuda_and_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = collate(tiny_operators())
    packed.edges  # noqa: B018, found before, so that it moves along
    assert packed.cpu() is packed
    devices = []
    monkeypatch.setattr(Operators, "to", lambda self, device, non_blocking: devices.append(device))
    packed.cuda()
    packed.cuda(1)
    packed.cuda("cuda:2")
    packed.cuda(torch.device("cuda", 3))
    assert [str(d) for d in devices] == ["cuda", "cuda:1", "cuda:2", "cuda:3"]
    monkeypatch.setattr(transfer, "empty_pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    pinned = packed.pin_memory()
    assert_same(pinned, packed)
    assert torch.equal(pinned.edges, packed.edges)
    tensors = ("ptr", "mass", "evals", "evecs", "frames", "faces", "face_ptr", "edges")
    assert all(getattr(pinned, name).data_ptr() != getattr(packed, name).data_ptr() for name in tensors)


def test_meta_operators_say_what_they_cannot_do() -> None:
    meta = collate(tiny_operators()).to("meta")
    assert len(meta) == 4
    with pytest.raises(ValueError, match="meta device hold no extents; split them before"):
        meta[0]
    with pytest.raises(ValueError, match="meta device hold no faces"):
        meta.edges  # noqa: B018
    with pytest.raises(ValueError, match=r"read \.lengths before"):
        replace(meta).lengths  # noqa: B018, the copy doesn't know them
