"""Spectral descriptors, against their formulas in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import relative, tiny_operators
from refusals import refused
from shapes import TETRAHEDRON, arrays, soup

from diffnet import geometry
from diffnet.geometry import collate, hks, precompute, wks

pytestmark = pytest.mark.usefixtures("one_thread")


def test_hks_of_eigenpairs() -> None:
    (operators, *_) = tiny_operators()
    scales = torch.tensor([0.1, 0.5, 2.0])
    decay = np.exp(-np.outer(operators.evals[0].double(), scales.double()))
    assert relative(hks(operators, scales=scales), operators.evecs.double().numpy() ** 2 @ decay) < 1e-6
    default = hks(operators, scales=torch.tensor([10 ** (-2 + 2 * i / 7) for i in range(8)]))
    assert relative(hks(operators, 8), default) < 1e-6
    assert hks(operators).shape == (42, 16)


def test_wks_of_eigenpairs() -> None:
    (operators, *_) = tiny_operators()
    log = np.log(operators.evals[0, 1:].double().numpy())
    sigma = (log[-1] - log[0]) * 7 / 128
    energies = np.linspace(log[0] + 2 * sigma, log[-1] - 2 * sigma, 5)
    weights = np.exp(-((energies - log[:, None]) ** 2) / (2 * sigma**2))
    expected = operators.evecs[:, 1:].double().numpy() ** 2 @ (weights / weights.sum(0))
    assert relative(wks(operators, 5), expected) < 1e-4


def test_descriptors_of_a_batch_are_those_of_its_meshes() -> None:
    each = tiny_operators()
    packed = collate(each)
    for descriptor in (hks, wks):
        expected = torch.cat([descriptor(o) for o in each])
        assert expected.isfinite().all()
        torch.testing.assert_close(descriptor(packed), expected)
        assert descriptor(packed.to(dtype=torch.float64)).dtype == torch.float64


def test_missing_pairs_add_nothing_to_descriptors() -> None:
    all_pairs, padded = precompute(TETRAHEDRON, k=4), precompute(TETRAHEDRON, k=9)
    for descriptor in (hks, wks):
        torch.testing.assert_close(descriptor(padded), descriptor(all_pairs))
        assert (descriptor(padded) >= 0).all()


def test_wks_does_not_depend_on_the_scale(sphere: trimesh.Trimesh) -> None:
    verts, faces = arrays(sphere)
    verts = verts * [1, 0.8, 0.6]
    many = collate([precompute((scale * verts, faces), k=20) for scale in (1, 5)])
    squares = wks(many, 128, unit=True).square()
    torch.testing.assert_close(geometry.mesh_mean(squares, many), torch.ones(2, 128))
    small = wks(precompute((verts, faces), k=20))
    large = wks(precompute((100 * verts, faces), k=20))
    assert relative(large * 1e4, small) < 1e-3  # φ² scales as 1/area


def test_descriptors_without_eigenpairs(sphere: trimesh.Trimesh) -> None:
    many = precompute(soup((sphere.vertices, sphere.faces[:9])), k=5, join="never")
    operators, none = precompute(sphere, k=1), precompute(sphere, k=0)
    for descriptor in (hks, wks):
        assert descriptor(operators).shape == (642, 16)
        assert descriptor(operators).isfinite().all()
        refused(ValueError, r"needs eigenpairs, .* k = 0; write precompute\(mesh, k=128\)", descriptor, none)
    assert (wks(many) == 0).all()  # all eigenvectors are null vectors
    assert hks(many).isfinite().all()


def test_wrong_arguments_are_refused() -> None:
    operators, *_ = tiny_operators()
    for descriptor in (hks, wks):
        for count in (0, -3):
            refused(ValueError, f"count should be at least 1, got {count}", descriptor, operators, count)
        for count in (16.0, True):
            refused(TypeError, f"count should be an integer, got {count}", descriptor, operators, count)
        with pytest.raises(TypeError, match=r"operators should be Operators, got Trimesh; write precompute\(mesh\)"):
            descriptor(trimesh.creation.box())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scales should be a tensor, got list; convert it with torch\.tensor"):
        hks(operators, scales=[0.1, 0.2])  # type: ignore[arg-type]
    refused(ValueError, r"scales should have shape \(T,\), shape is \(1, 2\)", hks, operators, scales=torch.ones(1, 2))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"scales should be finite and at least 0, got {wrong} at index \[1\]"):
            hks(operators, scales=torch.tensor([1.0, wrong]))


@pytest.mark.parametrize(("k", "scale"), [(4, 0.01), (128, 0.1), (128, 20), (4, 1000)])
@pytest.mark.filterwarnings("error")
def test_hks_warns_once_of_size(sphere: trimesh.Trimesh, monkeypatch: pytest.MonkeyPatch, k: int, scale: float) -> None:
    # The warning is issued once in a process, so earlier tests must not count.
    monkeypatch.setattr("diffnet.geometry.descriptors._warned_of_size", [])
    verts, faces = arrays(sphere)
    unit, other = (precompute(size * verts, faces, k=k) for size in (1, scale))
    hks(unit)
    hks(precompute(scale * verts, faces, k=k, normalize=True))
    hks(other, scales=torch.ones(1))
    expected = "long for the mesh" if scale < 1 else "short for mesh 1 of the batch"
    operators = other if scale < 1 else collate([unit, other])
    with pytest.warns(UserWarning, match=rf"too {expected}.* Its area is .*normalize=True") as found:
        values, _ = hks(operators), hks(operators)
    assert [w.filename for w in found] == [__file__]
    rows = values[-len(verts) :]  # most channels are the same, or most vertices have the same value
    spread = rows[:, :8].std(1) if scale > 1 else rows[:, 8:].std(0)
    assert (spread < 0.1 * rows.mean()).all()
