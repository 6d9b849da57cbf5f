"""Preprocessing many meshes, and packing them into batches."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import trimesh
from torch.utils.data import DataLoader

from diffnet import DiffusionNet, MeshError, geometry
from diffnet.data import (
    FEATURE_CHANNELS,
    LabeledMesh,
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
from diffnet.geometry import make_mesh, mesh_edges, precompute
from diffnet.geometry.preprocessing import gpu_queue as gpu_solver
from diffnet.geometry.preprocessing import many as filling

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Preprocessing(k=8)


def ellipsoid(seed, subdivisions=1):
    ball = trimesh.creation.icosphere(subdivisions)
    verts = ball.vertices * np.random.default_rng(seed).uniform(0.5, 1.5, 3)
    return make_mesh(verts, ball.faces, name=f"ellipsoid {seed}")


def elements(mesh, at):
    return {"vertices": np.arange(len(mesh.verts))[:, None], "faces": mesh.faces, "edges": mesh_edges(mesh.faces)}[at]


# ---- batches ----


@pytest.mark.parametrize("shuffle", [False, True], ids=["in-order", "shuffled"])
@pytest.mark.parametrize(
    "limits",
    [{"meshes": 3}, {"max_vertices": 50}, {"meshes": 3, "max_vertices": 50}],
    ids=lambda limits: "-and-".join(limits),
)
def test_batches_keep_to_their_limits(limits, shuffle):
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
        assert len(more) > limits.get("meshes", 100) or sum(lengths[i] for i in more) > limits.get(
            "max_vertices", 10**9
        )


def test_batches_of_an_epoch_depend_on_seed_and_epoch_only():
    def order(seed, epoch, noise=0):
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


def test_batches_reject_bad_limits():
    with pytest.raises(ValueError, match="meshes, max_vertices or both"):
        MeshBatches([1, 2])
    with pytest.raises(ValueError, match=r"meshes .*0"):
        MeshBatches([1, 2], meshes=0)
    with pytest.raises(ValueError, match=r"max_vertices .*-3"):
        MeshBatches([1, 2], max_vertices=-3)
    assert list(MeshBatches([], meshes=1)) == []


# ---- samples ----


@pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
def test_packed_samples_line_up(at):
    """The network gives the same outputs for a batch as mesh by mesh, in the order of the labels."""
    meshes = [ellipsoid(0), ellipsoid(1, 2), make_mesh(*_plane_with_loose_vertex(), name="plane"), ellipsoid(2)]
    items = [LabeledMesh(m.name, m, np.arange(len(elements(m, at))) + 1000 * i) for i, m in enumerate(meshes)]
    samples = [make_sample(item, Preprocessing(8, features="xyz")) for item in items]
    torch.manual_seed(0)
    model = DiffusionNet(3, 2, width=8, blocks=1, outputs_at=at).eval()
    loader = DataLoader(
        samples,
        batch_sampler=MeshBatches([s.operators.num_vertices for s in samples], meshes=3),
        collate_fn=collate_samples,
    )
    packed = list(loader)
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
    corners = {
        "vertices": torch.arange(batch.operators.num_vertices)[:, None],
        "faces": batch.operators.faces,
        "edges": batch.operators.edges,
    }[at]
    for mesh, offset in zip(meshes[:3], batch.operators.ptr.tolist(), strict=False):
        own = elements(mesh, at)
        np.testing.assert_array_equal(corners[first : first + len(own)].numpy(), own + offset)
        first += len(own)


def _plane_with_loose_vertex():
    verts = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [5, 5, 5], [2, 0.5, 0.5]]
    return verts, [[0, 1, 2], [0, 2, 3], [1, 5, 2]]


def test_a_sample_moves_whole():
    sample = make_sample(LabeledMesh("a", ellipsoid(0), np.zeros(42, np.int64)), OPTIONS)
    moved = sample.to("meta")
    assert {moved.features.device.type, moved.labels.device.type, moved.operators.device.type} == {"meta"}
    assert moved.names == ("a",)


def test_a_mesh_is_prepared_at_unit_size():
    mesh, operators = prepare(replace(ellipsoid(0), verts=100 + 7 * ellipsoid(0).verts), OPTIONS)
    assert np.linalg.norm(mesh.verts, axis=1).max() == pytest.approx(1)
    assert operators.k == 8
    with pytest.raises(MeshError, match="no such file"):
        prepare("nowhere.off", OPTIONS)


# ---- features ----


@pytest.mark.parametrize("kind", ["hks", "log-hks", "wks", "xyz"])
@pytest.mark.parametrize("source", ["ball", "loose", "cloud", "tiny"])
def test_features_are_finite(kind, source):
    ball = ellipsoid(0)
    mesh = {
        "ball": ball,
        "loose": make_mesh(np.concatenate([ball.verts, [[3, 3, 3], [0, 0, 0]]]), ball.faces),
        "cloud": make_mesh(ball.verts, None),
        "tiny": make_mesh([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]),  # fewer eigenpairs than k
    }[source]
    normalized, operators = prepare(mesh, OPTIONS)
    features = input_features(normalized, operators, kind)
    assert features.shape == (len(mesh.verts), FEATURE_CHANNELS[kind])
    assert features.dtype == torch.float32
    assert features.isfinite().all()
    if kind == "xyz":
        np.testing.assert_allclose(features, normalized.verts, atol=1e-6)
    if kind == "log-hks":
        plain = input_features(normalized, operators, "hks")
        torch.testing.assert_close((3 * features).exp(), plain.clamp(min=1e-6), rtol=1e-4, atol=0)


def test_preprocessing_names_bad_options():
    for options, message in (
        ({"k": 0}, "k .*0"),
        ({"laplacian": "graph"}, "laplacian .*'graph'"),
        ({"features": "shot"}, "features .*'shot'"),
    ):
        with pytest.raises(ValueError, match=message):
            Preprocessing(**options)


# ---- the cache ----


class Deadly(str):
    """A path on which the process dies that is to read it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_bad_mesh_does_not_stop_the_others(tmp_path):
    sources = [ellipsoid(0), tmp_path / "missing.off", ellipsoid(1), ([[0, 0, 0]] * 3, [[0, 1, 2]]), ellipsoid(2)]
    for jobs in (1, 2):
        cache, seen = tmp_path / f"cache {jobs}", []
        failed = fill_cache(sources, OPTIONS, cache, jobs, lambda seen=seen: seen.append(1))
        assert list(failed) == [1, 3]
        assert "missing.off: no such file" in failed[1]
        assert "one point" in failed[3]
        assert len(seen) == 5
        written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.operators.*")}
        assert len(written) == 3
        # A second time, and what training then reads, is served from there.
        assert fill_cache(sources[:1], OPTIONS, cache, jobs) == {}
        for i in (0, 1, 2):
            mesh = ellipsoid(i)
            make_sample(LabeledMesh(mesh.name, mesh, np.zeros(42, np.int64)), OPTIONS, cache)
        assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == written
    assert fill_cache([], OPTIONS, tmp_path / "cache") == {}


