"""Files, arrays and orientations of other people: nothing wrong without a word."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shapes import ellipsoid

from diffnet.data import (
    DataError,
    LabeledMesh,
    Preprocessing,
    array_statistics,
    augmented,
    feature_parts,
    fill_cache,
    index_dataset,
    index_targets,
    load_dataset,
    make_sample,
    own_arrays,
    rotate_vectors,
    vector_channels,
)
from diffnet.data.folders import index
from diffnet.data.folders.indexed import IndexedMeshes
from diffnet.data.prepared import PreparedSamples, prepared_samples
from diffnet.geometry import file_state, load_mesh, make_mesh, random_rotations
from diffnet.geometry.errors import OptionError
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import check_own_arrays
from diffnet.viz import write_ply

EYE = np.eye(3)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*look shuffled"),
]


def write_set(root: Path, label: int = 1) -> Path:
    """Two training meshes and a test mesh with labels, an own array and a target at each vertex."""
    for seed, place in enumerate(("train/a", "train/b", "test/c")):
        mesh = ellipsoid(seed, 1)
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        write_ply(path.with_suffix(".ply"), mesh)
        path.with_suffix(".txt").write_text("0\n" * 20 + f"{label}\n" * (len(mesh.verts) - 20))
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
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    index_targets(root, cache, "file:depth")
    before = index_dataset(root, cache)
    array_statistics(before.train, "file:shade")
    replace_file(root / "train" / "a.txt", lambda path: path.write_text(path.read_text().replace("1", "2")))
    replace_file(root / "train" / "b.ply", lambda path: write_ply(path, ellipsoid(7, 1)))
    replace_file(root / "train" / "b.shade.npy", lambda path: np.save(path, 3 * np.load(path)))
    replace_file(root / "test" / "c.depth.npy", lambda path: np.save(path, 3 * np.load(path)))
    now, afresh = (index_dataset(root, folder) for folder in (cache, tmp_path / "empty"))
    assert now.label_names == afresh.label_names == ["0", "1", "2"]
    assert isinstance(now.train, IndexedMeshes)
    assert isinstance(afresh.train, IndexedMeshes)
    assert now.train.key == afresh.train.key
    for item, other in zip(now.train, load_dataset(root).train, strict=True):
        np.testing.assert_array_equal(item.labels, other.labels)
        np.testing.assert_array_equal(item.mesh.verts, other.mesh.verts)
    assert array_statistics(now.train, "file:shade") == array_statistics(afresh.train, "file:shade")
    both = [index_targets(root, folder, "file:depth").test for folder in (cache, tmp_path / "empty")]
    np.testing.assert_array_equal(both[0][0].labels, both[1][0].labels)
    np.testing.assert_allclose(both[0][0].labels[:, 0], 3 * ellipsoid(2, 1).verts[:, 2])


@pytest.mark.usefixtures("settled")
def test_a_copy_with_its_cache_is_recognized_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have other inodes and times. Afterwards, their state is enough."""
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    before = index_dataset(root, cache)
    for folder in (root, cache):
        shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(folder)
        (tmp_path / "copy").rename(folder)
    with monkeypatch.context() as patch:
        patch.setattr(index, "read_file", None)
        again = index_dataset(root, cache)
        assert isinstance(again.train, IndexedMeshes)
        assert isinstance(before.train, IndexedMeshes)
        assert (again.train.key, again.train.digest(1)) == (before.train.key, before.train.digest(1))
        assert len(before.train[0].labels)  # a set that is open goes on
        patch.setattr(file_state, "hash_of_content", None)
        index_dataset(root, cache)


@pytest.mark.usefixtures("settled")
def test_buffers_of_gltf_files_count(tmp_path: Path) -> None:
    mesh = ellipsoid(0, 1)
    parts = [mesh.verts.astype("<f4").tobytes(), mesh.faces.astype("<u2").tobytes()]
    views = [{"buffer": 0, "byteOffset": 0, "byteLength": len(parts[0])}]
    views.append({"buffer": 0, "byteOffset": len(parts[0]), "byteLength": len(parts[1])})
    sizes = {"count": len(mesh.verts), "min": mesh.verts.min(0).tolist(), "max": mesh.verts.max(0).tolist()}
    header = {
        "asset": {"version": "2.0"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1}]}],
        "accessors": [
            {"bufferView": 0, "componentType": 5126, "type": "VEC3", **sizes},
            {"bufferView": 1, "componentType": 5123, "type": "SCALAR", "count": mesh.faces.size},
        ],
        "bufferViews": views,
        "buffers": [{"uri": "a.bin", "byteLength": sum(map(len, parts))}],
    }
    path = tmp_path / "a.gltf"
    path.write_text(json.dumps(header))
    (tmp_path / "a.bin").write_bytes(b"".join(parts))
    before = file_state.file_identity(path)
    assert len(load_mesh(path, tmp_path / "cache").verts) == 42
    replace_file(tmp_path / "a.bin", lambda file: file.write_bytes((2 * mesh.verts).astype("<f4").tobytes() + parts[1]))
    assert file_state.file_identity(path, before).content != before.content
    np.testing.assert_allclose(load_mesh(path, tmp_path / "cache").verts, 2 * mesh.verts, rtol=1e-6)


