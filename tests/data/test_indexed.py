"""Data sets that are read when they are needed: their index, its faults, files that change, and their samples."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from refusals import refused
from set_files import same_items
from shapes import ellipsoid
from torch.utils.data import DataLoader

from diffnet.data import (
    DataError,
    MeshBatches,
    MeshSamples,
    Preprocessing,
    array_statistics,
    collate_samples,
    fill_cache,
    index_classes,
    index_dataset,
    index_targets,
    load_classes,
    load_dataset,
    make_sample,
)
from diffnet.data.folders import index
from diffnet.data.folders.index import index_path
from diffnet.data.prepared import PreparedSamples
from diffnet.data.stored import OnDemand
from diffnet.geometry import file_state, load_mesh, mesh_edges
from diffnet.viz import write_ply

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*look shuffled")]

SIZES = {"a": 1, "b": 2, "c": 1, "d": 1, "e": 2}  # subdivisions; a, b and c are for training


def write_set(root: Path, kind: str = "vertices") -> Path:
    """A set of five ellipsoids whose labels are of one kind."""
    for seed, (name, detail) in enumerate(SIZES.items()):
        mesh = ellipsoid(seed, detail)
        part = root / ("train" if name < "d" else "test")
        part.mkdir(parents=True, exist_ok=True)
        elements = {"edges": mesh_edges(mesh.faces), "vertices": np.arange(len(mesh.verts))[:, None]}
        labels = (mesh.verts[elements.get(kind, mesh.faces), 0].mean(1) > 0) * 7 + 3 - 4 * (seed == 1)
        solid = trimesh.Trimesh(mesh.verts, mesh.faces, process=False)
        if kind == "colors":
            colors = np.eye(3, dtype=np.uint8)[(mesh.verts[:, 2] > 0) * 1 + (seed == 2)] * 255
            solid.visual = trimesh.visual.ColorVisuals(solid, vertex_colors=colors)
        solid.export(part / f"{name}.{'obj' if kind == 'edges' else 'ply'}")
        if kind == "parts":
            split = len(mesh.faces) // 3
            faces = [" ".join(map(str, range(*bounds))) for bounds in ((1, split), (split, len(mesh.faces)))]
            part.joinpath(f"{name}_labels.txt").write_text(f"arm\n{faces[0]}\nhand {seed % 2}\n{faces[1]}\n")
        elif kind == "edges":
            (root / "seg").mkdir(exist_ok=True)
            np.savetxt(root / "seg" / f"{name}.eseg", labels)
        elif kind != "colors":
            np.savetxt(part / f"{name}.txt", labels, fmt="%d")
    return root


def assert_same_set(data: Any, expected: Any) -> None:
    for part, whole in ((data.train, expected.train), (data.test, expected.test)):
        assert part.vertex_counts.tolist() == [len(item.mesh.verts) for item in whole]
        assert part.face_counts.tolist() == [len(item.mesh.faces) for item in whole]
        same_items(part, whole)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read for an index."""
    names: list[str] = []
    plain = index.read_file

    def noted(kind: str, path: Path, cache_dir: Any) -> Any:
        names.append(path.name)
        return plain(kind, path, cache_dir)

    monkeypatch.setattr(index, "read_file", noted)
    return names


@pytest.mark.parametrize("kind", ["vertices", "faces", "edges", "parts", "colors"])
def test_items_are_those_of_load_dataset(tmp_path: Path, read: list[str], kind: str) -> None:
    root = write_set(tmp_path / "set", kind)
    expected = load_dataset(root)
    for stored in (False, True):
        data = index_dataset(root, tmp_path / "cache")
        assert (len(read) == 10) != stored
        read.clear()
        assert data.label_names == expected.label_names
        assert (data.labels_at, data.label_numbers) == (expected.labels_at, expected.label_numbers)
        assert_same_set(data, expected)
    assert [item.name for item in data.train[1:]] == ["b", "c"]


