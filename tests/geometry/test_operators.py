"""Batches of operators: packing, splitting, moving."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from operator_checks import matrix, relative, tiny_operators
from shapes import TETRAHEDRON

from diffnet.geometry import (
    Operators,
    collate,
    mesh_edges,
    precompute,
)
from diffnet.ops import SparseMatrix

pytestmark = pytest.mark.usefixtures("one_thread")


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
        elif field.name == "_lengths":  # a cache that either may lack
            assert a.lengths == b.lengths
        else:
            assert x is y is None, field.name


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
    (part,) = operators.split()
    assert_same(part, operators)


def test_gradient_evecs_are_dropped_unless_all_have_them() -> None:
    a, b, *_ = tiny_operators()
    assert collate([a.with_gradient_evecs(), b]).gradient_evecs is None
    assert a.gradient_evecs is None  # the original doesn't change


def test_operators_that_cannot_be_packed() -> None:
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


def test_edges_of_a_batch() -> None:
    each = tiny_operators()
    packed = collate(each)
    offsets = packed.ptr.tolist()
    expected = np.concatenate([mesh_edges(o.faces.numpy()) + offsets[b] for b, o in enumerate(each)])
    assert packed.edges.dtype == torch.int64
    np.testing.assert_array_equal(packed.edges, expected)
