"""Writing the meshes of a data set with their labels and operators into shards."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

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
from diffnet.data.shards.reading import INDEX, PARTS, SUFFIX
from diffnet.data.shards.records import Settings, mesh_arrays, options_of
from diffnet.data.shards.tables import DAMAGE, Records, parsed_table, records_in, table_blob
from diffnet.data.stored import LazySequence, content_hash, joined, sources_of
from diffnet.geometry import load_mesh
from diffnet.geometry.errors import DiffnetError
from diffnet.geometry.file_state import hashed
from diffnet.geometry.files import make_folder, named, write_atomically
from diffnet.geometry.folder_lock import locked
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.preprocessing.recipe import computed_arrays
from diffnet.geometry.preprocessing.worker import entry_of, operators_path
from diffnet.geometry.store.codec import ALIGNMENT, Arrays, checksum, safetensors_of
from diffnet.geometry.store.entry import read_operators

SHARD_BYTES = 2**30  # a shard is complete before it is larger
MAGIC = b"diffnet\x01"  # the last bytes of a shard, after the length of its table
WRITING = f".writing{SUFFIX}"  # the name of a shard that isn't complete


class MeshFiles(LazySequence[LabeledMesh]):
    """Meshes without labels, which are read from their files when they are needed."""

    def __init__(self, paths: Sequence[Path], cache_dir: str | os.PathLike[str]) -> None:
        self.paths, self.cache_dir = [os.fspath(path) for path in paths], cache_dir

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: Any) -> Any:
        path = self.paths[i]
        return LabeledMesh(path, load_mesh(path, self.cache_dir), np.array(UNLABELED, np.int64))

    def file(self, i: int) -> str:
        return self.paths[i]

    @cached_property
    def _contents(self) -> list[str]:
        return contents_of(list(map(Path, self.paths)), self.cache_dir, jobs=None)

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
    make_folder(folder)
    every = {part: own for part in ("train", "validation", "test") if len(own := getattr(data, part))}
    items = joined([*every.values()])
    settings = Settings(
        options_of(options),
        array_names(options.features),
        list(data.label_names),
        data.labels_at,
        data.label_numbers,
        _has_targets(items),
    )
    digests = np.array([n for own in every.values() for n in _digests(own, options.features)], np.int64)
    part_numbers = np.repeat([PARTS.index(name) for name in every], [*map(len, every.values())])
    number, parts = part
    own = range(number - 1, len(items), parts)
    place = folder if parts == 1 else folder / f".part-{number}-of-{parts}"
    make_folder(place)
    with locked(place):
        known = set[int]().union(*(records.digests.tolist() for records in _complete_shards(folder, settings).values()))
        missing = [i for i in own if int(digests[i]) not in known]
        for _ in range(len(own) - len(missing)):
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
        kept = [i for i in own if i not in failed]
        if parts == 1:
            if not kept:
                raise DataError(f"{folder}: no mesh of the set can be used. {next(iter(failed.values()), '')}")
            _write_index(folder, settings, digests[kept], part_numbers[kept])
    if parts > 1:
        place.rmdir()
    return dict(sorted(failed.items()))


def _digests(part: Sequence[LabeledMesh], features: str) -> list[int]:
    """For each mesh, a hash that tells whether it is the one that was written, with its labels and own arrays."""
    found = []
    for i in range(len(part)):
        if isinstance(part, (IndexedMeshes, MeshFiles)):
            found.append(part.digest(i))
        else:
            item = part[i]
            arrays = [item.mesh.verts, item.mesh.faces, np.asarray(item.labels), *item.arrays.values()]
            found.append(hashed(item.name, *(np.asarray(array).tobytes() for array in arrays)))
    for i, *state in array_states(part, features):
        found[i] = hashed(found[i], state)
    return found


def _has_targets(items: Sequence[LabeledMesh]) -> bool:
    """Whether the first mesh that can be read has targets."""
    for i in range(len(items)):
        with suppress(DiffnetError):  # reported when it should be written
            return np.asarray(items[i].labels).dtype.kind == "f"
    return False


class _Writer:
    """Adds records to the file `path`, which becomes a shard in `folder` when it is large enough. Threads may share it.

    Operators that this process has stored in the cache are removed when the shard that holds them is complete.
    """

    def __init__(
        self,
        folder: Path,
        path: Path,
        settings: Settings,
        options: Preprocessing,
        cache_dir: str | os.PathLike[str],
    ) -> None:
        self._folder, self._path = folder, path
        self._settings, self._options, self._cache_dir = settings, options, cache_dir
        self._lock = threading.Lock()
        self._fault: OSError | None = None
        self._started = time.time() - 1  # clocks of file systems are late by some milliseconds
        self._begin()

    def _begin(self) -> None:
        self._file: BinaryIO | None = None
        self._size = 0
        self._rows: list[tuple[Any, ...]] = []  # the fields of `Records`
        self._entries: list[Path] = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            if self._file is not None:
                self._file.close()
            self._path.unlink(missing_ok=True)

    def add(self, item: LabeledMesh, digest: int) -> None:
        """Add a mesh whose operators are in the cache. Raises DataError or MeshError for one that can't be used."""
        own, options = self._settings.operators, self._options
        mesh = mesh_for_operators(item.mesh, self._cache_dir, normalize=options.normalize)
        path = operators_path(mesh, own, self._cache_dir)
        entry = read_operators(path, len(mesh.verts), own)
        if entry is None:  # damaged, or the cache can't be written
            entry = entry_of(mesh, computed_arrays(mesh, own), own)
        first = mesh_arrays(item, own_arrays(item.mesh, options.features, given=item.arrays))
        checksums = [checksum(first), checksum(entry)]
        digits = content_hash(item.mesh.verts, item.mesh.faces)[:16]
        content = int.from_bytes(bytes.fromhex(digits), "big", signed=True)
        blobs = [safetensors_of(arrays, {}) for arrays in (first, entry)]
        sizes = [-(-len(blob) // ALIGNMENT) * ALIGNMENT for blob in blobs]
        with self._lock:
            if self._fault is not None:  # of another thread
                raise self._fault
            if self._rows and self._size + sum(sizes) > SHARD_BYTES:
                self._publish()
            begin = self._size
            for blob, size in zip(blobs, sizes, strict=True):
                self._write(blob.ljust(size, b"\0"))
            ranges = [begin, begin + sizes[0], begin + sum(sizes)]
            vertices, gradient = len(item.mesh.verts), entry.get("gradient_indices")
            nonzeros = 2 * len(entry["gradient_gaps"]) - vertices if gradient is None else len(gradient)
            settings, labels = self._settings, first["labels"]
            own_class = int(labels[0]) if settings.labels_at == "meshes" and not settings.has_targets else 0
            counts = vertices, len(item.mesh.faces), len(labels), own_class, nonzeros
            self._rows.append((os.fsencode(item.name), digest, ranges, checksums, content, *counts))
            self._entries.append(path)

    def _write(self, content: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("wb")
            self._file.write(content)
        except OSError as e:
            self._fault = named(e, self._path)
            raise self._fault from e
        self._size += len(content)

    def _publish(self) -> None:
        """Complete the shard."""
        if self._file is None:
            return
        names, *numbers = zip(*self._rows, strict=True)
        records = Records(np.array(names), *(np.array(own, np.int64) for own in numbers))
        table = table_blob(records.arrays(), {"settings": asdict(self._settings)})
        self._write(table + len(table).to_bytes(8, "little") + MAGIC)
        name = f"{hashlib.sha256(table).hexdigest()[:16]}{SUFFIX}"  # another content has another name
        try:
            self._file.close()
            self._path.replace(self._folder / name)
        except OSError as e:
            raise named(e, self._path) from e
        for path in self._entries:
            with suppress(OSError):  # also of another process that writes shards of the same mesh
                if path.stat().st_mtime >= self._started:
                    path.unlink()
        self._begin()


def _complete_shards(folder: Path, settings: Settings) -> dict[str, Records]:
    """The records of the complete shards in a folder, by the name of the shard. Warns of damaged ones.

    Raises DataError for shards with other settings, naming both values.
    """
    found = {}
    for file in sorted(folder.glob(f"[!.]*{SUFFIX}")):
        try:
            arrays, about = parsed_table(_table_of(file))
            stored = Settings.read(about["settings"])
            records = records_in(arrays, np.array(file.stat().st_size, np.int64))
        except (OSError, *DAMAGE) as e:
            warnings.warn(f"{file}: the shard is damaged, and its meshes are written again ({e})", stacklevel=3)
            continue
        for name, value in asdict(settings).items():
            if (before := getattr(stored, name)) != value:
                raise DataError(
                    f"{folder}: its shards have {name} {before}, and this set has {value}. Choose another folder"
                )
        found[file.name] = records
    return found


def _table_of(file: Path) -> bytes:
    """The blob of the table at the end of a shard. Raises ValueError if there is none."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(size - 16, 0))
        end = opened.read(16)
        length = int.from_bytes(end[:8], "little")
        if end[8:] != MAGIC or length > size - 16:
            raise ValueError("it doesn't end as a shard does")
        opened.seek(size - 16 - length)
        return opened.read(length)


def _write_index(folder: Path, settings: Settings, digests: NDArray[np.int64], parts: NDArray[np.int64]) -> None:
    """Write the index of the records with these digests, in this order. parts: the number of the part of each"""
    shards = _complete_shards(folder, settings)
    places = {
        digest: (shard, row)
        for shard, records in enumerate(shards.values())
        for row, digest in enumerate(records.digests.tolist())
    }
    chosen = np.array([places[digest] for digest in digests.tolist()], np.int64)
    firsts = np.cumsum([0, *map(len, shards.values())])[:-1]
    records = Records.joined([*shards.values()])[firsts[chosen[:, 0]] + chosen[:, 1]]
    arrays: Arrays = records.arrays() | {"shard": np.ascontiguousarray(chosen[:, 0]), "part": parts}
    files = [(name, (folder / name).stat().st_size) for name in shards]
    write_atomically(folder / INDEX, table_blob(arrays, {"settings": asdict(settings), "shards": files}))