@pytest.mark.parametrize("form", ["folders", "table"])
def test_classes_are_those_of_load_classes(tmp_path: Path, read: list[str], form: str) -> None:
    root = tmp_path / "set"
    for seed in range(6):
        mesh = ellipsoid(seed, 1 + seed % 2)
        place = root / ("cat", "dog")[seed % 2] / f"{seed}.ply"
        place.parent.mkdir(parents=True, exist_ok=True)
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(place)
    if form == "table":
        root = root / "labels.csv"
        rows = [f"{('cat', 'dog')[i % 2]}/{i}.ply,{i // 2},{'train' if i % 2 else 'test'}\n" for i in range(6)]
        root.write_text("".join(rows))
    expected = load_classes(root)
    for _ in range(2):
        data = index_classes(root, tmp_path / "cache")
        assert (data.label_names, data.labels_at, data.label_numbers) == (expected.label_names, "meshes", None)
        assert_same_set(data, expected)
    assert len(read) == 6
    options = Preprocessing(k=8, features="xyz")
    assert MeshSamples(data.test, options)[0].labels.tolist() == [int(expected.test[0].labels)]
    assert [int(item.labels) for item in data.train[1:]] == [int(item.labels) for item in expected.train[1:]]


def test_files_that_changed_are_read_again(tmp_path: Path, read: list[str]) -> None:
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    old = index_dataset(root, cache)
    read.clear()
    labels = root / "train" / "b.txt"
    labels.write_text(labels.read_text().replace("6", "5"))
    shutil.copy(root / "train" / "a.ply", root / "train" / "new.ply")
    shutil.copy(root / "train" / "a.txt", root / "train" / "new.txt")
    data = index_dataset(root, cache)
    assert read == ["new.ply", "b.txt", "new.txt"]
    assert data.label_names == ["3", "5", "10"]
    np.testing.assert_array_equal(data.train[1].labels, load_dataset(root).train[1].labels)
    with pytest.raises(DataError, match=r"b\.txt: the file has changed since the data set was indexed"):
        old.train[1]
    (root / "train" / "c.ply").unlink()
    with pytest.raises(DataError, match=r"c\.ply: the file can't be read \(No such file"):
        data.train[2]


def test_a_bad_file_is_named_and_the_others_are_known(tmp_path: Path, read: list[str]) -> None:
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    (root / "train" / "b.ply").write_text("ply\nnothing")
    (root / "test" / "e.txt").write_text("1\nx")
    with pytest.raises(DataError, match=r"^2 of 5 meshes can't be used: .*b\.ply: .*; .*e\.txt, line 2: 'x' is not"):
        index_dataset(root, cache)
    write_set(root)
    read.clear()
    index_dataset(root, cache)
    assert {"b.ply", "e.txt"} <= set(read)  # and files that were written again
    (root / "test" / "e.txt").write_text("1\n2\n")
    refused(DataError, r"e\.txt: 2 labels, but .*e\.ply has 162 vertices and 320 faces", index_dataset, root, cache)


def test_a_folder_may_be_given_in_several_ways(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = index_dataset(write_set(tmp_path / "set"), tmp_path / "cache").train
    read.clear()
    monkeypatch.chdir(tmp_path)
    same = index_dataset("set", "cache").train
    assert read == []
    assert same.file(0) != whole.file(0)
    assert (same.key, same.digest(0)) == (whole.key, whole.digest(0))
    os.utime(tmp_path / same.file(0), (0, 0))
    touched = index_dataset("set", "cache").train
    assert (touched.key, touched.digest(0)) == (same.key, same.digest(0))
    assert read == []


def test_a_damaged_index_is_made_again(tmp_path: Path, read: list[str]) -> None:
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    index_dataset(root, cache)
    place = index_path(root, cache)
    content = bytearray(place.read_bytes())
    content[-40] ^= 1
    place.write_bytes(content)
    os.utime(place)
    read.clear()
    with pytest.warns(UserWarning, match=rf"{place.name} can't be read"):
        assert len(index_dataset(root, cache).train) == 3
    assert len(read) == 10
    assert len(index_dataset(root, cache).train) == 3
    assert len(read) == 10


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    root, blocked = write_set(tmp_path / "set"), tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match=r"the cache folder .*cache can't be written \(Not a directory\)") as found:
        first = index_dataset(root, blocked / "cache").train[0]
    assert first.name == "a"
    assert len(found) == 1


