"""The disk cache: keys, damaged entries, concurrent processes, and failed writes, also of other files."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import trimesh
from operator_checks import assert_same
from refusals import refused
from safetensors.numpy import save_file
from shapes import ellipsoid

from diffnet import geometry
from diffnet.data import Preprocessing, fill_cache
from diffnet.geometry import MeshError, file_state, load_mesh, precompute, precompute_all
from diffnet.geometry.discretize import gradient
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing.worker import CacheJob, compute_entry
from diffnet.geometry.processes import WorkerPool
from diffnet.geometry.store import cache

pytestmark = pytest.mark.usefixtures("one_thread")

K = 6


@pytest.fixture
def mesh() -> tuple[np.ndarray, np.ndarray]:
    sphere = trimesh.creation.icosphere(1)
    return np.array(sphere.vertices), np.array(sphere.faces)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """It is called for each mesh that is computed, not read from the cache."""
    module = sys.modules["diffnet.geometry.preprocessing.recipe"]
    monkeypatch.setattr(module, "discretize", Mock(wraps=module.discretize))
    return module.discretize


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def entry(folder: Path) -> Path:
    (path,) = entries(folder)
    assert path.suffix == ".safetensors"
    return path


@pytest.mark.parametrize("near", [gradient.MAX_GAP, 0], ids=["rows-in-mesh-order", "rows-reordered"])
@pytest.mark.parametrize(
    ("k", "basis"),
    [(K, "float32"), (0, "float32"), (K, "float16")],
    ids=["with-eigenpairs", "without-eigenpairs", "small-entry"],
)
@pytest.mark.filterwarnings("error")
def test_a_hit_is_equal_and_not_computed(
    mesh: Any, k: int, basis: Any, near: int, tmp_path: Path, compute: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "MAX_GAP", near)
    precompute = partial(geometry.precompute, basis=basis)
    fresh = precompute(mesh, k=k)
    assert (fresh.gradient.pattern.row_order is None) == (near > 0)
    first = precompute(mesh, k=k, cache_dir=tmp_path)
    assert compute.call_count == 2
    written = entry(tmp_path).read_bytes()
    again = precompute(mesh, k=k, cache_dir=str(tmp_path))
    assert compute.call_count == 2
    assert entry(tmp_path).read_bytes() == written
    assert_same(fresh, first)
    assert_same(fresh, again)
    again.mass[0] = 5  # arrays that were read are writable, and the entry doesn't change
    assert_same(fresh, precompute(mesh, k=k, cache_dir=tmp_path))


def test_options_change_the_entry(mesh: Any, tmp_path: Path, compute: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the format: entries of other formats are not found, and give no warning. Types of arrays don't."""
    verts, faces = mesh
    moved = verts.copy()
    moved[3, 1] += 1e-3
    precompute((np.float32(verts), faces.astype(np.int32)), k=np.int64(K), cache_dir=tmp_path)  # types don't matter
    precompute(trimesh.Trimesh(torch.tensor(verts), faces, process=False), k=K, cache_dir=tmp_path)
    variants: list[dict[str, Any]] = [
        {},
        {"k": K + 1},
        {"laplacian": "cotan"},
        {"join": "never"},
        {"basis": "float16"},
        {"operators": "original"},
        {"mesh": (moved, faces)},
        {"mesh": (verts, faces[::-1])},
        {"mesh": (verts, faces[:-1])},
        {"mesh": (verts, None)},
    ]
    for options in variants:
        precompute(**{"mesh": mesh, "k": K, "cache_dir": tmp_path, **options})
    assert compute.call_count == len(entries(tmp_path)) == len(variants)
    key = cache.cache_key({}, k=1)
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert cache.cache_key({}, k=1) != key


@pytest.mark.filterwarnings("error")
def test_entries_without_facts_are_read(mesh: Any, tmp_path: Path, compute: Mock) -> None:
    """Earlier versions have written none."""
    fresh = precompute(mesh, k=K, cache_dir=tmp_path)
    with_arrays(entry(tmp_path), facts=None)
    assert_same(fresh, precompute(mesh, k=K, cache_dir=tmp_path))
    assert_same(fresh, precompute_all([mesh], K, cache_dir=tmp_path, jobs=2)[0])
    assert compute.call_count == 1


