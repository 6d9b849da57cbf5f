"""Writing the meshes of a data set with their labels and operators into shards."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.data.arrays import array_states, own_arrays
from diffnet.data.feature_names import array_names
from diffnet.data.features import fill_cache
from diffnet.data.folders.index import contents_of
from diffnet.data.folders.indexed import IndexedMeshes
from diffnet.data.labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes
from diffnet.data.options import Preprocessing
from diffnet.data.shards.archives import COLUMNS, TABLE, Table, add_member, parsed_table, rows_of, table_blob
from diffnet.data.shards.reading import INDEX, PARTS, SUFFIX, SUFFIXES
from diffnet.data.shards.records import OPTIONS, Settings, mesh_arrays
from diffnet.data.stored import OnDemand, content_hash, joined, sources_of
from diffnet.geometry import load_mesh
from diffnet.geometry.errors import DiffnetError
from diffnet.geometry.file_state import hashed
from diffnet.geometry.files import make_folder, named, write_atomically
from diffnet.geometry.folder_lock import locked
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.preprocessing.recipe import computed_arrays
from diffnet.geometry.preprocessing.worker import entry_of, operators_path
from diffnet.geometry.store.codec import checksum, safetensors_of
from diffnet.geometry.store.entry import read_operators

SHARD_BYTES = 2**30  # a shard is complete before it is larger
WRITING = f".writing{SUFFIX}"  # the name of a shard that isn't complete


class MeshFiles(OnDemand[LabeledMesh]):
    """Meshes without labels, which are read from their files when they are needed."""

    def __init__(self, paths: Sequence[Path], cache_dir: str | os.PathLike[str]) -> None:
        super().__init__(len(paths), self._read)
        self.paths, self.cache_dir = paths, cache_dir

    def _read(self, i: int) -> LabeledMesh:
        mesh = load_mesh(self.paths[i], self.cache_dir)
        return LabeledMesh(self.file(i), mesh, np.array(UNLABELED, np.int64))

    def file(self, i: int) -> str:
        return os.fspath(self.paths[i])

    @cached_property
    def _contents(self) -> list[str]:
        return contents_of(self.paths, self.cache_dir, jobs=None)

    def digest(self, i: int) -> int:
        return hashed(os.path.abspath(self.paths[i]), self._contents[i])


def write_shards(
    data: LabeledMeshes,
    folder: str | os.PathLike[str],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    device: torch.device | str = "cpu",
    *,
    part: tuple[int, int] = (1, 1),
) -> dict[int, str]:
    """Write the meshes of a data set with their labels and operators into a few large files, see `load_shards`.

    data: the set, such as that of `index_dataset`, of which a mesh at a time is in memory
    folder: gets shards of at most 1 GiB, unless a mesh is larger, and their index
    options: the preprocessing. Own arrays among its features are written, too.
    cache_dir: keeps operators until their shard is complete. Those that were there before are used, and stay.
    jobs, advance, device: see `fill_cache`, also for calls from a script
    part: (I, N) writes every N-th mesh, from the I-th on, and no index. Calls for all parts may run at once, also on
        several machines. A last call without part then writes the index.

    A call that was stopped can be repeated: it keeps complete shards, and takes operators from the cache. It also adds
    meshes that are new or have changed. The index is written last.

    Returns an error message for each mesh that can't be used, by its position in the training, validation and test
    parts, one after the other. The index leaves them out. Raises OSError, which names the file, if the disk is full;
    OptionError if another process writes to the folder; DataError if the folder has shards with other options or
    labels, and if no mesh can be used.
    """
    folder = Path(folder)
    if isinstance(data.labels_at, tuple):
        raise DataError(f"{folder}: shards have no targets at several places, as those at {data.labels_at}")
    if data.condition_names:
        raise DataError(f"{folder}: shards have no conditions, such as {data.condition_names[0]}")
    make_folder(folder)
    every = {part: meshes for part in ("train", "validation", "test") if len(meshes := getattr(data, part))}
    items = joined([*every.values()])
    decisive = {name: getattr(options, name) for name in OPTIONS}
    labels = list(data.label_names), data.labels_at, data.label_numbers
    settings = Settings(decisive, array_names(options.features), *labels, _has_targets(items))
    digests = np.array([n for meshes in every.values() for n in _digests(meshes, options.features)], np.int64)
    part_numbers = np.repeat([PARTS.index(name) for name in every], [*map(len, every.values())])
    number, parts = part
    numbers = range(number - 1, len(items), parts)
    place = folder if parts == 1 else folder / f".part-{number}-of-{parts}"
    make_folder(place)
    with locked(place):
        tables = _complete_shards(folder, settings).values()
        complete = {digest for table in tables for digest in table["digests"].tolist()}
        missing = [i for i in numbers if int(digests[i]) not in complete]
        for _ in range(len(numbers) - len(missing)):
            advance()
        failed: dict[int, str] = {}
        with _Writer(folder, place / WRITING, settings, options, cache_dir) as writer:

            def ready(position: int) -> None:
                i = missing[position]
                try:
                    writer.add(items[i], int(digests[i]))
                except DiffnetError as e:
                    failed[i] = str(e)

            sources = sources_of(items, missing)
            reasons = fill_cache(sources, options, cache_dir, jobs, advance, device, ready) if missing else {}
            failed |= {missing[position]: reason for position, reason in reasons.items()}
        written = [i for i in numbers if i not in failed]
        if parts == 1:
            if not written:
                raise DataError(f"{folder}: no mesh of the set can be used. {next(iter(failed.values()), '')}")
            _write_index(folder, settings, digests[written], part_numbers[written])
    if parts > 1:
        place.rmdir()
    return dict(sorted(failed.items()))


def _digests(part: Sequence[LabeledMesh], features: str) -> list[int]:
    """For each mesh, a hash that tells whether it is the one that was written, with its labels and own arrays."""
    digests = []
    for i in range(len(part)):
        if isinstance(part, (IndexedMeshes, MeshFiles)):
            digests.append(part.digest(i))
        else:
            item = part[i]
            arrays = [item.mesh.verts, item.mesh.faces, np.asarray(item.labels), *item.arrays.values()]
            digests.append(hashed(item.name, *(np.asarray(array).tobytes() for array in arrays)))
    for i, *state in array_states(part, features):
        digests[i] = hashed(digests[i], state)
    return digests


def _has_targets(items: Sequence[LabeledMesh]) -> bool:
    """Whether the first mesh that can be read has targets."""
    for i in range(len(items)):
        with suppress(DiffnetError):  # reported when it should be written
            return np.asarray(items[i].labels).dtype.kind == "f"
    return False


@dataclass
class _Writer:
    """Adds records to the file `path`, which becomes a shard in `folder` when it is large enough. Threads may share it.

    Operators that this process has stored in the cache are removed when the shard that holds them is complete.
    """

    folder: Path
    path: Path
    settings: Settings
    options: Preprocessing
    cache_dir: str | os.PathLike[str]
    started: float = field(default_factory=lambda: time.time() - 1)  # clocks of file systems are late by milliseconds
    lock: threading.Lock = field(default_factory=threading.Lock)
    fault: OSError | None = None
    archive: ZipFile | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # of the table of the shard
    entries: list[Path] = field(default_factory=list)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as e:
            raise named(e, self.path) from e
        finally:
            if self.archive is not None:
                with suppress(OSError):  # the file is not complete, and is removed
                    self.archive.close()
            self.path.unlink(missing_ok=True)

    def add(self, item: LabeledMesh, digest: int) -> None:
        """Add a mesh whose operators are in the cache. Raises DataError or MeshError for one that can't be used."""
        operators, options = self.settings.operators, self.options
        mesh = mesh_for_operators(item.mesh, self.cache_dir, normalize=options.normalize)
        path = operators_path(mesh, operators, self.cache_dir)
        entry = read_operators(path, len(mesh.verts), operators)
        if entry is None:  # damaged, or the cache can't be written
            entry = entry_of(mesh, computed_arrays(mesh, operators), operators)
        first = mesh_arrays(item, own_arrays(item.mesh, options.features, given=item.arrays))
        digits = content_hash(item.mesh.verts, item.mesh.faces)[:16]
        vertices, gradient, labels = len(item.mesh.verts), entry.get("gradient_indices"), first["labels"]
        has_class = self.settings.labels_at == "meshes" and not self.settings.has_targets
        row = {
            "names": os.fsencode(item.name),
            "digests": digest,
            "checksums": [checksum(first), checksum(entry)],
            "contents": int.from_bytes(bytes.fromhex(digits), "big", signed=True),
            "vertex_counts": vertices,
            "face_counts": len(item.mesh.faces),
            "label_counts": len(labels),
            "classes": int(labels[0]) if has_class else 0,
            "gradient_entries": 2 * len(entry["gradient_gaps"]) - vertices if gradient is None else len(gradient),
        }
        blobs = [safetensors_of(arrays, {}) for arrays in (first, entry)]
        with self.lock:
            if self.fault is not None:  # of another thread
                raise self.fault
            try:
                self._write(row, blobs)
            except OSError as e:
                self.fault = named(e, self.path)
                raise self.fault from e
            self.entries.append(path)

    def _write(self, row: dict[str, Any], blobs: list[bytes]) -> None:
        if self.rows and self.rows[-1]["ranges"][2] + sum(map(len, blobs)) > SHARD_BYTES:
            self._publish()
        if self.archive is None:
            self.archive = ZipFile(self.path, "w")
        number = len(self.rows)
        begin = add_member(self.archive, f"{number}.mesh.safetensors", blobs[0])
        middle = add_member(self.archive, f"{number}.operators.safetensors", blobs[1])
        self.rows.append(row | {"ranges": [begin, middle, middle + len(blobs[1])]})

    def _publish(self) -> None:
        """Complete the shard."""
        if self.archive is None:
            return
        table = {name: np.array([row[name] for row in self.rows], np.int64) for name in COLUMNS}
        table["names"] = np.array([row["names"] for row in self.rows])
        blob = table_blob(table, {"settings": asdict(self.settings)})
        add_member(self.archive, TABLE, blob)
        self.archive.close()
        name = f"{hashlib.sha256(blob).hexdigest()[:16]}{SUFFIX}"  # another content has another name
        self.path.replace(self.folder / name)
        for path in self.entries:
            with suppress(OSError):  # also of another process that writes shards of the same mesh
                if path.stat().st_mtime >= self.started:
                    path.unlink()
        self.archive, self.rows, self.entries = None, [], []


