"""Runs whose samples don't fit into memory: they equal resident ones, start from stored facts, and name bad files."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import assert_same, tiny_operators
from rich.console import Console
from runs import InMemory, ball, write_ball
from shapes import arrays, ellipsoid, soup

from diffnet.cuda_graphs.sizes import sizes_of
from diffnet.data import (
    BODY_MAPS,
    DataError,
    LabeledMesh,
    LabeledMeshes,
    MeshPairs,
    Sample,
    index_classes,
    index_dataset,
    index_targets,
    load_pairs,
    paired_meshes,
)
from diffnet.data.prepared import PreparedSamples
from diffnet.data.samples import PinnedSample
from diffnet.data.stored import StoredMeshes, joined
from diffnet.geometry import file_state, load_mesh, make_mesh
from diffnet.geometry.discretize import gradient
from diffnet.geometry.store import cache, reading, transfer
from diffnet.ops.sparse import pattern
from diffnet.train import batches, resident
from diffnet.train.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from diffnet.train.options import TrainOptions
from diffnet.train.options.task_options import SetOptions
from diffnet.train.preprocessing import preprocess, with_max_faces
from diffnet.train.resident import DeviceSamples, first_that_fit, read_ahead
from diffnet.train.run import run_training
from diffnet.train.tasks.task import task_named

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

CPU = torch.device("cpu")
NOTHING = 1e-9  # GiB, less than any sample takes
SMALL = {"k": 6, "width": 8, "blocks": 1, "epochs": 2, "eval_every": 1, "schedule": "step"}


def write_set(root: Path, kind: str) -> Path:
    """Six balls with labels or targets of one kind, and an own array `shade`."""
    for seed in range(6):
        part, verts = "train" if seed < 4 else "test", ball(seed, 1 + seed % 2).vertices
        folder = root / ("cat", "dog")[seed % 2] / part if kind == "classes" else root / part
        write_ball(folder / f"m{seed}.ply", seed, 1 + seed % 2)
        np.save(folder / f"m{seed}.shade.npy", verts[:, :2])
        if kind == "labels":
            np.savetxt(folder / f"m{seed}.txt", verts[:, 0] > 0, fmt="%d")
        if kind == "targets":
            np.save(folder / f"m{seed}.height.npy", 100 + verts[:, 2])
    return root


def some_pairs(cache: Path) -> MeshPairs:
    """Three of the built-in bodies to train on, and two to test on."""
    data = load_pairs(BODY_MAPS, cache_dir=cache)
    return replace(data, train=data.train[:3], train_pairs=[(0, 1), (0, 2), (1, 2)])


def loaded(tmp_path: Path, kind: str) -> LabeledMeshes:
    where = tmp_path / "cache"
    if kind == "pairs":
        return paired_meshes(some_pairs(where), 8)
    root = tmp_path / "set" if (tmp_path / "set").exists() else write_set(tmp_path / "set", kind)
    if kind == "classes":
        return index_classes(root, where, jobs=1)
    if kind == "targets":
        return index_targets(root, where, "file:height", jobs=1)
    return index_dataset(root, where, jobs=1)


def run(data: LabeledMeshes, out: Path, memory: float = 1.0, **given: Any) -> Checkpoint:
    how = {"resume": given.pop("resume", False), "memory": memory, "jobs": 1, "console": Console(quiet=True)}
    options = TrainOptions(**{**SMALL, **given})
    run_training(data, options, out, device=CPU, cache_dir=out.parent / "cache", **how)
    return load_checkpoint(out / "last.pt")


def assert_equal(first: Checkpoint, second: Checkpoint) -> None:
    assert [{**row, "seconds": 0} for row in first["history"]] == [{**row, "seconds": 0} for row in second["history"]]
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "vertices per batch": ("labels", {"batch_meshes": None, "batch_vertices": 300, "validation": 0.25}),
    "own arrays and variants": (
        "labels",
        {"features": "xyz+file:shade", "cut": 0.3, "decimate": 0.4, "variants": 2, "max_faces": 200},
    ),
    "half precision": ("labels", {"basis": "float16"}),
    "classification": ("classes", {"task": "classification"}),
    "regression": ("targets", {"task": "regression"}),
    "pairs": ("pairs", {"task": "correspondence", "map_k": 5, "batch_meshes": 2}),
}


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "pairs" else []) for name in RUNS]
)
def test_streamed_runs_equal_resident_ones(tmp_path: Path, name: str) -> None:
    kind, given = RUNS[name]
    whole = run(loaded(tmp_path, kind), tmp_path / "resident", **given)
    streamed = run(loaded(tmp_path, kind), tmp_path / "streamed", NOTHING, **given)
    assert_equal(whole, streamed)
    for each in ("results.json", "predictions.html"):
        assert (tmp_path / "streamed" / each).exists()
    if kind != "pairs":
        run(loaded(tmp_path, kind), tmp_path / "parts", NOTHING, **{**given, "epochs": 1})
        assert_equal(run(loaded(tmp_path, kind), tmp_path / "parts", NOTHING, **given, resume=True), whole)


@pytest.mark.parametrize(
    ("task", "kind"), [("segmentation", "labels"), ("classification", "classes"), ("regression", "targets")]
)
def test_sets_to_score_are_read_mesh_by_mesh(tmp_path: Path, task: Any, kind: str) -> None:
    root, where = write_set(tmp_path / "set", kind), tmp_path / "cache"
    how = SetOptions(cache=where, targets="file:height", needs_train=False, jobs=1)
    data = task_named(task).load([str(root)], how, TrainOptions(task=task))
    assert isinstance(data.test, StoredMeshes)
    assert sorted(name[-2:] for name in data.test.names) == ["m4", "m5"]
    assert len(data.train) == 0


def test_only_samples_that_fit_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = PreparedSamples.__getitem__
    monkeypatch.setattr(PreparedSamples, "__getitem__", lambda self, i: read.append(i) or plain(self, i))
    small = (4 * 6 + resident.REST) * 42
    run(loaded(tmp_path, "labels"), tmp_path / "run", 2 * small / 2**30)
    counts = np.bincount(read, minlength=6).tolist()
    # The meshes 0, 2 and 4 are small; two of them fit. Each epoch trains on 0 to 3 and tests on 4 and 5.
    assert counts == [1, 2, 1, 2, 2, 2]
    assert first_that_fit(np.array([5, 3, 3]), 7).tolist() == [True, False, False]


def test_a_second_run_reads_no_mesh_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"features": "xyz+file:shade", "rotate": False, "class_weights": "1,2"}
    first = run(loaded(tmp_path, "labels"), tmp_path / "first", **given)
    expected = run(loaded(tmp_path, "labels"), tmp_path / "second", **given)
    noted = Mock(side_effect=load_mesh)
    for name in ("data.folders.index.load_mesh", "geometry.mesh.normalize.detached_mesh"):
        monkeypatch.setattr(f"diffnet.{name}", noted)
    third = run(loaded(tmp_path, "labels"), tmp_path / "third", **given)
    # Statistics look at the first mesh, and the report at the test meshes, after training.
    assert {Path(call.args[0]).stem for call in noted.call_args_list} == {"m0", "m4", "m5"}
    for each in (expected, third):
        assert_equal(first, each)
    array = tmp_path / "set" / "train" / "m1.shade.npy"
    np.save(array, 2 * np.load(array))
    monkeypatch.undo()
    changed = run(loaded(tmp_path, "labels"), tmp_path / "changed", **given)
    assert changed["statistics"] != first["statistics"]


def entries(tmp_path: Path, kind: str) -> list[Path]:
    return sorted((tmp_path / "cache").rglob(f"*.{kind}.safetensors"))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize("kind", ["sample", "operators", "facts", "derived"])
@pytest.mark.parametrize("how", [damage, Path.unlink], ids=["damaged", "missing"])
def test_entries_that_are_gone_are_made_again(tmp_path: Path, kind: str, how: Callable[[Path], Any]) -> None:
    given = {"cut": 0.3, "variants": 1}
    expected = run(loaded(tmp_path, "labels"), tmp_path / "first", **given)
    gone = entries(tmp_path, kind)
    assert gone
    for path in gone:
        how(path)
    for path in entries(tmp_path, "sample") if kind == "derived" else ():  # these need them
        path.unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(loaded(tmp_path, "labels"), tmp_path / "second", NOTHING, **given)
    assert_equal(expected, found)
    assert any("can't be read" in str(each.message) for each in caught) == (how is damage)
    again = set(entries(tmp_path, kind))
    assert again
    assert again <= set(gone)  # variants that no epoch has drawn are not there


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> PreparedSamples:
    """Samples of several kinds of meshes. Ordinary memory stands for pinned memory."""
    for module in (transfer, reading):
        monkeypatch.setattr(module, "empty_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    monkeypatch.setattr(file_state, "SETTLED", -(10**10))  # entries that have just been written are settled
    points = make_mesh(np.random.default_rng(0).random((30, 3)), None)
    meshes = [ellipsoid(0), ellipsoid(1, 2), make_mesh(*soup(arrays(trimesh.creation.box()))), points]
    items = [LabeledMesh(f"m{i}", mesh, np.arange(len(mesh.verts)) % 2) for i, mesh in enumerate(meshes)]
    quiet = Console(quiet=True)
    options = TrainOptions(**{**SMALL, **given})
    scored = with_max_faces(items[:2], "vertices", options, to_score=True, cache_dir=tmp_path, jobs=1, console=quiet)
    found = preprocess(joined([scored, items[2:]]), options.preprocessing, {}, "vertices", tmp_path, 1, quiet, CPU)
    found.backward = False
    return found


def as_moved(sample: Sample | PinnedSample) -> Sample:
    """The sample as a network in bfloat16 uses it."""
    if isinstance(sample, PinnedSample):
        return sample.prepared(CPU, torch.bfloat16)
    return replace(sample, operators=sample.operators.prepared(torch.bfloat16))


@pytest.mark.parametrize("near", [gradient.MAX_GAP, 0], ids=["rows in mesh order", "rows reordered"])
@pytest.mark.parametrize("given", [{}, {"max_faces": 200}, {"basis": "float16"}], ids=str)
def test_samples_in_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, near: int, given: dict[str, Any]
) -> None:
    """They are equal when they are read for the first time, when they are read again, and on the CPU."""
    monkeypatch.setattr(gradient, "MAX_GAP", near)
    samples = prepared(tmp_path, monkeypatch, **given)
    plain = PreparedSamples.__getitem__
    whole: list[int] = []
    monkeypatch.setattr(PreparedSamples, "__getitem__", lambda self, i: whole.append(i) or plain(self, i))
    for i in range(len(samples)):
        twice = [as_moved(samples.pinned(i)) for _ in range(2)]
        expected = as_moved(plain(samples, i))
        for found in twice:
            assert_same(found.operators, expected.operators)
            assert found.names == expected.names
            pairs = [(found.features, expected.features), (found.labels, expected.labels)]
            if expected.interpolation is not None:
                assert found.interpolation is not None
                pairs += zip(vars(found.interpolation).values(), vars(expected.interpolation).values(), strict=True)
            for a, b in pairs:
                assert (a.dtype, a.data_ptr() % 64) == (b.dtype, 0)  # 64 bytes: of PyTorch's memory on the CPU
                assert torch.equal(a, b)
            for name in ("laplacian", "gradient"):
                pattern, same = (getattr(each.operators, name).pattern for each in (found, expected))
                assert torch.equal(pattern.long_pieces, same.long_pieces)
                assert torch.equal(pattern.rows_by_length, same.rows_by_length)
    assert whole == [i for i in range(len(samples)) for _ in range(2 if "basis" in given else 1)]


@pytest.mark.parametrize("kind", ["sample", "operators"])
@pytest.mark.parametrize("how", [damage, Path.unlink], ids=["damaged", "missing"])
def test_entries_that_change_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: Callable[[Path], Any]
) -> None:
    samples = prepared(tmp_path, monkeypatch)
    expected = as_moved(samples.pinned(1))
    for path in tmp_path.rglob(f"*.{kind}.safetensors"):
        how(path)
    with pytest.warns(UserWarning, match="can't be read") if how is damage else nullcontext():
        found = as_moved(samples.pinned(1))
    assert_same(found.operators, expected.operators)
    assert torch.equal(found.features, expected.features)


def test_sizes_and_uneven_rows_are_found_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = prepared(tmp_path, monkeypatch)
    counts = "entries", "longest"
    expected_sizes = sizes_of([sample.operators for sample in samples]).counted(counts)
    assert DeviceSamples(samples, CPU).sizes().counted(counts) == expected_sizes
    for module in (pattern, reading):
        monkeypatch.setattr(module, "PIECE", 5)
    expected = samples[0].operators.gradient.pattern
    assert len(expected.long_pieces)
    for _ in range(2):
        found = samples.pinned(0)
        assert isinstance(found, Sample)
        assert torch.equal(found.operators.gradient.pattern.long_pieces, expected.long_pieces)


def disappearing(monkeypatch: pytest.MonkeyPatch, file: Path, also: list[Path]) -> None:
    """Remove files in the second epoch."""
    plain, passes = resident.read_ahead, itertools.count(1)

    def noted(samples: Any, numbers: Any) -> Any:
        if next(passes) == 3:  # after an epoch and its test
            for path in [file, *also]:
                path.unlink()
        return plain(samples, numbers)

    monkeypatch.setattr(batches, "read_ahead", noted)


@pytest.mark.parametrize("with_entries", [False, True], ids=["file", "file and entries"])
def test_a_file_that_disappears_in_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_entries: bool
) -> None:
    expected = run(loaded(tmp_path, "labels"), tmp_path / "first")
    file = tmp_path / "set" / "train" / "m2.ply"
    content, times = file.read_bytes(), file.stat()
    with monkeypatch.context() as patch:
        disappearing(patch, file, entries(tmp_path, "sample") if with_entries else [])
        if not with_entries:  # nothing reads the file
            assert_equal(run(loaded(tmp_path, "labels"), tmp_path / "second", NOTHING), expected)
            return
        with pytest.raises(DataError, match=r"m2\.ply: the file can't be read \(No such file"):
            run(loaded(tmp_path, "labels"), tmp_path / "second", NOTHING)
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(load_checkpoint(tmp_path / "second" / "last.pt")["history"]) == 1
    assert_equal(run(loaded(tmp_path, "labels"), tmp_path / "second", NOTHING, resume=True), expected)


@pytest.mark.usefixtures("addresses")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache can't hold stays in memory if it fits there, and otherwise an error names the file."""
    data = loaded(tmp_path, "labels")
    expected = run(data, tmp_path / "first")
    for path in entries(tmp_path, "sample") + entries(tmp_path, "facts"):
        path.unlink()

    monkeypatch.setattr(cache, "safetensors_of", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.warns(UserWarning, match=r"the cache folder .*can't be written \(No space left"):
        assert_equal(run(data, tmp_path / "second"), expected)
    with pytest.raises(DataError, match=r"cache/../.*sample\.safetensors: the cache can't be written, .* --memory"):
        run(data, tmp_path / "third", NOTHING)


def test_statistics_of_a_resumed_run_may_be_rounded_differently(tmp_path: Path) -> None:
    data = loaded(tmp_path, "targets")
    whole = run(data, tmp_path / "whole", task="regression")
    stored = run(data, tmp_path / "parts", task="regression", epochs=1)
    stored["target_statistics"]["mean"][0] *= 1 + 1e-13
    save_checkpoint(tmp_path / "parts" / "last.pt", stored)
    resumed = run(data, tmp_path / "parts", task="regression", resume=True)
    assert resumed["history"][1]["train_loss"] == pytest.approx(whole["history"][1]["train_loss"])
    assert resumed["target_statistics"] == stored["target_statistics"]


def test_a_run_of_version_0_1_is_not_resumed(tmp_path: Path) -> None:
    data = loaded(tmp_path, "labels")
    stored = run(data, tmp_path / "run", epochs=1)
    stored["data"] = "0" * 64  # a hash of all arrays
    save_checkpoint(tmp_path / "run" / "last.pt", stored)
    with pytest.raises(CheckpointError, match=r"run/last\.pt: this run was started by diffnet 0\.1, and only that"):
        run(data, tmp_path / "run", resume=True)


def numbered(count: int) -> DeviceSamples:
    """Samples that are never kept, with a list of what was read."""
    operators = tiny_operators()[0]
    samples = [Sample((str(i),), torch.zeros(1, 3), torch.zeros(1), operators) for i in range(count)]
    found = DeviceSamples(InMemory(samples), CPU)
    found._stays[:] = False  # as if they didn't fit
    return found


def test_reading_ahead_is_bounded_and_in_order() -> None:
    samples = numbered(100)
    most = 0
    seen = []
    for batch in read_ahead(samples, [[i] for i in range(100)]):
        most = max(most, len(samples._reading))  # nothing public tells how many are read
        seen.append(samples[batch[0]].names[0])
    assert seen == [str(i) for i in range(100)]
    assert 2 <= most <= 2 * resident.READERS
    samples._most_ahead = 1
    for batch in read_ahead(samples, [[i] for i in range(10)]):
        assert len(samples._reading) == 1
        _ = samples[batch[0]]
    for _ in read_ahead(samples, [[i] for i in range(10)]):
        break
    assert not samples._reading


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vertices per batch", "own arrays and variants", "pairs"])
@pytest.mark.parametrize("capture", [False, True])
def test_streamed_runs_on_a_gpu_equal_resident_ones(
    tmp_path: Path, name: str, capture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, given = RUNS[name]
    found = []
    for place, fits in (("resident", True), ("streamed", False)):
        if not fits:
            monkeypatch.setattr(resident, "first_that_fit", lambda sizes, limit: np.zeros(len(sizes), bool))
        out = tmp_path / place
        run_training(
            loaded(tmp_path, kind),
            replace(TrainOptions(**{**SMALL, **given}), k=16),
            out,
            device=torch.device("cuda"),
            cache_dir=tmp_path / "cache",
            capture=capture,
            console=Console(quiet=True),
        )
        found.append(load_checkpoint(out / "last.pt"))
    assert_equal(*found)
