"""Changes of samples agree with samples of changed meshes; variants keep labels and own arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import trimesh

from diffnet.data import (
    DataError,
    LabeledMesh,
    Preprocessing,
    Sample,
    Variants,
    augmented,
    collate_samples,
    feature_parts,
    input_features,
    make_sample,
    make_variants,
    rotate_vectors,
    vector_channels,
)
from diffnet.geometry import Mesh, make_mesh, mesh_edges, precompute, random_rotations
from diffnet.geometry.errors import OptionError

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = "xyz+normals+curvature+diffused-curvature+hks+log-hks+wks+file:own"


def item(seed: int = 0, at: str = "vertices") -> LabeledMesh:
    """A bumpy ellipsoid. The label of each element is its number, and so is the own array at each vertex."""
    ball = trimesh.creation.icosphere(2)
    verts = np.array(ball.vertices) * np.random.default_rng(seed).uniform(0.5, 1.5, 3)
    verts += 0.1 * np.sin(3 * verts[:, [1, 2, 0]])
    mesh = make_mesh(verts, ball.faces, name=f"ball {seed}", normals=verts)
    count = {"vertices": len(verts), "faces": len(mesh.faces), "edges": len(mesh_edges(mesh.faces)), "meshes": 1}[at]
    return LabeledMesh(mesh.name, mesh, np.arange(count), {"own": np.arange(len(verts)) / 10})


def centers(mesh: Mesh, at: str) -> np.ndarray:
    return {
        "vertices": lambda: mesh.verts,
        "faces": lambda: mesh.verts[mesh.faces].mean(axis=1),
        "edges": lambda: mesh.verts[mesh_edges(mesh.faces)].mean(axis=1),
    }[at]()


def area(mesh: Mesh) -> float:
    a, b, c = (mesh.verts[mesh.faces[:, i]] for i in range(3))
    return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


def sample_of(source: LabeledMesh, features: str) -> Sample:
    """A sample at the positions as they are."""
    operators = precompute(source.mesh, k=10)
    x = input_features(source.mesh, operators, features, arrays=source.arrays)
    return Sample((source.name,), x, torch.as_tensor(source.labels), operators)


def changed(source: LabeledMesh, function: Any, faces: Any = None) -> LabeledMesh:
    mesh = source.mesh
    return replace(source, mesh=make_mesh(function(mesh.verts), mesh.faces if faces is None else faces(mesh.faces)))


@pytest.mark.parametrize("features", [*(part.name for part in feature_parts(ALL)), ALL])
def test_features_of_changed_samples_are_those_of_changed_meshes(features: str) -> None:
    items, factors = [item(0), item(1)], torch.tensor([0.6, 1.4])
    batch = collate_samples([sample_of(each, features) for each in items])
    turns = random_rotations(2, torch.Generator().manual_seed(0))
    expected = {
        "factors": [changed(i, lambda v, s=s: v * float(s)) for i, s in zip(items, factors, strict=True)],
        "mirror": [changed(items[0], lambda v: v * [-1, 1, 1], lambda f: f[:, ::-1]), items[1]],
        "rotations": [changed(i, lambda v, r=r: v @ r.double().numpy()) for i, r in zip(items, turns, strict=True)],
    }
    for name, value in {"factors": factors, "mirror": torch.tensor([True, False]), "rotations": turns}.items():
        found = augmented(batch, features, **{name: value})
        x = torch.cat([sample_of(each, features).features for each in expected[name]])
        torch.testing.assert_close(found.features, x, rtol=2e-3, atol=2e-3)
        assert (found.labels == batch.labels).all()
        changes = (found.features - batch.features).abs().max() > 1e-2
        depends = {"factors": ("xyz", "hks", "log-hks", "wks")}.get(name, ("xyz", "normals"))
        assert changes == any(part.name in depends for part in feature_parts(features))


@pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
def test_vectors_among_targets_turn_mirror_and_scale(at: Any) -> None:
    """Two vectors, of which the second one is a displacement, and a number."""
    items = [item(0, at), item(1, at)]
    targets = [np.hstack([centers(i.mesh, at)] * 2 + [np.ones((len(i.labels), 1))]) for i in items]
    batch = collate_samples([sample_of(replace(i, labels=t), "hks") for i, t in zip(items, targets, strict=True)])
    turns, factors = random_rotations(2, torch.Generator().manual_seed(0)), torch.tensor([0.6, 1.4])
    changes = {"mirror": torch.tensor([True, False]), "rotations": turns, "factors": factors}
    found = augmented(batch, "hks", **changes, labels_at=at, vectors=2, lengths=[3, 4, 5]).labels
    matrices = [np.diag([-1, 1, 1]) @ turns[0].double().numpy(), turns[1].double().numpy()]
    for part, old, matrix, factor in zip(
        found.split([len(t) for t in targets]), targets, matrices, factors, strict=True
    ):
        expected = np.hstack([old[:, :3] @ matrix, float(factor) * old[:, 3:6] @ matrix, old[:, 6:]])
        np.testing.assert_allclose(part, expected, atol=1e-6)


def test_jitter_moves_positions_in_their_units() -> None:
    plain = make_sample(item(), Preprocessing(k=8, features="xyz"))
    both = make_sample(item(), Preprocessing(k=8, features="xyz+normals"))
    noise = 0.01 * torch.randn(len(plain.features), 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(augmented(plain, "xyz", jitter=noise).features, plain.features + noise)
    moved = augmented(both, "xyz+normals", jitter=noise)
    torch.testing.assert_close(moved.features[:, :3], both.features[:, :3] / plain.features * (plain.features + noise))
    assert torch.equal(moved.features[:, 3:], both.features[:, 3:])
    with pytest.raises(ValueError, match="jitter needs features with xyz, got 'normals'"):
        augmented(plain, "normals", jitter=noise)


def test_all_changes_are_made_in_their_order() -> None:
    sample = make_sample(item(), Preprocessing(k=8, features="xyz+normals+hks"))
    noise, mirror = torch.full((162, 3), 0.01), torch.tensor([True])
    turn, factor = random_rotations(1), torch.tensor([2.0])
    found = augmented(sample, "xyz+normals+hks", jitter=noise, mirror=mirror, rotations=turn, factors=factor)
    step = augmented(augmented(sample, "xyz+normals+hks", jitter=noise), "xyz+normals+hks", mirror=mirror)
    turned = rotate_vectors(step.features, vector_channels("xyz+normals"), turn, sample.operators.ptr)
    step = augmented(replace(step, features=turned), "xyz+normals+hks", factors=factor)
    torch.testing.assert_close(found.features, step.features)


@pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
def test_a_cut_keeps_the_labels_of_what_stays(at: Any) -> None:
    whole = item(at=at)
    variants = make_variants(whole, at, Variants(6, cut=0.6), "xyz+file:own")
    shares = []
    for variant in variants:
        assert np.array_equal(centers(variant.mesh, at), centers(whole.mesh, at)[variant.labels])
        own = np.round(10 * np.asarray(variant.arrays["own"]).reshape(-1)).astype(int)
        assert np.array_equal(variant.mesh.verts, whole.mesh.verts[own])
        assert np.array_equal(variant.mesh.normals, whole.mesh.normals[own])
        shares.append(1 - area(variant.mesh) / area(whole.mesh))
        assert np.unique(variant.mesh.faces).tolist() == list(range(len(variant.mesh.verts)))
    assert all(i - 0.1 < 10 * share < i + 1 for i, share in enumerate(shares))  # but for a face
    again = make_variants(whole, at, Variants(6, cut=0.6), "xyz+file:own")
    assert all(np.array_equal(a.mesh.verts, b.mesh.verts) for a, b in zip(variants, again, strict=True))
    assert [v.name for v in variants[:2]] == ["ball 0, variant 1", "ball 0, variant 2"]


@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "meshes"])
def test_decimated_variants_keep_labels_in_their_places(at: Any) -> None:
    whole = item(at=at)
    for variant in make_variants(whole, at, Variants(3, cut=0.3, decimate=0.5), "xyz+file:own"):
        assert len(variant.mesh.faces) < len(whole.mesh.faces)
        assert len(variant.arrays["own"]) == len(variant.mesh.verts)
        if at == "meshes":
            assert variant.labels.tolist() == [0]
            continue
        offsets = np.linalg.norm(centers(whole.mesh, at)[variant.labels] - centers(variant.mesh, at), axis=1)
        edges = variant.mesh.verts[mesh_edges(variant.mesh.faces)]
        assert offsets.max() < np.linalg.norm(edges[:, 0] - edges[:, 1], axis=1).max()
        assert len(variant.labels) == len(centers(variant.mesh, at))


def test_point_clouds_are_cut_and_not_decimated() -> None:
    whole = item()
    cloud = replace(whole, mesh=make_mesh(whole.mesh.verts, None))
    for variant in make_variants(cloud, "vertices", Variants(3, cut=0.5, decimate=0.5)):
        assert np.array_equal(variant.mesh.verts, cloud.mesh.verts[variant.labels])


def test_variants_that_are_not_made() -> None:
    assert make_variants(item(), "vertices", Variants()) == []
    with pytest.raises(OptionError, match=r"cut should be at least 0 and below 1, got 1\.5"):
        Variants(1, cut=1.5)
    with pytest.raises(OptionError, match="number of variants should be at least 0, got -1"):
        Variants(-1)
    with pytest.raises(DataError, match="file:missing"):
        make_variants(item(), "vertices", Variants(1, cut=0.5), "xyz+file:missing")
