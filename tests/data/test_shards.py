"""Data sets in shards: what is read is what was written, and every fault is an error that names the file."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import fsspec
import numpy as np
import pytest
import torch
from copies import ends_of_copies
from operator_checks import assert_same
from refusals import refused
from safetensors.numpy import load
from set_files import MIXED
from shapes import ellipsoid
from torch.utils.data import DataLoader

from diffnet.data import (
    DataError,
    LabeledMesh,
    LabeledMeshes,
    MeshBatches,
    MeshSamples,
    Preprocessing,
    ShardedDataset,
    collate_samples,
    load_shards,
    make_sample,
    write_shards,
)
from diffnet.data.conversion import with_labels_at
from diffnet.data.shards import reading, writing
from diffnet.data.shards.archives import TABLE, parsed_table, table_blob
from diffnet.data.shards.reading import INDEX, SUFFIX, is_shards
from diffnet.data.shards.records import check_mesh
from diffnet.data.stored import content_hash
from diffnet.geometry import file_edges, load_mesh, make_mesh, mesh_edges
from diffnet.geometry.errors import OptionError
from diffnet.geometry.folder_lock import locked
from diffnet.train.run_checks import DIGITS, contents_of

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Preprocessing(k=6, features="xyz")


def small_set() -> LabeledMeshes:
    """Five ellipsoids of two sizes, three of them for training, with labels at vertices."""
    items = []
    for seed in range(5):
        mesh = replace(ellipsoid(seed, 1 + seed % 2), name=f"{seed}")
        items.append(LabeledMesh(f"{seed}", mesh, (mesh.verts[:, 0] > 0) * 2 - (mesh.verts[:, 1] > 0.3) * 1))
    return LabeledMeshes(items[:3], items[3:], ["a", "b", "c"], "vertices", [3, 7, 9])


def written(folder: Path, data: LabeledMeshes | None = None, options: Preprocessing = OPTIONS) -> Path:
    """A folder of shards. Small meshes take one shard, unless SHARD_BYTES is patched."""
    assert write_shards(data or small_set(), folder, options, folder.with_name("cache"), jobs=1) == {}
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shards of `small_set`."""
    return written(tmp_path / "set")


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"[!.]*{SUFFIX}"))


def assert_equal_items(items: Sequence[LabeledMesh], expected: Sequence[LabeledMesh]) -> None:
    for item, other in zip(items, expected, strict=True):
        assert item.name == other.name
        assert item.mesh.polygon_count == other.mesh.polygon_count
        for name in ("verts", "faces", "polygons", "normals", "sizes", "corners"):
            torch.testing.assert_close(*(getattr(x.mesh, name) for x in (item, other)), rtol=0, atol=0)
        np.testing.assert_array_equal(item.labels, other.labels)
        assert item.labels.shape == other.labels.shape


def point_cloud() -> LabeledMesh:
    points = np.random.default_rng(0).normal(size=(300, 3))
    mesh = make_mesh(points, None, name="points", normals=points)
    return LabeledMesh("points", mesh, np.array(1, np.int64))


def grid() -> LabeledMesh:
    """Quads, whose cuts are no edges."""
    quads = [[4 * i + j, 4 * i + j + 4, 4 * i + j + 5, 4 * i + j + 1] for i in range(3) for j in range(3)]
    mesh = load_mesh((np.array([[i, j, 0.1 * i * j] for i in range(4) for j in range(4)]), np.array(quads)))
    labels = np.where(np.isin(np.arange(33), file_edges(mesh)), 1, -1)
    assert (len(mesh_edges(mesh.faces)), (labels == 1).sum()) == (33, 24)
    return LabeledMesh(mesh.name, mesh, labels)


CASES: dict[str, tuple[LabeledMesh, Any]] = {
    "edges of quads": (grid(), "edges"),
    "vertices": (small_set().train[0], "vertices"),
    "faces": (LabeledMesh("quads", make_mesh(MIXED[0], MIXED[1][::2], name="quads"), np.arange(4) % 2), "faces"),
    "meshes": (point_cloud(), "meshes"),
    "targets": (replace(small_set().train[0], labels=np.random.default_rng(0).normal(size=(42, 3))), "vertices"),
    "target of a mesh": (replace(point_cloud(), labels=np.array([[0.5, np.nan, 3]])), "meshes"),
}


