"""Samples, their features, batches of samples, and the cache that both use."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from shapes import ellipsoid
from torch.utils.data import DataLoader

from diffnet import DiffusionNet, MeshError, geometry
from diffnet.data import (
    FEATURE_CHANNELS,
    LabeledMesh,
    LabeledMeshes,
    MeshBatches,
    Preprocessing,
    collate_samples,
    epoch_seed,
    fill_cache,
    input_features,
    make_sample,
    precompute_all,
    prepare,
)
from diffnet.geometry import Mesh, make_mesh, mesh_edges
from diffnet.geometry.store import transfer

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Preprocessing(k=8)


def elements(mesh: Mesh, at: str) -> np.ndarray:
    return {"vertices": np.arange(len(mesh.verts))[:, None], "faces": mesh.faces, "edges": mesh_edges(mesh.faces)}[at]


def test_representations_are_one_line() -> None:
    item = LabeledMesh("a", ellipsoid(0), np.zeros(42, np.int64))
    message = r"item should be a LabeledMesh, got Mesh; write LabeledMesh\(name, mesh, labels"
    refused(TypeError, message, make_sample, item.mesh, OPTIONS)
    mesh = "Mesh(name='ellipsoid 0', vertices=42, faces=80)"
    assert repr(item) == f"LabeledMesh(name='a', mesh={mesh}, labels=(42,) int64)"
    data = LabeledMeshes([item, item], [item], [f"class {i}" for i in range(260)], "vertices")
    assert repr(data).startswith("LabeledMeshes(train=2 meshes, test=1 mesh, label_names=['class 0', ")
    assert len(repr(data)) < 200


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("limits", [{"meshes": 3}, {"max_vertices": 50}, {"meshes": 3, "max_vertices": 50}])
def test_batches_keep_to_their_limits(limits: dict[str, int], shuffle: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 100).tolist()
    lengths[17] = 80
    batches = MeshBatches(lengths, shuffle=shuffle, seed=3, **limits)
    found = list(batches)
    assert len(found) == len(batches)
    order = [i for batch in found for i in batch]
    assert sorted(order) == list(range(100))
    assert shuffle or order == list(range(100))
    for batch in found:
        assert len(batch) <= limits.get("meshes", 100)
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= limits.get("max_vertices", 10**9)
    assert ([17] in found) == ("max_vertices" in limits)
    # No batch has room for the first mesh of the next batch.
    for batch, following in pairwise(found):
        more = [*batch, following[0]]
        vertices = sum(lengths[i] for i in more)
        assert len(more) > limits.get("meshes", 100) or vertices > limits.get("max_vertices", 10**9)


@pytest.mark.parametrize("limits", [{"meshes": 8}, {"max_vertices": 110}])
def test_processes_share_each_batch(limits: dict[str, int]) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 101).tolist()
    whole = list(MeshBatches(lengths, shuffle=True, seed=3, **limits))
    ranks = [list(MeshBatches(lengths, shuffle=True, seed=3, num_replicas=2, rank=r, **limits)) for r in range(2)]
    for batch, *shares in zip(whole, *ranks, strict=True):
        assert all(shares)
        taken = [i for share in shares for i in share]
        assert sorted(taken) == sorted(batch)
        sums = [sum(lengths[i] for i in share) for share in shares]
        assert max(sums) - min(sums) <= max(lengths[i] for i in batch)


def test_batches_have_a_mesh_for_each_process() -> None:
    ranks = [list(MeshBatches([30, 40, 50, 0, 0], max_vertices=20, num_replicas=2, rank=r)) for r in range(2)]
    assert ranks == [[[1], [2], [0]], [[0], [3], [4]]]
    with pytest.raises(ValueError, match="rank should be below num_replicas, 2, got 2"):
        MeshBatches([1, 2], meshes=2, num_replicas=2, rank=2)
    for lengths in ([1, 2], [1, 2, 3]):
        with pytest.raises(ValueError, match="each batch needs a mesh for each of the 3 processes, got"):
            MeshBatches(lengths, meshes=2, num_replicas=3)


def test_a_process_group_divides_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that begins after the sampler was made, as that of Lightning."""
    lengths = [30, 10, 20, 5, 7]
    batches, whole = MeshBatches(lengths, meshes=2), MeshBatches(lengths, meshes=2, num_replicas=1)
    expected = [list(MeshBatches(lengths, meshes=2, num_replicas=2, rank=rank)) for rank in range(2)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        for count in (2, 3):
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda count=count: count)
            if count == 3:
                refused(ValueError, "a mesh for each of the 3 processes, got 5 lengths and meshes=2", iter, batches)
                continue
            assert list(batches) == expected[rank]
            assert list(whole) == [[0, 1], [2, 3], [4]]