def test_precompute_all_is_precompute_of_each(tmp_path):
    """At the positions that the meshes have."""
    meshes = [ellipsoid(i) for i in range(3)]
    meshes[1] = replace(meshes[1], verts=3 * meshes[1].verts)
    expected = [precompute(mesh, 8, "cotan", basis="float16") for mesh in meshes]
    for jobs, cache in ((1, None), (2, None), (2, tmp_path)):
        found = precompute_all(meshes, 8, "cotan", cache, basis="float16", jobs=jobs)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.faces, b.faces)
            torch.testing.assert_close(a.mass, b.mass)
            torch.testing.assert_close(a.evals, b.evals, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(a.gradient.values, b.gradient.values)
            torch.testing.assert_close(a.evecs.abs(), b.evecs.abs(), rtol=0, atol=2e-3)
    assert len(list(tmp_path.rglob("*.operators.*"))) == 3
    assert precompute_all([], 8) == []


def test_precompute_all_says_which_meshes_cannot_be_used(tmp_path):
    meshes = [ellipsoid(0), tmp_path / "a.off", ellipsoid(1), *(tmp_path / f"{i}.off" for i in range(5))]
    with pytest.raises(MeshError, match=r"6 of 8 meshes can't be used: .*a\.off: no such file.*3\.off.*; …"):
        precompute_all(meshes, 4, cache_dir=tmp_path / "cache", jobs=2)
    assert len(list(tmp_path.rglob("*.operators.*"))) == 2
    with pytest.raises(ValueError, match="k should be at least 0, got -1"):
        precompute_all(meshes, -1)


def test_a_mesh_that_kills_its_process_is_lost_alone(tmp_path, monkeypatch):
    # Large enough that the others are still waiting when the death of a process is noticed.
    sources = [ellipsoid(0, 5), Deadly("bad.off"), *(ellipsoid(i, 5) for i in range(1, 4))]
    seen, pools = [], []
    pool = filling.worker_pool
    monkeypatch.setattr(filling, "worker_pool", lambda jobs, threads: pools.append(jobs) or pool(jobs, threads))
    failed = fill_cache(sources, OPTIONS, tmp_path, 2, lambda: seen.append(1))
    assert list(failed) == [1]
    assert "bad.off" in failed[1]
    assert "killed" in failed[1]
    assert len(seen) == 5
    assert len(list(tmp_path.rglob("*.operators.*"))) == 4
    # Only what was under way with it is done again one by one.
    assert pools.count(2) == 2
    assert pools.count(1) <= 2


def test_what_processes_do_needs_no_pytorch(tmp_path):
    """Loading it takes seconds, and as much memory as all the rest."""
    trimesh.creation.icosphere(3).export(tmp_path / "ball.off")
    script = """
import sys
from diffnet.geometry.preprocessing.entry import Options
from diffnet.geometry.preprocessing.worker import fill_entry, half_fill_entry, normalized
print(fill_entry("ball.off", normalized, Options(8, "robust", "bfloat16"), "cache"))
print(type(half_fill_entry("ball.off", normalized, Options(9, "cotan", "float32"), "cache")))
print("torch" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path
    )
    assert ran.stdout.splitlines() == ["None", "<class 'tuple'>", "False"], ran.stderr


def test_processes_do_what_a_gpu_does_not(tmp_path, monkeypatch):
    """As with a GPU, whose part the CPU takes here."""

    def eigenbases(problems, k, device, jobs):
        assert device == torch.device("meta")
        if len(problems) > 1 and any(len(mass) == 162 for _, mass in problems):
            raise RuntimeError("too little memory")
        return [eigenbasis(*problem, k, device) for problem in problems]

    def eigenbasis(laplacian, mass, k, device):
        if len(mass) == 162:
            raise RuntimeError("the eigenbasis didn't converge")
        return geometry.eigenbasis(laplacian, mass, k)

    monkeypatch.setattr(gpu_solver, "eigenbases", eigenbases)
    monkeypatch.setattr(gpu_solver, "eigenbasis", eigenbasis)
    sources = [ellipsoid(0), tmp_path / "missing.off", ellipsoid(1), ellipsoid(3, 2), ellipsoid(2)]
    seen, ready = [], []
    failed = fill_cache(sources, OPTIONS, tmp_path, 2, lambda: seen.append(1), "meta", ready.append)
    assert list(failed) == [1, 3]
    assert "missing.off: no such file" in failed[1]
    assert failed[3] == "ellipsoid 3: the eigenbasis didn't converge"
    assert (sorted(ready), len(seen)) == ([0, 2, 4], 5)
    for i in (0, 2, 4):
        cached, fresh = prepare(sources[i], OPTIONS, tmp_path)[1], prepare(sources[i], OPTIONS)[1]
        for name in ("mass", "evals", "evecs", "frames"):
            assert torch.equal(getattr(cached, name), getattr(fresh, name))
        assert torch.equal(cached.gradient.values, fresh.gradient.values)
    monkeypatch.setattr(gpu_solver, "eigenbases", None)  # nothing is left to do for it
    assert fill_cache([sources[0], sources[2]], OPTIONS, tmp_path, 2, device="meta") == {}


def test_nobody_waits_for_a_gpu_that_fails(tmp_path, monkeypatch):
    def full(path, arrays):
        raise OSError("no space left on device")

    def broken(*shape, device):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(
        gpu_solver, "eigenbases", lambda p, k, device, jobs: [geometry.eigenbasis(*one, k) for one in p]
    )
    monkeypatch.setattr(gpu_solver, "write_entry", full)
    monkeypatch.setattr(gpu_solver, "MOST_WAITING", 1)
    sources = [ellipsoid(i) for i in range(12)]
    with pytest.raises(OSError, match="no space left"):
        fill_cache(sources, OPTIONS, tmp_path, 2, device="meta")
    monkeypatch.setattr(torch, "zeros", broken)  # as where there is no such GPU
    with pytest.raises(RuntimeError, match="no GPU"):
        fill_cache(sources, OPTIONS, tmp_path, 2, device="meta")


@pytest.mark.gpu
def test_with_a_gpu_the_same(tmp_path):
    sources = [ellipsoid(i, 5) for i in range(3)] + [ellipsoid(3)]
    assert fill_cache(sources, OPTIONS, tmp_path, 2, device="cuda") == {}
    for source in sources:
        cached, fresh = prepare(source, OPTIONS, tmp_path)[1], prepare(source, OPTIONS)[1]
        torch.testing.assert_close(cached.evals, fresh.evals, rtol=1e-5, atol=1e-6)
        # The peaks of an ellipsoid's eigenvectors are equal on both sides of it, so rounding decides on signs.
        along = (cached.evecs * fresh.evecs * fresh.mass[:, None]).sum(0)
        torch.testing.assert_close(along.abs(), torch.ones(8), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "call",
    [
        "data.fill_cache([ball] * 50, data.Preprocessing(4), 'cache', 2)",
        "geometry.eigenbases([geometry.laplacian_and_mass(geometry.load_mesh(ball))] * 50, 4, jobs=2)",
    ],
)
def test_a_script_that_its_processes_start_again_is_told_so(tmp_path, call):
    """They import it, and one that doesn't ask for them under `__main__` would be run by each of them."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import trimesh\nfrom diffnet import data, geometry\nball = trimesh.creation.icosphere(2)\n{call}\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path
    )
    assert ran.returncode == 1
    (told,) = (line for line in ran.stderr.splitlines() if line.startswith("RuntimeError: no process starts"))
    assert "__main__" in told
    assert ran.stderr.count("bootstrapping phase") <= 3  # of the processes that were started, not of 50


