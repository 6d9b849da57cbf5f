"""Data sets in shards: their index, and their items, which are read when they are needed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.options import Preprocessing
from diffnet.data.shards.archives import (
    DAMAGE,
    Place,
    Table,
    arrays_at,
    content_of,
    is_url,
    joined,
    parsed_table,
    rows_of,
)
from diffnet.data.shards.records import AS_THEY_ARE, Settings, check_mesh, check_options, labeled_mesh
from diffnet.data.stored import SampleFacts, StoredMeshes
from diffnet.geometry import Mesh, Operators, is_inside_out
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.normalize import load_normalized, mesh_for_operators
from diffnet.geometry.preprocessing.group import operators_from
from diffnet.geometry.preprocessing.one import operators_of
from diffnet.geometry.store.entry import all_arrays, check_entry

INDEX = "shards.safetensors"
SUFFIX = ".shard.zip"
SUFFIXES = (SUFFIX, ".shard")  # the latter of shards of earlier versions, which end with a table in another form
PARTS = ("train", "test", "validation")  # by their numbers in the index
LABEL_FIELDS = ("label_names", "labels_at", "label_numbers", "has_targets")  # of sets and of `Settings`
LOCAL_BYTES = 64 * 2**30  # of the shards behind a URL of which the cache keeps what is read


@dataclass(frozen=True, eq=False, repr=False)
class ShardedMeshes(StoredMeshes):
    """The meshes of a part of a data set in shards. Item i is read when it is asked for, see `load_shards`.

    It holds no mesh, and about 100 bytes for each, so it can be sent to worker processes. `prepared` of an item reads
    its operators.

    An item raises DataError, which names the shard, if the shard is missing, truncated, damaged or another one.
    """

    cache_dir: str | None
    _root: str  # the folder or the URL
    _files: list[tuple[str, int, str | None]]  # names, bytes, and the cache folder for what is read behind a URL
    _settings: Settings
    _table: Table

    @property
    def vertex_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self._table["vertex_counts"]

    @property
    def face_counts(self) -> NDArray[np.int64]:  # type: ignore[override]
        return self._table["face_counts"]

    @property
    def names(self) -> list[str]:
        return [os.fsdecode(name) for name in self._table["names"].tolist()]

    @cached_property
    def key(self) -> str:
        """A hash of the checksums of the records, and of what they have in common."""
        digest = hashlib.sha256(self.meaning.encode())
        for name in ("names", "checksums"):
            digest.update(f"{self._table[name].dtype}".encode() + self._table[name].tobytes())
        return digest.hexdigest()

    @property
    def contents(self) -> list[list[str]]:
        rows = zip(self._table["contents"].tolist(), self._table["checksums"][:, 0].tolist(), strict=True)
        return [[value.to_bytes(8, "big", signed=True).hex(), str(label)] for value, label in rows]

    @property
    def meaning(self) -> str:
        return json.dumps(asdict(self._settings))

    def take(self, numbers: NDArray[np.int64] | slice) -> ShardedMeshes:
        return replace(self, _table=rows_of(self._table, numbers))

    def check_options(self, options: Preprocessing) -> None:
        check_options(self._settings, self._root, options)

    def operator_facts(self) -> list[SampleFacts | None]:
        columns = [self._table[name] for name in ("vertex_counts", "face_counts", "label_counts", "gradient_entries")]
        if self._settings.labels_at != "edges":
            columns[2] = np.zeros_like(columns[2])
        rows = zip(self.names, *(column.tolist() for column in columns), strict=True)
        return [SampleFacts(name, "", "", *counts) for name, *counts in rows]

    @property
    def mesh_labels(self) -> NDArray[np.int64] | None:
        has_classes = self._settings.labels_at == "meshes" and not self._settings.has_targets
        return self._table["classes"] if has_classes else None

    def item(self, number: int) -> LabeledMesh:
        row = {name: column[number].tolist() for name, column in self._table.items()}
        name, size, cache = self._files[row["shard"]]
        begin, middle, end = row["ranges"]
        place = Place(joined(self._root, name), size, begin, middle, row["checksums"][0], cache)
        arrays = arrays_at(place, partial(check_mesh, vertices=row["vertex_counts"], faces=row["face_counts"]))
        item = labeled_mesh(arrays, os.fsdecode(row["names"]), self._settings.labels_at)
        rest = place._replace(begin=middle, end=end, checksum=row["checksums"][1])
        return replace(item, prepared=partial(_prepared, item.mesh, rest, self._settings, self._root))


def _prepared(
    mesh: Mesh, place: Place, settings: Settings, root: str, options: Preprocessing
) -> tuple[Mesh, Operators]:
    """See `LabeledMesh.prepared`."""
    check_options(settings, root, options)
    mesh = load_normalized(mesh, None, options.normalize)
    checked, decisive = mesh_for_operators(mesh), settings.operators
    if settings.format == AS_THEY_ARE and decisive.operators == "diffnet" and is_inside_out(checked, decisive.join):
        return mesh, operators_of(checked, decisive, None, torch.device("cpu"))
    arrays = arrays_at(place, lambda arrays: check_entry(arrays, len(mesh.verts), decisive))
    return mesh, operators_from(checked, all_arrays(arrays, checked.verts), decisive, torch.device("cpu"))


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
    if folder.is_dir() and any(name.endswith(SUFFIXES) for name in os.listdir(folder)):
        raise DataError(
            f"{folder}: the shards have no index, {INDEX}. Repeat the `diffnet precompute --write-shards` that wrote "
            "them; it keeps complete shards"
        )
    return False


def labeled_shards(
    path: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
    needs_train: bool,
    conditions: Sequence[str],
    of: Literal["labels", "targets"] = "labels",
) -> ShardedDataset | None:
    """`load_shards`, or None for a path that is neither a folder of shards nor a URL.

    of: what the meshes should have

    Raises DataError if they have none, or the other kind, for an empty part, and for conditions, which they don't have.
    """
    if not is_shards(path):
        return None
    if conditions:
        raise DataError(f"{path}: shards have no conditions; give the table of their meshes")
    data = load_shards(path, cache_dir, needs_train=needs_train)
    stored = "targets" if data.has_targets else "labels"
    if not data.label_names or stored != of:
        content = f"{stored}, not {of}" if data.label_names else "neither labels nor targets"
        raise DataError(f"{os.fspath(path)}: these shards have {content}. Write them with --task")
    if needs_train and not (len(data.train) and len(data.test)):
        raise DataError(f"{os.fspath(path)}: there are no {'test' if len(data.train) else 'training'} meshes")
    return data


def load_shards(
    path: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, *, needs_train: bool = True
) -> ShardedDataset:
    """The data set that `write_shards` has written. Its meshes, labels and operators are read when they are needed.

    path: the folder, or a URL of `fsspec`, such as `s3://bucket/folder`, of which ranges of bytes are read. Packages
        for some kinds of URLs have to be installed, such as s3fs.
    cache_dir: keeps what is read behind a URL, of the first 64 GiB of the shards. None keeps nothing.
    needs_train: if False, as for an evaluation, the training part is empty. Without a test part, all meshes are the
        test part then.

    `train`, `validation` and `test` are `ShardedMeshes`. They work with `MeshSamples`, and operators come from the
    shards. Files in a folder are mapped into memory. Nothing that they hold is executed.

    Raises DataError, which names the file, for an index that is missing, damaged, or of another version of diffnet.
    """
    root = os.fspath(path)
    file = joined(root, INDEX)
    try:
        table, about = parsed_table(content_of(file), "shard", "part")
        files = [(str(name), int(size)) for name, size in about["shards"]]
        settings = Settings.read(about["settings"])
        settings.check()
        _check_places(table, files)
    except FileNotFoundError as e:
        raise DataError(f"{file}: the index of the shards is missing. Shards are in folders of `write_shards`") from e
    except (*DAMAGE, OptionError) as e:
        if isinstance(e, DataError):
            raise
        raise DataError(
            f"{file}: the index can't be used ({type(e).__name__}: {e}). Copy it again, or repeat the `diffnet "
            "precompute --write-shards` that wrote it, which keeps complete shards"
        ) from e
    rows = [np.flatnonzero(table["part"] == i) for i in range(len(PARTS))]
    if not needs_train:
        rows = [rows[0][:0], rows[1] if len(rows[1]) else rows[0], rows[0][:0]]
    cache = None if cache_dir is None else os.fspath(cache_dir)
    ends = accumulate(size for _, size in files)
    places = [(*file, cache if end <= LOCAL_BYTES else None) for file, end in zip(files, ends, strict=True)]
    train, test, validation = (ShardedMeshes(cache, root, places, settings, rows_of(table, row)) for row in rows)
    common: dict[str, Any] = {name: getattr(settings, name) for name in LABEL_FIELDS}
    return ShardedDataset(train, test, validation=validation, source="as in the shards", **common)


def _check_places(table: Table, files: list[tuple[str, int]]) -> None:
    """Raises ValueError for records that can't be in these files."""
    if any(name != os.path.basename(name) or not name.endswith(SUFFIXES) for name, _ in files):
        raise ValueError("it names files that are no shards")
    if not (np.isin(table["shard"], range(len(files))).all() and np.isin(table["part"], range(len(PARTS))).all()):
        raise ValueError("there are records in shards or parts that don't exist")
    sizes = np.array([size for _, size in files], np.int64)[table["shard"], None]
    ends = np.hstack([np.zeros_like(sizes), table["ranges"], sizes])
    if (ends[:, 1:] < ends[:, :-1]).any():
        raise ValueError("ranges are not inside the shards")
    if table["vertex_counts"].min(initial=1) < 1 or table["face_counts"].min(initial=0) < 0:
        raise ValueError("there are meshes without vertices")