def with_arrays(path: Path, **changes: Any) -> None:
    arrays = cache.read_entry(path) | {name: None if x is None else np.asarray(x) for name, x in changes.items()}
    cache.write_entry(path, {name: array for name, array in arrays.items() if array is not None})


def with_entry(path: Path, name: str, at: int, value: int) -> None:
    """An entry with a valid checksum in which one number of an array differs."""
    array = cache.read_entry(path)[name].copy()
    array[at] = value
    with_arrays(path, **{name: array})


def with_moved_entries(path: Path, name: str, row: int) -> None:
    """An entry in which a row gives all of its entries to the next row."""
    lengths = cache.read_entry(path)[name].copy()
    lengths[row : row + 2] = 0, lengths[row : row + 2].sum()
    with_arrays(path, **{name: lengths})


def other_entry(path: Path, kind: str = "operators") -> Path:
    """A valid entry of a mesh of the same size, in another folder, or of another kind."""
    folder = path.parents[2] / "other"
    if kind == "operators":
        precompute(ellipsoid(0), k=K, cache_dir=folder)
        return entry(folder)
    other = folder / path.name.replace("operators", kind)
    cache.write_entry(other, cache.read_entry(path))
    return other


def as_format_5(path: Path, arrays: cache.Arrays) -> None:
    """An entry as format 5 had it, which stored a checksum only."""
    save_file(arrays, path, metadata={"crc32": "0"})


def with_format(path: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        arrays = dict(cache.read_entry(path))
        patch.setattr(cache, "FORMAT", number)
        cache.write_entry(path, arrays)


def flipped(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 0xFF
    path.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5000)),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped in the middle": lambda path: flipped(path, 0.5),
    "flipped early": lambda path: flipped(path, 0.02),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(np.zeros(3))),
    "missing": lambda path: with_arrays(path, evals=None),
    "surplus": lambda path: with_arrays(path, other=np.zeros(3)),
    "other k": lambda path: with_arrays(path, evals=np.zeros(K + 1, np.float32)),
    "other mesh": lambda path: with_arrays(path, mass=np.zeros(3, np.float32)),
    "other type": lambda path: with_arrays(path, mass=np.zeros(42)),
    "scalar": lambda path: with_arrays(path, laplacian_indices=np.int32(3)),
    "other length": lambda path: with_arrays(path, gradient=np.zeros((2, 5), np.float32)),
    "index too large": lambda path: with_entry(path, "laplacian_indices", 7, 42),
    "index negative": lambda path: with_entry(path, "laplacian_indices", 7, -1),
    "index far out of memory": lambda path: with_entry(path, "gradient_indices", 0, 2**31 - 1),
    "first offset": lambda path: with_entry(path, "laplacian_indptr", 0, 1),
    "last offset": lambda path: with_entry(path, "gradient_indptr", -1, 10**9),
    "offsets that descend": lambda path: with_entry(path, "gradient_indptr", 5, 10**6),
    "row order out of range": lambda path: with_arrays(path, row_order=np.arange(1, 43, dtype=np.int32)),
    "row order negative": lambda path: with_arrays(path, row_order=np.arange(-1, 41, dtype=np.int32)),
    "row order with a row twice": lambda path: with_arrays(path, row_order=np.zeros(42, np.int32)),
    "joined out of range": lambda path: with_arrays(path, joined=np.arange(1, 43, dtype=np.int32)),
    "joined negative": lambda path: with_arrays(path, joined=np.full(42, -1, np.int32)),
    "joined of another length": lambda path: with_arrays(path, joined=np.zeros(41, np.int32)),
    "other facts": lambda path: with_arrays(path, facts=np.zeros(3, np.int32)),
    "another mesh": lambda path: shutil.copy(other_entry(path), path),
    "another kind": lambda path: shutil.copy(other_entry(path, kind="mesh"), path),
    "format 5": lambda path: as_format_5(path, dict(cache.read_entry(path))),
    "a newer format": lambda path: with_format(path, cache.FORMAT + 1),
}