def test_a_cache_of_another_user_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that were written with umask 077 give one warning for reading and one for writing."""
    root, cache = write_set(tmp_path / "set"), tmp_path / "cache"
    options = Preprocessing(k=8, features="log-hks")

    def samples() -> PreparedSamples:
        items = index_dataset(root, cache).train
        return prepared_samples(
            items,
            options,
            cache,
            None,
            "vertices",
            lambda sources, ready: fill_cache(sources, options, cache, 1, ready=ready),
            memory=2**30,
        )

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


def windy(seed: int, turn: np.ndarray = EYE, **more: np.ndarray) -> LabeledMesh:
    """A turned shape without symmetries with a wind, which turns with it, and other own arrays."""
    mesh = ellipsoid(seed, 2)
    verts = mesh.verts + 0.2 * np.exp(mesh.verts)
    own = make_mesh(verts @ turn, mesh.faces if np.linalg.det(turn) > 0 else mesh.faces[:, ::-1])
    wind = np.cross(mesh.verts, [0.3, 0.5, 1.0]) + np.array([5.0, 0, 0])
    return LabeledMesh("", own, np.zeros(len(mesh.verts), np.int64), arrays={"wind": wind @ turn, **more})


@pytest.mark.parametrize("align", [False, True])
def test_vectors_turn_with_the_mesh_in_features(align: bool) -> None:
    """Features of a turned mesh are the turned features, and in principal axes they stay."""
    turn = random_rotations(1, torch.Generator().manual_seed(0))[0].double().numpy()
    options = Preprocessing(k=8, features="vector:wind+log-hks+xyz+normals+curvature+scalar:side", align=align)
    rest = {"side": np.arange(162.0)}
    statistics = array_statistics([windy(0, **rest), windy(1, **rest)], options.features)
    assert len(set(statistics["wind"]["std"])) == 1
    before, after = (make_sample(windy(0, own, **rest), options, statistics=statistics) for own in (EYE, turn))
    vectors = vector_channels(options.features)
    assert vectors == [slice(0, 3), slice(3, 6), slice(6, 9)]
    expected = before.features
    if not align:
        expected = rotate_vectors(
            expected, vectors, torch.tensor(turn, dtype=torch.float32)[None], before.operators.ptr
        )
    torch.testing.assert_close(after.features, expected, rtol=1e-3, atol=1e-3)


def test_vectors_turn_and_mirror_with_the_mesh_in_training() -> None:
    """What training changes at random gives the features of the changed mesh. The size of a mesh doesn't count."""
    features = "xyz+vector:wind"
    options = Preprocessing(k=8, features=features)
    turn, flip = random_rotations(1, torch.Generator().manual_seed(1)), np.diag([-1.0, 1, 1])
    sample = make_sample(windy(0), options)
    for changes, place in (
        ({"rotations": turn}, turn[0].double().numpy()),
        ({"mirror": torch.tensor([True])}, flip),
        ({"mirror": torch.tensor([True]), "rotations": turn}, flip @ turn[0].double().numpy()),
    ):
        found = augmented(sample, features, **changes).features
        torch.testing.assert_close(found, make_sample(windy(0, place), options).features, rtol=1e-4, atol=1e-4)
    larger = augmented(sample, features, factors=torch.tensor([2.0]))
    torch.testing.assert_close(larger.features[:, 3:], sample.features[:, 3:])


def test_three_columns_without_a_word_are_refused_where_meshes_turn() -> None:
    message = "file:wind has three columns, .* turns with the mesh, it is vector:wind. .*, it is scalar:wind"
    items = [windy(0, colors=np.zeros((162, 3)))]
    for own in ("file:wind", "file:wind+file:colors", "scalar:wind", "vector:wind", "file:colors"):
        features = "xyz+" + own
        sample = make_sample(items[0], Preprocessing(k=8, features=features))
        for given in ({}, {"rotate": False, "mirror": True}, {"rotate_about": "z"}, {"align": True}):
            options = TrainOptions(
                task="correspondence" if "align" in given else "segmentation", features=features, **given
            )
            with pytest.raises(OptionError, match=message) if "file:wind" in own else nullcontext():
                check_own_arrays(items, options)
        check_own_arrays(items, TrainOptions(features=features, rotate=False))
        if own in ("file:wind", "vector:wind"):
            with pytest.raises(OptionError, match=message) if own == "file:wind" else nullcontext():
                augmented(sample, features, mirror=torch.tensor([True]))
    with pytest.raises(DataError, match="vector:colors has 2 channels in the array, a vector has 3"):
        own_arrays(items[0].mesh, "vector:colors", given={"colors": np.zeros((162, 2))})
    with pytest.raises(OptionError, match="each part once, got 'wind' twice"):
        feature_parts("vector:wind+file:wind")


def test_mirroring_names_own_scalars_of_both_signs() -> None:
    yaw, size = np.linspace(-1, 1, 162), np.linspace(0, 1, 162)
    options = TrainOptions(features="file:yaw+scalar:size+vector:wind", mirror=True)
    with pytest.warns(UserWarning, match="^--mirror leaves the values of file:yaw as they are, which have both signs"):
        check_own_arrays([windy(0, yaw=yaw, size=size)], options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_own_arrays([windy(0, yaw=yaw, size=size)], replace(options, mirror=False))
        check_own_arrays([windy(0, yaw=-size, size=size)], options)