def test_a_bug_in_preprocessing_is_no_fault_of_the_mesh(tmp_path, monkeypatch):
    def broken(*arguments):
        raise TypeError("a bug")

    monkeypatch.setattr("diffnet.geometry.preprocessing.worker.found_or_computed", broken)
    with pytest.raises(TypeError, match="a bug"):
        fill_cache([ellipsoid(0)], OPTIONS, tmp_path, 1)

    def exhausted(*arguments):
        raise MemoryError

    monkeypatch.setattr("diffnet.geometry.preprocessing.worker.found_or_computed", exhausted)
    assert "ellipsoid 0: " in fill_cache([ellipsoid(0)], OPTIONS, tmp_path, 1)[0]


def test_an_error_while_filling_does_not_wait_for_the_rest(tmp_path):
    def stop():
        raise KeyboardInterrupt

    slow = [ellipsoid(i, 6) for i in range(3)]  # a second each, or more
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        fill_cache([ellipsoid(0), *slow], Preprocessing(128), tmp_path, 2, stop)
    assert len(list(tmp_path.rglob("*.operators.*"))) == 1  # what was under way has been stopped
    assert time.perf_counter() - started < 60


def test_an_interrupt_does_not_wait_for_what_nobody_will_read():
    """More than a pipe holds, on its way to a process that has something else to do."""

    def interrupted():
        with filling.worker_pool(1, 1) as pool:
            busy = pool.submit(time.sleep, 100)
            while not busy.running():
                time.sleep(0.05)
            pool.submit(len, bytes(10**7))
            time.sleep(0.5)
            raise KeyboardInterrupt

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.perf_counter() - started < 60


def test_the_cache_is_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fill_cache([ellipsoid(0)], OPTIONS, tmp_path / "file", 1)