def test_conditions_are_refused(tmp_path: Path) -> None:
    data = replace(small_set(), condition_names=("age",))
    refused(
        DataError, "shards have no conditions, such as age", write_shards, data, tmp_path / "set", OPTIONS, tmp_path
    )


@pytest.mark.parametrize("basis", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_items_and_samples_are_those_of_the_set(tmp_path: Path, case: str, basis: Any) -> None:
    item, at = CASES[case]
    options = replace(OPTIONS, basis=basis, features="xyz+normals+wks")
    data = load_shards(written(tmp_path / "set", LabeledMeshes([item], [item], ["a", "b", "c"], at), options))
    assert (data.label_names, data.labels_at, data.label_numbers) == (["a", "b", "c"], at, None)
    for part in (data.train, data.test):
        assert part.vertex_counts.tolist() == [len(item.mesh.verts)]
        assert part.face_counts.tolist() == [len(item.mesh.faces)]
        assert part.names == [item.name]
        assert contents_of(part)[0][0] == content_hash(item.mesh.verts, item.mesh.faces)[:DIGITS]
        assert_equal_items(part, [item])
    found, expected = make_sample(data.train[0], options), make_sample(item, options)
    edges = len(mesh_edges(item.mesh.faces)) if at == "edges" else 0
    sizes = len(item.mesh.verts), len(item.mesh.faces), edges, expected.operators.gradient.pattern.nnz
    facts = (item.name, "", "", *sizes)
    assert data.train.operator_facts() == [facts]
    for name in ("features", "labels"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)
    assert_same(found.operators, expected.operators)
    if at == "edges":
        assert with_labels_at(data, "faces").train[0].labels.tolist() == [1] * 18
        np.testing.assert_array_equal(file_edges(data.train[0].mesh), file_edges(item.mesh))


def test_own_arrays_are_in_the_shards(tmp_path: Path) -> None:
    data = small_set()
    items = [replace(item, arrays={"shade": item.mesh.verts[:, :2] / 7}) for item in data.train]
    options = replace(OPTIONS, features="xyz+file:shade")
    found = load_shards(written(tmp_path / "set", replace(data, train=items, test=items), options))
    np.testing.assert_array_equal(found.test[1].arrays["shade"], items[1].arrays["shade"])
    torch.testing.assert_close(make_sample(found.train[2], options).features, make_sample(items[2], options).features)
    other = load_shards(written(tmp_path / "other"))
    with pytest.raises(OptionError, match=r"features are xyz\+file:shade, and .*other have no own arrays"):
        other.train.check_options(options)


def test_shards_are_archives_of_safetensors_files(folder: Path) -> None:
    """Other programs read them, and arrays begin at multiples of 64 bytes in the file."""
    data = load_shards(folder)
    (shard,) = shards_of(folder)
    with ZipFile(shard) as archive:
        assert archive.testzip() is None
        members = [member.filename for member in archive.infolist()]
        assert members == [*(f"{i}.{kind}.safetensors" for i in range(5) for kind in ("mesh", "operators")), TABLE]
        for i, item in enumerate(small_set().train):
            np.testing.assert_array_equal(load(archive.read(f"{i}.mesh.safetensors"))["labels"], item.labels)
            assert shard.read_bytes().find(archive.read(f"{i}.operators.safetensors")) % 64 == 0
            assert make_sample(data.train[i], OPTIONS).operators.evecs.data_ptr() % 64 == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_in_a_data_loader(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators come from several shards, and none is computed."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    data = load_shards(written(tmp_path / "set"))
    assert len(shards_of(tmp_path / "set")) > 1
    assert not list((tmp_path / "cache").rglob("*.operators.*"))
    samples = MeshSamples(data.train, OPTIONS, tmp_path / "cache")
    assert len(pickle.dumps(samples)) < 5000
    batches = MeshBatches(data.train.vertex_counts, max_vertices=210)
    loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate_samples, num_workers=workers)
    expected = [make_sample(item, OPTIONS) for item in small_set().train]
    for batch, chosen in zip(loader, batches, strict=True):
        own = collate_samples([expected[i] for i in chosen])
        assert batch.names == own.names
        assert_same(batch.operators, own.operators)
    assert not list((tmp_path / "cache").rglob("*.operators.*"))
    assert [item.name for item in data.train[1:]] == ["1", "2"]
    assert data.train[-1].name == "2"


@pytest.mark.parametrize(
    ("option", "value", "stored"), [("k", 7, 6), ("laplacian", "cotan", "robust"), ("normalize", "area", "radius")]
)
def test_other_options_name_both_values(folder: Path, option: str, value: Any, stored: Any) -> None:
    data = load_shards(folder)
    expected = rf"{option} is {value}, and the shards in .*set were written with {stored}\. Use .* --{option} {stored}"
    refused(OptionError, expected, make_sample, data.train[0], replace(OPTIONS, **{option: value}))
    with pytest.raises(DataError, match=r"set: its shards have options .*Choose another folder"):
        write_shards(small_set(), folder, replace(OPTIONS, **{option: value}), folder.with_name("cache"), jobs=1)


def times_of(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in shards_of(folder)}


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 16
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))