SMALL_DAMAGES: dict[str, Any] = {
    "gap too large": lambda path: with_entry(path, "laplacian_gaps", 7, 42),
    "gap negative": lambda path: with_arrays(path, laplacian_gaps=np.full(162, -1, np.int32)),
    "gap far out of memory": lambda path: with_arrays(path, gradient_gaps=np.full(162, 2**32 - 1, np.uint32)),
    "lengths of other rows": lambda path: with_entry(path, "gradient_lengths", 5, 200),
    "an empty row": lambda path: with_moved_entries(path, "gradient_lengths", 5),
    "another length": lambda path: with_arrays(path, laplacian_upper=np.zeros(5, np.float32)),
    "no values": lambda path: with_arrays(path, laplacian_upper=None),
    "whole frames of another mesh": lambda path: with_arrays(path, frames=np.zeros((41, 2, 3), np.float32)),
}


@pytest.mark.parametrize(
    ("damage", "basis"), [*((name, "float32") for name in DAMAGES), *((name, "float16") for name in SMALL_DAMAGES)]
)
@pytest.mark.filterwarnings("error")
def test_damaged_entries_are_repaired(mesh: Any, tmp_path: Path, compute: Mock, damage: str, basis: Any) -> None:
    precompute = partial(geometry.precompute, basis=basis)
    folder = tmp_path / "cache"
    fresh = precompute(mesh, k=K, cache_dir=folder)
    path = entry(folder)
    (DAMAGES | SMALL_DAMAGES)[damage](path)
    compute.reset_mock()
    with pytest.warns(UserWarning, match=f"cache entry .*{path.name}.* computed again"):
        assert_same(fresh, precompute(mesh, k=K, cache_dir=folder))
    assert compute.call_count == 1
    assert entry(folder) == path
    assert_same(fresh, precompute(mesh, k=K, cache_dir=folder))
    assert compute.call_count == 1


MESH_DAMAGES: dict[str, Any] = {
    "corner too large": {"faces": [[0, 1, 3]]},
    "corner negative": {"faces": [[0, 1, -1]]},
    "polygon out of range": {"polygons": [1]},
    "polygon count": {"polygon_count": [0]},
    "other shape": {"faces": [[0, 1]]},
    "other type": {"verts": np.zeros((3, 3), np.float32)},
    "not finite": {"verts": np.full((3, 3), np.nan)},
    "no vertices": {"verts": np.zeros((0, 3))},
    "missing": {"polygons": None},
}


@pytest.mark.parametrize("damage", MESH_DAMAGES)
def test_damaged_entries_of_files_are_parsed_again(tmp_path: Path, damage: str) -> None:
    (tmp_path / "a.off").write_text("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n")
    folder = tmp_path / "cache"
    fresh = load_mesh(tmp_path / "a.off", folder)
    with_arrays(entry(folder), **MESH_DAMAGES[damage])
    with pytest.warns(UserWarning, match=r"cache entry .* computed again"):
        found = load_mesh(tmp_path / "a.off", folder)
    for field in ("verts", "faces", "polygons", "polygon_count"):
        np.testing.assert_array_equal(getattr(found, field), getattr(fresh, field))


def test_no_flipped_byte_passes_or_crashes(tmp_path: Path) -> None:
    """Reading an entry with one flipped byte returns the original arrays or None."""
    path = tmp_path / "entry"
    arrays = {"a": np.arange(9, dtype=np.float32), "b": np.arange(2)}
    cache.write_entry(path, arrays)
    whole = path.read_bytes()
    refusals = 0
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = cache.read_entry(path)
        if found is None:
            refusals += 1
        else:
            assert found.keys() == arrays.keys()
            for name, array in arrays.items():
                assert found[name].dtype == array.dtype
                np.testing.assert_array_equal(found[name], array)
    assert refusals >= 9 * 4 + 2 * 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda words: words.__setitem__(slice(1024, 2048), 0),
        lambda words: words.__setitem__([5, 7], words[[7, 5]]),
        lambda words: words.__setitem__([5, 6], words[[5, 6]] + np.array([1, -1], words.dtype)),
        lambda words: words.__setitem__(slice(None), np.roll(words, 1024)),
    ],
    ids=["a missing block", "swapped words", "equal sum", "moved blocks"],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_checksum_sees_damage_that_keeps_sums(tmp_path: Path, damage: Any, dtype: Any) -> None:
    path = tmp_path / "entry"
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 5000).astype(dtype)
    cache.write_entry(path, {"words": words})
    content = bytearray(path.read_bytes())
    damage(np.frombuffer(content, dtype, 5000, len(content) - words.nbytes))
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="checksum differs"):
        assert cache.read_entry(path) is None