def _complete_shards(folder: Path, settings: Settings) -> dict[str, Table]:
    """The tables of the complete shards in a folder, by the name of the shard. Warns of damaged ones.

    Raises DataError for shards with other settings, naming both values, and for those of an earlier version.
    """
    tables = {}
    for file in sorted(file for file in folder.glob("[!.]*") if file.name.endswith(SUFFIXES)):
        if not file.name.endswith(SUFFIX):
            raise DataError(f"{file}: an earlier version of diffnet wrote this shard. Choose another folder")
        try:
            with ZipFile(file) as archive:
                table, about = parsed_table(archive.read(TABLE))
            stored = Settings.read(about["settings"])
        except Exception as e:  # zipfile raises many kinds for damaged files
            warnings.warn(f"{file}: the shard is damaged, and its meshes are written again ({e})", stacklevel=3)
            continue
        for name, value in asdict(settings).items():
            if (before := getattr(stored, name)) != value:
                raise DataError(
                    f"{folder}: its shards have {name} {before}, and this set has {value}. Choose another folder"
                )
        tables[file.name] = table
    return tables


def _write_index(folder: Path, settings: Settings, digests: NDArray[np.int64], parts: NDArray[np.int64]) -> None:
    """Write the index of the records with these digests, in this order. parts: the number of the part of each"""
    shards = _complete_shards(folder, settings)
    table = {name: np.concatenate([columns[name] for columns in shards.values()]) for name in ("names", *COLUMNS)}
    sizes = [len(columns["digests"]) for columns in shards.values()]
    table["shard"] = np.repeat(np.arange(len(shards), dtype=np.int64), sizes)
    places = {digest: row for row, digest in enumerate(table["digests"].tolist())}
    rows = rows_of(table, np.array([places[digest] for digest in digests.tolist()], np.int64))
    files = [(name, (folder / name).stat().st_size) for name in shards]
    blob = table_blob(rows | {"part": parts}, {"settings": asdict(settings), "shards": files})
    write_atomically(folder / INDEX, blob)