def read_all(data: ShardedDataset) -> None:
    for part in (data.train, data.test):
        for sample in MeshSamples(part, OPTIONS):
            assert sample.operators.k == 6


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 100), "It is truncated or another one"),
    "missing": (lambda file: file.unlink(), r"the shard can't be read \(No such file or directory\)"),
    "a flipped byte in a mesh": (lambda file: flip(file, 1500), "the record at byte 128 is damaged"),
    "a flipped byte in operators": (lambda file: flip(file, 9000), r"the record at byte \d{4} is damaged"),
    "a flipped byte in a header": (lambda file: flip(file, 128 + 40), "the record at byte 128 is damaged"),
    "a length beyond the file": (lambda file: flip(file, 128 + 6), "the record at byte 128 is damaged"),
}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_shard_is_named(folder: Path, fault: str, opened: bool) -> None:
    """Before the set is opened, and while it is used."""
    data = load_shards(folder)
    if opened:
        read_all(data)
    (shard,) = shards_of(folder)
    damage, message = FAULTS[fault]
    damage(shard)
    refused(DataError, rf"{shard}: .*{message}", read_all, data if opened else load_shards(folder))


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Or it is in the bytes between arrays, which are not read."""
    single = replace(small_set(), train=small_set().train[:1], test=[])
    (shard,) = shards_of(written(tmp_path / "set", single))
    content = shard.read_bytes()
    expected = make_sample(single.train[0], OPTIONS)
    noticed = 0
    begin, _, end = parsed_table((tmp_path / "set" / INDEX).read_bytes())[0]["ranges"][0].tolist()
    for place in np.random.default_rng(0).integers(begin, end, 150).tolist():
        flip(shard, place)
        os.utime(shard, ns=(place + 2, place + 2))
        try:
            found = make_sample(load_shards(tmp_path / "set").train[0], OPTIONS)
            torch.testing.assert_close(found.operators.evecs, expected.operators.evecs, rtol=0, atol=0)
            torch.testing.assert_close(found.features, expected.features, rtol=0, atol=0)
        except DataError:
            noticed += 1
        shard.write_bytes(content)
    assert noticed > 120


def changed_index(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """An index with a right checksum and other content, as of somebody who wants to do harm."""
    arrays, about = parsed_table((folder / INDEX).read_bytes())
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(arrays, about)
    (folder / INDEX).write_bytes(table_blob(arrays, about))


def test_shards_of_an_older_version(folder: Path) -> None:
    """They are no archives, but are read by their index. Vertices of no face counted in format 1."""
    (shard,) = shards_of(folder)
    old = folder / "old.shard"
    old.write_bytes(shard.read_bytes()[:-99])
    shard.unlink()
    changed_index(folder, lambda arrays, about: about.update(shards=[(old.name, old.stat().st_size)]))
    read_all(load_shards(folder))
    refused(DataError, rf"{old}: an earlier version of diffnet wrote this shard", written, folder)
    changed_index(folder, lambda arrays, about: about["settings"].update(format=2))
    read_all(load_shards(folder))
    changed_index(folder, lambda arrays, about: about["settings"].update(format=1))
    train = load_shards(folder).train
    refused(OptionError, r"normalize is radius, .* were written with all-radius", train.check_options, OPTIONS)
    train.check_options(replace(OPTIONS, normalize="all-radius"))


HARM: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "a shard elsewhere": (lambda a, b: b["shards"][0].__setitem__(0, "../x.shard"), "names files that are no shards"),
    "a range outside": (lambda a, b: a["ranges"].__setitem__((0, 2), 2**60), "ranges are not inside"),
    "a negative range": (lambda a, b: a["ranges"].__setitem__((0, 0), -5), "ranges are not inside"),
    "no such shard": (lambda a, b: a["shard"].__setitem__(0, 7), "in shards or parts that don't exist"),
    "too few rows": (lambda a, b: a.update(checksums=a["checksums"][1:]), "checksums should be"),
    "another dtype": (lambda a, b: a.update(digests=a["digests"].view(np.float64)), "digests should be .* int64"),
    "unknown labels": (lambda a, b: b["settings"].update(labels_at="corners"), "its labels are at 'corners'"),
    "another option": (lambda a, b: b["settings"]["options"].update(k="x"), "k should be an integer"),
    "another version": (lambda a, b: b["settings"].update(format=4), "another version of diffnet wrote it"),
    "no settings": (lambda a, b: b.pop("settings"), "KeyError|settings"),
}


@pytest.mark.parametrize("harm", HARM)
def test_an_index_is_checked(folder: Path, harm: str) -> None:
    change, message = HARM[harm]
    changed_index(folder, change)
    refused(DataError, rf"{INDEX}: the index can't be used .*({message})", load_shards, folder)


def test_other_sizes_than_in_the_index(folder: Path) -> None:
    changed_index(folder, lambda arrays, about: arrays["vertex_counts"].__iadd__(1))
    with pytest.raises(DataError, match=r"the record at byte 128 is damaged .*\(ValueError: verts should be"):
        read_all(load_shards(folder))
    arrays = {"verts": np.zeros((3, 3)), "faces": np.array([[0, 1, 3]])}
    refused(ValueError, "faces are not all from 0 to 2", check_mesh, arrays, 3, 1)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "missing"])
def test_a_damaged_index_is_named_and_written_again(folder: Path, damage: str) -> None:
    index, before = folder / INDEX, shards_of(folder)
    if damage == "flipped":
        flip(index, index.stat().st_size - 30)
    elif damage == "missing":
        index.unlink()
    else:
        os.truncate(index, 0 if damage == "empty" else 200)
    refused(DataError, rf"{INDEX}: the index (can't be used|of the shards is missing)", load_shards, folder)
    if damage == "missing":
        refused(DataError, r"the shards have no index.*it keeps complete shards", is_shards, folder)
    read_all(load_shards(written(folder)))
    assert shards_of(folder) == before


def test_two_writers(folder: Path) -> None:
    with locked(folder), pytest.raises(OptionError, match="set: another run writes to this folder"):
        written(folder)


def test_a_full_disk_loses_no_complete_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    folder, plain = tmp_path / "set", ZipFile.open

    def opened(archive: ZipFile, *arguments: Any, **options: Any) -> Any:
        if len(shards_of(folder)) == 1:
            raise OSError(28, "No space left on device")
        return plain(archive, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZipFile, "open", opened)
        refused(OSError, r"No space left on device: '.*\.writing\.shard\.zip'", written, folder)
    kept = times_of(folder)
    assert os.listdir(folder) == [file.name for file in kept]
    assert len(kept) == 1
    read_all(load_shards(written(folder)))
    assert times_of(folder).items() >= kept.items()


def killed_writer(folder: Path) -> None:
    add, count = writing._Writer.add, iter(range(9))  # a private name, whose calls tell which meshes are written

    def killed(self: Any, item: LabeledMesh, digest: int) -> None:
        add(self, item, digest)
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    writing._Writer.add = killed
    written(folder)


def test_a_killed_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    monkeypatch.setattr(writing, "SHARD_BYTES", 100_000)
    assert ends_of_copies(killed_writer, [(folder,)]) == [-signal.SIGKILL]
    kept = times_of(folder)
    assert len(kept) > 0
    found, plain = [], writing._Writer.add

    def add(self: Any, item: LabeledMesh, digest: int) -> None:
        found.append(item.name)
        plain(self, item, digest)

    monkeypatch.setattr(writing._Writer, "add", add)
    data = load_shards(written(folder))
    read_all(data)
    assert 0 < len(found) < 5
    assert times_of(folder).items() >= kept.items()
    assert_equal_items(data.train[::-1], small_set().train[::-1])
    assert_equal_items(data.test, small_set().test)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_new_and_changed_meshes_are_added(tmp_path: Path) -> None:
    data = small_set()
    written(tmp_path / "set", replace(data, test=data.test[:1]))
    (first,) = shards_of(tmp_path / "set")
    changed = replace(data.train[1], labels=data.train[0].labels[:1].repeat(162))
    found = load_shards(written(tmp_path / "set", replace(data, train=[data.train[0], changed])))
    assert len(shards_of(tmp_path / "set")) == 2
    assert first.is_file()
    assert [len(part) for part in (found.train, found.test)] == [2, 2]
    assert_equal_items(found.train[1:], [changed])
    assert_equal_items(found.test, data.test)
    flip(first, -3)
    with pytest.warns(UserWarning, match=rf"{first}: the shard is damaged, and its meshes are written again"):
        read_all(load_shards(written(tmp_path / "set", data)))


def test_entries_that_were_in_the_cache_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    make_sample(small_set().train[0], OPTIONS, cache)
    (entry,) = cache.rglob("*.operators.*")
    os.utime(entry, ns=(1, 1))
    written(tmp_path / "set")
    assert list(cache.rglob("*.operators.*")) == [entry]


def test_a_mesh_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    data = small_set()
    flat = replace(data.train[1], mesh=make_mesh(np.zeros((162, 3)), data.train[1].mesh.faces, name="flat"))
    some = replace(data, train=[data.train[0], flat])
    failed = write_shards(some, tmp_path / "set", OPTIONS, tmp_path / "cache", jobs=1)
    assert list(failed) == [1]
    assert failed[1].startswith("flat: ")
    assert load_shards(tmp_path / "set").train.names == ["0"]
    with pytest.raises(DataError, match=r"no mesh of the set can be used\. flat: "):
        write_shards(replace(data, train=[flat], test=[]), tmp_path / "bad", OPTIONS, tmp_path / "cache", jobs=1)


FILES = fsspec.filesystem("memory")


def remote_copy(folder: Path) -> str:
    """The URL of a copy."""
    url = f"memory://{folder.parent.name}"
    FILES.put(str(folder), url, recursive=True)
    return url


@pytest.fixture
def remote(folder: Path) -> tuple[str, str]:
    """A URL with shards, and the path of its shard."""
    url = remote_copy(folder)
    return url, next(path for path in FILES.find(url) if path.endswith(SUFFIX))


def test_remote_items_are_copied_once(tmp_path: Path, remote: tuple[str, str]) -> None:
    url, shard = remote
    data = load_shards(url, tmp_path / "copies")
    read_all(data)
    assert len(list((tmp_path / "copies").rglob("*.shard.safetensors"))) == 10
    FILES.rm(shard)
    read_all(data)
    flip(next((tmp_path / "copies").rglob("*.shard.safetensors")), 1500)
    with (
        pytest.warns(UserWarning, match="cache entry .*can't be read"),
        pytest.raises(DataError, match=rf"{url}/\w+\.shard\.zip: the shard is missing"),
    ):
        read_all(data)


def test_local_copies_are_those_of_the_first_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)
    url = remote_copy(written(tmp_path / "set"))
    sizes = [file.stat().st_size for file in shards_of(tmp_path / "set")]
    monkeypatch.setattr(reading, "LOCAL_BYTES", sum(sizes[:2]))
    read_all(load_shards(url, tmp_path / "copies"))
    assert (len(sizes), len(list((tmp_path / "copies").rglob("*.shard.safetensors")))) == (5, 4)


def test_copies_that_cannot_be_written(tmp_path: Path, remote: tuple[str, str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"entries of the cache folder .*file can't be written"):
        read_all(load_shards(remote[0], tmp_path / "file"))


@pytest.mark.parametrize("fault", ["missing", "truncated", "changed", "no index", "no such protocol"])
def test_remote_faults_are_named(remote: tuple[str, str], fault: str) -> None:
    url, shard = remote
    data = load_shards(url)
    content = FILES.cat_file(shard)
    message = rf"{url}/\w+\.shard\.zip: "
    if fault == "missing":
        FILES.rm(shard)
        message += "the shard is missing"
    elif fault == "truncated":
        FILES.pipe(shard, content[: len(content) // 2])
        message += r"the shard ends before byte \d+; it is truncated"
    elif fault == "changed":
        FILES.pipe(shard, content[:1500] + b"other" + content[1505:])
        message += "the record at byte 128 is damaged or another one"
    elif fault == "no index":
        FILES.rm(f"{url}/{INDEX}")
        message = rf"{url}/{INDEX}: the index of the shards is missing"
    else:
        message = r"nowhere://x/shards\.safetensors: the file can't be read \(ValueError: Protocol not known"
    with pytest.raises(DataError, match=message):
        read_all(load_shards("nowhere://x") if "such" in fault else load_shards(url) if "index" in fault else data)