def test_the_checksum_is_computed_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entry"
    cache.write_entry(path, {"a": np.arange(3)})
    monkeypatch.setattr(file_state, "SETTLED", 0)
    monkeypatch.setattr(cache, "checksum", Mock(wraps=cache.checksum))
    for _ in range(2):
        assert cache.read_entry(path) is not None
    cache.checksum.assert_called_once()
    flipped(path, 0.999)
    with pytest.warns(UserWarning, match="checksum differs"):
        assert cache.read_entry(path) is None


@pytest.mark.parametrize("near", [gradient.MAX_GAP, 0], ids=["rows-in-mesh-order", "rows-reordered"])
@pytest.mark.parametrize("laplacian", ["robust", "cotan"])
def test_small_entries(tmp_path: Path, near: int, laplacian: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a basis in half precision, an entry takes at most 330 bytes for each vertex at K = 128."""
    monkeypatch.setattr(gradient, "MAX_GAP", near)
    precompute(ellipsoid(0, 4), k=128, basis="float16", laplacian=laplacian, cache_dir=tmp_path)
    assert entry(tmp_path).stat().st_size <= 330 * 2562


@pytest.mark.filterwarnings("error")
def test_two_processes_at_once(tmp_path: Path) -> None:
    """Two processes compute and write the same entries at the same time."""
    meshes = [ellipsoid(seed) for seed in range(4)]
    job = CacheJob(Options(K), tmp_path, normalize=False)
    with WorkerPool(2, 1) as pool:
        fill = partial(compute_entry, job=job, keep=False, for_gpu=False)
        running = [pool.submit(fill, mesh) for mesh in meshes for _ in range(2)]
        assert [future.result() for future in running] == [None] * 8
    assert len(entries(tmp_path)) == 4  # no temporary files
    for mesh in meshes:
        assert_same(precompute(mesh, k=K, cache_dir=tmp_path), precompute(mesh, k=K))
    assert len(entries(tmp_path)) == 4


def test_folder_that_cannot_be_written(mesh: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="can't be written"):
        operators = precompute(mesh, k=K, cache_dir=tmp_path / "file")
    assert_same(operators, precompute(mesh, k=K))
    assert entries(tmp_path) == [tmp_path / "file"]
    assert (tmp_path / "file").read_text() == "in the way"


def interrupted(error: BaseException) -> Any:
    def write(path: Path, content: bytes) -> None:
        path.write_text("half of it")
        raise error

    return write


def test_a_folder_in_the_place_of_an_entry(tmp_path: Path) -> None:
    (tmp_path / "entry").mkdir()
    with pytest.warns(UserWarning, match="can't be written"):
        cache.write_entry(tmp_path / "entry", {"a": np.arange(3)})
    assert entries(tmp_path) == []
    with pytest.warns(UserWarning, match="can't be read"):
        assert cache.read_entry(tmp_path / "entry") is None


def test_full_disk(mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = precompute(mesh, k=K)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", interrupted(OSError(28, "No space left on device")))
        with pytest.warns(UserWarning, match="No space left"):
            assert_same(fresh, precompute(mesh, k=K, cache_dir=tmp_path))
    assert entries(tmp_path) == []
    assert_same(fresh, precompute(mesh, k=K, cache_dir=tmp_path))
    entry(tmp_path)


def test_interrupted_write_keeps_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entry"
    cache.write_entry(path, {"a": np.arange(3)})
    monkeypatch.setattr(Path, "write_bytes", interrupted(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        cache.write_entry(path, {"a": np.arange(4)})
    assert entries(tmp_path) == [path]
    np.testing.assert_array_equal(cache.read_entry(path)["a"], np.arange(3))


@pytest.mark.parametrize(("basis", "digits"), [("float16", 11), ("bfloat16", 8)], ids=["float16", "bfloat16"])
def test_half_precision(mesh: Any, tmp_path: Path, compute: Mock, basis: Any, digits: int) -> None:
    """Eigenvectors are rounded once, computed or read. The error is relative to the largest entry of each vector."""
    # Eigenvectors have entries of 10⁶, which float16 can't hold
    full = precompute((mesh[0] * 1e-6, mesh[1]), k=K, cache_dir=tmp_path)
    fresh = precompute((mesh[0] * 1e-6, mesh[1]), k=K, basis=basis)
    first = precompute((mesh[0] * 1e-6, mesh[1]), k=K, cache_dir=tmp_path, basis=basis)
    again = precompute((mesh[0] * 1e-6, mesh[1]), k=K, cache_dir=tmp_path, basis=basis)
    assert compute.call_count == 3
    for operators in (fresh, first):
        assert_same(operators, again)
    assert again.evecs.dtype == torch.float32
    sizes = sorted(path.stat().st_size for path in entries(tmp_path))
    assert sizes[1] - sizes[0] > 42 * K * 2  # two bytes for each entry of an eigenvector, and what is restored
    error = (again.evecs - full.evecs).abs().amax(0) / full.evecs.abs().amax(0)
    assert 0 < error.max() <= 2.0**-digits
    assert torch.equal(again.evals, full.evals)


def test_parsed_files(tmp_path: Path) -> None:
    """The cache identifies files by content. A mesh has the name of the file that was asked for. Errors aren't kept."""
    quads = "4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n"
    for name in ("a.off", "b.off"):
        (tmp_path / name).write_text("OFF\n" + quads)
    folder = tmp_path / "cache"
    fresh = load_mesh(tmp_path / "a.off")
    for name in ("a.off", "a.off", "b.off"):
        mesh = load_mesh(tmp_path / name, folder)
        for field in ("verts", "faces", "polygons"):
            np.testing.assert_array_equal(getattr(mesh, field), getattr(fresh, field))
        assert (mesh.polygon_count, mesh.name) == (1, str(tmp_path / name))
        assert len(entries(folder)) == 1
    flipped(entry(folder), 0.9999)
    with pytest.warns(UserWarning, match="can't be read"):
        np.testing.assert_array_equal(load_mesh(tmp_path / "a.off", folder).verts, fresh.verts)
    (tmp_path / "a.off").write_text(quads)
    for _ in range(2):
        refused(MeshError, "header", load_mesh, tmp_path / "a.off", folder)
    assert len(entries(folder)) == 1


def test_entries_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    before = os.umask(0o022)
    try:
        cache.write_entry(path, {"mass": np.ones(3)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system doesn't list open files")
def test_entries_in_memory_are_not_open_files(tmp_path: Path) -> None:
    """A process may have 1,024 open files, and more entries."""

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    path = cache.entry_path(tmp_path, "k" * 64, "mesh")
    cache.write_entry(path, {"large": np.arange(100_000.0)})
    before = set(os.listdir("/proc/self/fd"))
    kept = [cache.read_entry(path) for _ in range(5)]
    assert set(os.listdir("/proc/self/fd")) <= before
    assert maps() == 5
    first = kept[0]
    first["large"][0] = 7
    again = cache.read_entry(path)
    assert again["large"][0] == 0
    assert again["large"][-1] == 99_999
    del kept, first, again
    assert maps() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "entry"
    monkeypatch.setitem(cache._pending, path, Future())  # a private name: a write that takes forever
    child = multiprocessing.get_context("fork").Process(target=cache.read_entry, args=(path,), daemon=True)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_files_of_killed_processes_are_removed_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / "ab" / "old.tmp", tmp_path / "ab" / "new.tmp"
    old.parent.mkdir()
    for file in (old, new):
        file.write_text("half")
    day_before = new.stat().st_mtime - cache.ABANDONED - 1
    os.utime(old, (day_before, day_before))
    assert fill_cache([], Preprocessing(k=K), tmp_path) == {}
    assert (old.exists(), new.exists()) == (False, True)


def test_a_mesh_that_was_parsed_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "map_file", Mock(wraps=cache.map_file))
    trimesh.creation.icosphere(1).export(tmp_path / "a.ply")
    first = load_mesh(tmp_path / "a.ply", tmp_path / "cache")
    (entry,) = (tmp_path / "cache").rglob("*.mesh.safetensors")
    assert [call.args[0].name for call in cache.map_file.call_args_list] == [str(entry)]
    assert_same(precompute(first, k=K), precompute(load_mesh(tmp_path / "a.ply"), k=K))