def test_batches_of_an_epoch_depend_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int, noise: int = 0) -> list[list[int]]:
        torch.manual_seed(noise)
        batches = MeshBatches([1] * 20, meshes=4, shuffle=True, seed=seed)
        for earlier in range(noise):
            batches.set_epoch(earlier)
            list(batches)
        batches.set_epoch(epoch)
        return list(batches)

    assert order(1, 5) == order(1, 5, noise=3)
    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert len({epoch_seed(seed, epoch) for seed in range(50) for epoch in range(50)}) == 2500


def test_each_iteration_is_an_epoch() -> None:
    """Without `set_epoch`, the next iteration has the order of the next epoch."""
    lengths = np.random.default_rng(0).integers(1, 30, 100).tolist()
    batches = MeshBatches(lengths, max_vertices=50, shuffle=True, seed=1)
    first = next(iter(batches))
    later = [list(batches) for _ in range(3)]
    assert later[0] != later[1] != later[2]
    chosen = MeshBatches(lengths, max_vertices=50, shuffle=True, seed=1)
    for epoch, expected in ((2, later[1]), (1, later[0]), (3, later[2])):
        chosen.set_epoch(epoch)
        assert len(chosen) == len(expected)
        assert list(chosen) == expected
        assert len(chosen) == len(expected)
    chosen.set_epoch(0)
    assert next(iter(chosen)) == first
    loader = DataLoader(lengths, batch_sampler=MeshBatches(lengths, meshes=100, shuffle=True), collate_fn=list)
    assert next(iter(loader)) != next(iter(loader))