def test_an_index_keeps_what_another_process_adds(tmp_path: Path, read: list[str]) -> None:
    """Here, the other process indexes the test part while this one reads the files of the whole set."""
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    (root / "test" / "more.ply").symlink_to(root / "test" / "e.ply")
    (root / "test" / "more.txt").symlink_to(root / "test" / "e.txt")
    index_dataset(root, cache, needs_train=False)
    assert len(read) == 6
    place = index_path(root, cache)
    shutil.move(place, other := tmp_path / "other")
    (root / "test" / "more.ply").rename(tmp_path / "more.ply")
    (root / "test" / "more.txt").rename(tmp_path / "more.txt")
    noted = index.describe_file

    def meanwhile(work: Any, cache_dir: Any) -> Any:
        result = noted(work, cache_dir)
        if not (root / "test" / "more.ply").exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(other, place)
            (tmp_path / "more.ply").rename(root / "test" / "more.ply")
            (tmp_path / "more.txt").rename(root / "test" / "more.txt")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "describe_file", meanwhile)
        index_dataset(root, cache)
    read.clear()
    assert len(index_dataset(root, cache).test) == 3
    assert read == []


def test_worker_processes_build_the_same_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_set(tmp_path / "set")
    expected = index_dataset(root, tmp_path / "one", jobs=1)
    monkeypatch.setattr(index, "CHUNK", 3)
    assert_same_set(index_dataset(root, tmp_path / "two", jobs=2), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_in_a_data_loader(tmp_path: Path, workers: int) -> None:
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    for mesh in root.glob("*/*.ply"):
        np.save(mesh.with_suffix(".shade.npy"), np.arange(len(trimesh.load(mesh).vertices)) % 5)
    options = Preprocessing(k=8, features="xyz+file:shade")
    train = index_dataset(root, cache).train
    whole = load_dataset(root).train
    assert fill_cache(train.paths, options, cache, jobs=1) == {}
    assert len(list(cache.rglob("*.operators.*"))) == 3
    statistics = array_statistics(train, options.features)
    assert statistics == array_statistics(whole, options.features)
    samples = MeshSamples(train, options, cache, statistics)
    assert len(pickle.dumps(samples)) < 5000
    batches = MeshBatches(samples.vertex_counts, max_vertices=90, shuffle=True)
    batches.set_epoch(3)
    order = list(batches)
    batches.set_epoch(3)
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate_samples, num_workers=workers)
    for chosen, batch in zip(order, loader, strict=True):
        expected = collate_samples([make_sample(whole[i], options, statistics=statistics) for i in chosen])
        assert batch.names == expected.names
        for name in ("features", "labels"):
            torch.testing.assert_close(getattr(batch, name), getattr(expected, name), rtol=0, atol=0)
        torch.testing.assert_close(batch.operators.evecs, expected.operators.evecs, rtol=0, atol=0)
    assert len(list(cache.rglob("*.operators.*"))) == 3  # those were used


def test_an_index_error_of_an_item_is_not_the_end() -> None:
    refused(IndexError, "list index", list, OnDemand(2, lambda i: [1][i]))


def write_with_arrays(root: Path) -> Path:
    """Two training meshes and a test mesh with labels, an own array and a target at each vertex."""
    for seed, place in enumerate(("train/a", "train/b", "test/c")):
        mesh = ellipsoid(seed, 1)
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        write_ply(path.with_suffix(".ply"), mesh)
        path.with_suffix(".txt").write_text("0\n" * 20 + "1\n" * (len(mesh.verts) - 20))
        np.save(f"{path}.shade.npy", mesh.verts[:, 0])
        np.save(f"{path}.depth.npy", mesh.verts[:, 2])
    return root


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Replace a file by another one of the same size and time of modification, as `cp -p` or `rsync -t` do."""
    before = path.stat()
    write(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have just been written are settled, as those of other people are."""
    monkeypatch.setattr(file_state, "SETTLED", -1)


