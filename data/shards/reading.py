"""Data sets in shards: their index, and their items, which are read when they are needed."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.options import Preprocessing
from diffnet.data.shards.records import Settings, check_mesh, check_options, labeled_mesh
from diffnet.data.shards.storage import Place, arrays_at, is_url, joined, whole_file
from diffnet.data.shards.tables import DAMAGE, Records, parsed_table, records_in
from diffnet.data.stored import SampleFacts, StoredMeshes
from diffnet.geometry import Mesh, Operators
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.normalize import load_normalized, mesh_for_operators
from diffnet.geometry.preprocessing.group import operators_from
from diffnet.geometry.store.entry import all_arrays, check_entry

INDEX = "shards.safetensors"
SUFFIX = ".shard"
PARTS = ("train", "test", "validation")  # by their numbers in the index


class Shards(NamedTuple):
    """The files of a set, and what its records have in common.

    root: the folder or the URL
    files: names and sizes in bytes
    copies: a folder for local copies of records behind a URL, or None
    """

    root: str
    files: list[tuple[str, int]]
    settings: Settings
    copies: str | None


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMeshes(StoredMeshes):
    """The meshes of a part of a data set in shards. Item i is read when it is asked for, see `load_shards`.

    It holds no mesh, and about 100 bytes for each, so it can be sent to worker processes. `prepared` of an item reads
    its operators.

    An item raises DataError, which names the shard, if the shard is missing, truncated, damaged or another one.
    """

    cache_dir: str | None
    _shards: Shards
    _records: Records
    _shard: NDArray[np.int64]  # (N,), the place of the shard of each record in `Shards.files`

    @property
    def vertex_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self._records.vertex_counts

    @property
    def face_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self._records.face_counts

    @property
    def names(self) -> list[str]:
        return [os.fsdecode(name) for name in self._records.names.tolist()]

    @cached_property
    def key(self) -> str:
        """A hash of the checksums of the records, and of what they have in common."""
        digest = hashlib.sha256(self.meaning.encode())
        for array in (self._records.names, self._records.checksums):
            digest.update(f"{array.dtype}".encode() + array.tobytes())
        return digest.hexdigest()

    @property
    def contents(self) -> list[list[str]]:
        rows = zip(self._records.contents.tolist(), self._records.checksums[:, 0].tolist(), strict=True)
        return [[value.to_bytes(8, "big", signed=True).hex(), str(own)] for value, own in rows]

    @property
    def meaning(self) -> str:
        return json.dumps(asdict(self._shards.settings))

    def take(self, numbers: NDArray[np.int64] | slice) -> ShardedMeshes:
        return ShardedMeshes(self.cache_dir, self._shards, self._records[numbers], self._shard[numbers])

    def check_options(self, options: Preprocessing) -> None:
        check_options(self._shards.settings, self._shards.root, options)

    def operator_facts(self) -> list[SampleFacts | None]:
        own = self._records
        edges = own.label_counts if self._shards.settings.labels_at == "edges" else np.zeros_like(own.label_counts)
        counts = np.stack([own.vertex_counts, own.face_counts, edges, own.gradient_entries], 1).tolist()
        return [SampleFacts(name, "", "", *row) for name, row in zip(self.names, counts, strict=True)]

    @property
    def mesh_labels(self) -> NDArray[np.int64] | None:
        known = self._shards.settings.labels_at == "meshes" and not self._shards.settings.has_targets
        return self._records.classes if known else None

    def item(self, number: int) -> LabeledMesh:
        records, settings = self._records, self._shards.settings
        begin, middle, end = records.ranges[number].tolist()
        first, second = records.checksums[number].tolist()
        vertices, faces = int(records.vertex_counts[number]), int(records.face_counts[number])
        root, files, _, copies = self._shards
        name, size = files[self._shard[number]]
        place = Place(root, name, size, begin, middle, first, copies)
        arrays = arrays_at(place, lambda arrays: check_mesh(arrays, vertices, faces, settings))
        item = labeled_mesh(arrays, os.fsdecode(records.names[number]), settings.labels_at)
        rest = place._replace(begin=middle, end=end, checksum=second)
        return replace(item, prepared=partial(_prepared, item.mesh, rest, settings))


def _prepared(mesh: Mesh, place: Place, settings: Settings, options: Preprocessing) -> tuple[Mesh, Operators]:
    """See `LabeledMesh.prepared`."""
    check_options(settings, place.root, options)
    mesh = load_normalized(mesh, None, options.normalize)
    checked, own = mesh_for_operators(mesh), settings.operators
    arrays = arrays_at(place, lambda arrays: check_entry(arrays, len(mesh.verts), own))
    return mesh, operators_from(checked, all_arrays(arrays, checked.verts), own, torch.device("cpu"))


@dataclass(frozen=True, repr=False)
class ShardedDataset(LabeledMeshes):
    """A data set in shards, whose items are read when needed, see `load_shards`.

    has_targets: whether labels are numbers, for regression
    """

    train: ShardedMeshes
    test: ShardedMeshes
    has_targets: bool = False
    validation: ShardedMeshes = field(kw_only=True)


def is_shards(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder of shards or a URL. Raises DataError for a folder whose index was never written."""
    if is_url(path):
        return True
    folder = Path(path)
    if (folder / INDEX).is_file():
        return True
    if folder.is_dir() and any(name.endswith(SUFFIX) for name in os.listdir(folder)):
        raise DataError(
            f"{folder}: the shards have no index, {INDEX}. Repeat the `diffnet precompute --write-shards` that wrote "
            "them; it keeps complete shards"
        )
    return False