def test_a_generator_draws_the_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        return list(MeshBatches([1] * 20, meshes=4, shuffle=True, generator=torch.Generator().manual_seed(seed)))

    state = torch.get_rng_state()
    assert order(0) == order(0) != order(1)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator().manual_seed(0)
    two = [list(MeshBatches([1] * 20, meshes=4, shuffle=True, generator=generator)) for _ in range(2)]
    assert two[0] != two[1]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "meshes, max_vertices or both"),
        ({"meshes": 0}, ValueError, "meshes should be at least 1, got 0"),
        ({"max_vertices": -3}, ValueError, "max_vertices should be at least 1, got -3"),
        ({"meshes": 1.5}, TypeError, "meshes should be an integer, got 1.5"),
        ({"max_vertices": float("nan")}, TypeError, "max_vertices should be an integer, got nan"),
        ({"meshes": 2, "seed": "a"}, TypeError, "seed should be an integer, got 'a'"),
        ({"meshes": 2, "lengths": [5, -1]}, ValueError, r"lengths\[1\] should be at least 0, got -1"),
        ({"meshes": 2, "lengths": [1.5]}, TypeError, r"lengths\[0\] should be an integer, got 1.5"),
    ],
)
def test_batches_reject_bad_limits(given: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(error, message, MeshBatches, **{"lengths": [1, 2]} | given)


def test_limits_of_other_kinds() -> None:
    assert list(MeshBatches([], meshes=1)) == []
    assert list(MeshBatches(torch.tensor([3, 1, 2]), max_vertices=np.int64(4))) == [[0, 1], [2]]
    refused(ValueError, "epoch should be at least 0, got -1", MeshBatches([1], meshes=1).set_epoch, -1)


@pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
def test_packed_samples_line_up(at: str) -> None:
    """The network gives the same outputs for a batch as mesh by mesh, in the order of the labels."""
    loose = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [5, 5, 5], [2, 0.5, 0.5]]  # no face uses vertex 4
    plane = make_mesh(loose, [[0, 1, 2], [0, 2, 3], [1, 5, 2]], name="plane")
    meshes = [ellipsoid(0), ellipsoid(1, 2), plane, ellipsoid(2)]
    items = [LabeledMesh(m.name, m, np.arange(len(elements(m, at))) + 1000 * i) for i, m in enumerate(meshes)]
    samples = [make_sample(item, Preprocessing(8, features="xyz")) for item in items]
    torch.manual_seed(0)
    model = DiffusionNet(3, 2, width=8, blocks=1, outputs_at=at).eval()
    batches = MeshBatches([s.operators.num_vertices for s in samples], meshes=3)
    packed = list(DataLoader(samples, batch_sampler=batches, collate_fn=collate_samples))
    assert [s.names for s in packed] == [tuple(m.name for m in meshes[:3]), (meshes[3].name,)]
    for batch, expected in zip(packed, [samples[:3], samples[3:]], strict=True):
        torch.testing.assert_close(batch.labels, torch.cat([s.labels for s in expected]), rtol=0, atol=0)
        assert batch.labels.dtype == torch.int64
        assert batch.operators.lengths == tuple(s.operators.num_vertices for s in expected)
        assert batch.features.dtype == torch.float32
        with torch.no_grad():
            out = model(batch.features, batch.operators)
            alone = torch.cat([model(s.features, s.operators) for s in expected])
        assert len(out) == len(batch.labels)
        torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-5)
    # The faces and edges of the batch have the order of their labels.
    batch, first = packed[0], 0
    numbers = torch.arange(batch.operators.num_vertices)[:, None]
    corners = {"vertices": numbers, "faces": batch.operators.faces, "edges": batch.operators.edges}[at]
    for mesh, offset in zip(meshes[:3], batch.operators.ptr.tolist(), strict=False):
        own = elements(mesh, at)
        np.testing.assert_array_equal(corners[first : first + len(own)].numpy(), own + offset)
        first += len(own)


def test_a_label_for_each_mesh() -> None:
    """Classification: one label per mesh goes with the outputs of a network at global_mean."""
    labels = [np.array(2), np.array([0]), np.int64(1)]
    samples = [make_sample(LabeledMesh(f"{i}", ellipsoid(i), x), OPTIONS) for i, x in enumerate(labels)]
    assert [s.labels.tolist() for s in samples] == [[2], [0], [1]]
    model = DiffusionNet(samples[0].features.shape[1], 3, width=8, blocks=1, outputs_at="global_mean")
    loader = DataLoader(samples, batch_size=2, collate_fn=collate_samples)
    for batch, expected in zip(loader, [[2, 0], [1]], strict=True):
        assert (batch.labels.tolist(), batch.labels.dtype) == (expected, torch.int64)
        torch.nn.functional.cross_entropy(model(batch.features, batch.operators), batch.labels).backward()


def test_a_sample_moves_converts_and_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = make_sample(LabeledMesh("a", ellipsoid(0), np.zeros(42, np.int64)), OPTIONS)
    for wide in (sample.to(torch.float64), sample.to("cpu", torch.float64, non_blocking=True)):
        assert wide.features.dtype == wide.operators.evecs.dtype == torch.float64
        assert wide.labels.dtype == torch.int64
    assert wide.to("cpu").features.dtype == torch.float64
    moved = sample.to("meta")
    assert {moved.features.device.type, moved.labels.device.type, moved.operators.device.type} == {"meta"}
    assert moved.names == ("a",)
    monkeypatch.setattr(transfer, "empty_pinned", lambda size: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x.clone())
    pinned = sample.pin_memory()
    for a, b in zip(*((x.features, x.labels, x.operators.evecs) for x in (pinned, sample)), strict=True):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    assert pinned.names == ("a",)