@pytest.mark.usefixtures("settled")
def test_replaced_files_give_what_an_empty_cache_gives(tmp_path: Path) -> None:
    root, cache = write_with_arrays(tmp_path / "set"), tmp_path / "cache"
    index_targets(root, cache, "file:depth")
    before = index_dataset(root, cache)
    array_statistics(before.train, "file:shade")
    replace_file(root / "train" / "a.txt", lambda path: path.write_text(path.read_text().replace("1", "2")))
    replace_file(root / "train" / "b.ply", lambda path: write_ply(path, ellipsoid(7, 1)))
    replace_file(root / "train" / "b.shade.npy", lambda path: np.save(path, 3 * np.load(path)))
    replace_file(root / "test" / "c.depth.npy", lambda path: np.save(path, 3 * np.load(path)))
    now, afresh = (index_dataset(root, folder) for folder in (cache, tmp_path / "empty"))
    assert now.label_names == afresh.label_names == ["0", "1", "2"]
    assert now.train.key == afresh.train.key
    same_items(now.train, load_dataset(root).train)
    assert array_statistics(now.train, "file:shade") == array_statistics(afresh.train, "file:shade")
    both = [index_targets(root, folder, "file:depth").test for folder in (cache, tmp_path / "empty")]
    np.testing.assert_array_equal(both[0][0].labels, both[1][0].labels)
    np.testing.assert_allclose(both[0][0].labels[:, 0], 3 * ellipsoid(2, 1).verts[:, 2])


@pytest.mark.usefixtures("settled")
def test_a_copy_with_its_cache_is_recognized_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have other inodes and times. Afterwards, their state is enough."""
    root, cache = write_with_arrays(tmp_path / "set"), tmp_path / "cache"
    before = index_dataset(root, cache)
    for folder in (root, cache):
        shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(folder)
        (tmp_path / "copy").rename(folder)
    with monkeypatch.context() as patch:
        patch.setattr(index, "read_file", None)
        again = index_dataset(root, cache)
        assert (again.train.key, again.train.digest(1)) == (before.train.key, before.train.digest(1))
        assert len(before.train[0].labels)  # a set that is open goes on
        patch.setattr(file_state, "hash_of_content", None)
        index_dataset(root, cache)


@pytest.mark.usefixtures("settled")
def test_buffers_of_gltf_files_count(tmp_path: Path) -> None:
    scene = trimesh.Scene(trimesh.creation.icosphere(1))
    for name, content in scene.export(file_type="gltf", merge_buffers=True).items():
        (tmp_path / name).write_bytes(content)
    path, (buffer,) = tmp_path / "model.gltf", tmp_path.glob("*.bin")
    before, first = file_state.file_identity(path), load_mesh(path, tmp_path / "cache").verts
    values = np.frombuffer(buffer.read_bytes(), "<f4").copy()
    values[-3:] *= 2  # of positions, which come after the faces
    replace_file(buffer, lambda file: file.write_bytes(values.tobytes()))
    assert file_state.file_identity(path, before).content != before.content
    assert not np.array_equal(load_mesh(path, tmp_path / "cache").verts, first)


def test_a_cache_of_another_user_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that were written with umask 077 give one warning for reading and one for writing."""
    root, cache = write_with_arrays(tmp_path / "set"), tmp_path / "cache"
    options = Preprocessing(k=8, features="log-hks")

    def samples() -> PreparedSamples:
        items = index_dataset(root, cache).train
        prepared = PreparedSamples(items, options, cache, None, "vertices", 2**30)
        return prepared.fill(lambda sources, ready: fill_cache(sources, options, cache, 1, ready=ready))

    before = list(samples())
    refused, access = {"open": Path.open, "touch": Path.touch}, os.access

    def refusing(name: str) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.is_relative_to(cache):
                raise PermissionError(13, "Permission denied", str(path))
            return refused[name](path, *arguments, **options)

        return call

    for name in refused:
        monkeypatch.setattr(Path, name, refusing(name))
    monkeypatch.setattr(os, "access", lambda path, *mode: cache not in Path(path).parents and access(path, *mode))
    with pytest.warns(UserWarning, match="can't be") as found:
        features = [sample.features for sample in samples()]
    torch.testing.assert_close(features, [sample.features for sample in before], rtol=0, atol=0)
    texts = [str(each.message) for each in found if "cache folder" in str(each.message)]
    assert texts == [
        f"entries of the cache folder {cache} can't be read and are computed again (Permission denied)",
        f"entries of the cache folder {cache} can't be written (Permission denied)",
    ]