def labeled_shards(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
    needs_train: bool,
    of: Literal["labels", "targets"] = "labels",
) -> ShardedDataset | None:
    """`load_shards`, or None for a path that is neither a folder of shards nor a URL.

    of: what the meshes should have

    Raises DataError if they have none, or the other kind, and for an empty part.
    """
    if not is_shards(path):
        return None
    data = load_shards(path, cache_dir, needs_train=needs_train)
    stored = "targets" if data.has_targets else "labels"
    if not data.label_names or stored != of:
        found = f"{stored}, not {of}" if data.label_names else "neither labels nor targets"
        raise DataError(f"{os.fspath(path)}: these shards have {found}. Write them with --task")
    if needs_train and not (len(data.train) and len(data.test)):
        raise DataError(f"{os.fspath(path)}: there are no {'test' if len(data.train) else 'training'} meshes")
    return data


def load_shards(
    path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, *, needs_train: bool = True
) -> ShardedDataset:
    """The data set that `write_shards` has written. Its meshes, labels and operators are read when they are needed.

    path: the folder, or a URL of `fsspec`, such as `s3://bucket/folder`, of which ranges of bytes are read. Packages
        for some kinds of URLs have to be installed, such as s3fs.
    cache_dir: keeps local copies of what is read behind a URL, up to 64 GiB; those that were not used for the longest
        time are removed. None keeps none.
    needs_train: if False, as for an evaluation, the training part is empty. Without a test part, all meshes are the
        test part then.

    `train`, `validation` and `test` are `ShardedMeshes`. They work with `MeshSamples`, and operators come from the
    shards. Files in a folder are mapped into memory. Nothing that they hold is executed.

    Raises DataError, which names the file, for an index that is missing, damaged, or of another version of diffnet.
    """
    root = os.fspath(path)
    file = joined(root, INDEX)
    try:
        arrays, about = parsed_table(whole_file(root, INDEX))
        files = [(str(name), int(size)) for name, size in about["shards"]]
        settings = Settings.read(about["settings"])
        settings.check()
        shard, part = arrays["shard"], arrays["part"]
        if any(name != os.path.basename(name) or not name.endswith(SUFFIX) for name, _ in files):
            raise ValueError("it names files that are no shards")
        if any(array.dtype != np.int64 or array.ndim != 1 for array in (shard, part)) or len(shard) != len(part):
            raise ValueError("shard and part should be rows of int64")
        if (
            shard.min(initial=0) < 0
            or shard.max(initial=-1) >= len(files)
            or not np.isin(part, range(len(PARTS))).all()
        ):
            raise ValueError("there are records in shards or parts that don't exist")
        records = records_in(arrays, np.array([size for _, size in files], np.int64)[shard])
        if len(records) != len(shard):
            raise ValueError(f"it has {len(records)} records in {len(shard)} places")
    except FileNotFoundError as e:
        raise DataError(f"{file}: the index of the shards is missing. Shards are in folders of `write_shards`") from e
    except (*DAMAGE, OptionError) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(
            f"{file}: the index can't be used ({type(e).__name__}: {e}). Copy it again, or repeat the `diffnet "
            "precompute --write-shards` that wrote it, which keeps complete shards"
        ) from e
    shards = Shards(root, files, settings, None if cache_dir is None else os.path.join(cache_dir, "shards"))
    rows = [np.flatnonzero(part == i) for i in range(len(PARTS))]
    if not needs_train:
        rows = [rows[0][:0], rows[1] if len(rows[1]) else rows[0], rows[0][:0]]
    facts = None if cache_dir is None else os.fspath(cache_dir)
    train, test, validation = (ShardedMeshes(facts, shards, records[own], shard[own]) for own in rows)
    return ShardedDataset(
        train,
        test,
        label_names=settings.label_names,
        labels_at=settings.labels_at,
        label_numbers=settings.label_numbers,
        has_targets=settings.has_targets,
        validation=validation,
        source="as in the shards",
    )