@pytest.mark.gpu
def test_pinned_samples_on_a_gpu() -> None:
    sample = make_sample(LabeledMesh("a", ellipsoid(0), np.zeros(42, np.int64)), OPTIONS)
    (pinned,) = DataLoader([sample], collate_fn=collate_samples, pin_memory=True)
    assert pinned.features.is_pinned()
    assert pinned.labels.is_pinned()
    assert pinned.operators.evecs.is_pinned()
    moved = pinned.to("cuda", non_blocking=True)
    assert torch.equal(moved.features.cpu(), sample.features)
    assert moved.operators.device.type == "cuda"


def test_a_mesh_is_prepared_at_unit_size() -> None:
    mesh, operators = prepare(replace(ellipsoid(0), verts=100 + 7 * ellipsoid(0).verts), OPTIONS)
    assert np.linalg.norm(mesh.verts, axis=1).max() == pytest.approx(1)
    assert operators.k == 8
    refused(MeshError, "no such file", prepare, "nowhere.off", OPTIONS)


@pytest.mark.parametrize("source", ["ball", "loose", "cloud", "tiny"])
def test_features_are_finite(source: str) -> None:
    ball = ellipsoid(0)
    mesh = {
        "ball": ball,
        "loose": make_mesh(np.concatenate([ball.verts, [[3, 3, 3], [0, 0, 0]]]), ball.faces),
        "cloud": make_mesh(ball.verts, None),
        "tiny": make_mesh([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]),  # fewer eigenpairs than k
    }[source]
    normalized, operators = prepare(mesh, OPTIONS)
    found = {kind: input_features(normalized, operators, kind) for kind in FEATURE_CHANNELS}
    for kind, features in found.items():
        assert features.shape == (len(mesh.verts), FEATURE_CHANNELS[kind])
        assert features.dtype == torch.float32
        assert features.isfinite().all()
    np.testing.assert_allclose(found["xyz"], normalized.verts, atol=1e-6)
    torch.testing.assert_close((3 * found["log-hks"]).exp(), found["hks"].clamp(min=1e-6), rtol=1e-4, atol=0)


def test_preprocessing_names_bad_options() -> None:
    assert Preprocessing(k=0, features="xyz+normals+curvature+file:a").k == 0
    for options, message in (
        *(({"k": 0, "features": name}, "k should be at least 1, got 0") for name in ("xyz+wks", "diffused-curvature")),
        ({"k": "128"}, "k should be an integer, got '128' of type str"),
        ({"k": 128.0}, "k should be an integer, got 128.0 of type float"),
        ({"k": True}, "k should be an integer, got True of type bool"),
        ({"k": -1, "features": "xyz"}, "k should be at least 0, got -1"),
        ({"laplacian": "graph"}, "laplacian .*'graph'"),
        ({"features": "shot"}, "features .*'shot'"),
    ):
        refused(ValueError, message, Preprocessing, **options)


def test_features_of_wrong_arguments() -> None:
    mesh = ellipsoid(0)
    operators = geometry.precompute(mesh, k=0)
    refused(ValueError, r"mask:NAME, joined by \+, got 'HKS'", input_features, mesh, operators, "HKS")
    for kind in ("hks", "log-hks", "wks"):
        refused(ValueError, "needs eigenpairs, but the operators have k = 0", input_features, mesh, operators, kind)
    for kind in ("xyz", "hks"):
        message = "the mesh has 162 vertices and the operators 42; pass the operators of this"
        refused(ValueError, message, input_features, ellipsoid(0, 2), operators, kind)


def test_training_reads_what_fill_cache_stored(tmp_path: Path) -> None:
    """Both compute operators at normalized positions, so a sample finds the entry of its mesh."""
    meshes = [replace(ellipsoid(i), verts=100 + 7 * ellipsoid(i).verts) for i in range(3)]
    seen, ready = [], []
    sources = [*meshes, tmp_path / "missing.off"]
    failed = fill_cache(sources, OPTIONS, tmp_path, 1, lambda: seen.append(1), "cpu", ready.append)
    assert list(failed) == [3]
    assert "missing.off: no such file" in failed[3]
    assert (len(seen), ready) == (4, [0, 1, 2])
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) == 3
    for mesh in meshes:
        make_sample(LabeledMesh(mesh.name, mesh, np.zeros(42, np.int64)), OPTIONS, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == written
    assert precompute_all is geometry.precompute_all  # for one release
