"""Shards are uncompressed zip archives. Their members, their tables of records, and ranges of their bytes.

Each mesh has two members: its arrays and those of its operators, as in cache entries. They begin at multiples of
ALIGNMENT bytes, so local ones are mapped into memory. The last member is the table, which has their places. The index
of a set joins the tables of its shards.
"""

from __future__ import annotations

import functools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import DataError
from diffnet.geometry.file_state import FileState, is_settled, state_of
from diffnet.geometry.store.cache import cache_key, entry_path, read_entry, write_entry
from diffnet.geometry.store.codec import ALIGNMENT, Arrays, checksum, map_file, parsed, safetensors_of

TABLE = "table.safetensors"  # the name of a member
MAPS = 64  # shards that are mapped into memory at a time

Table: TypeAlias = dict[str, NDArray[Any]]

# The columns of a table, int64, by their shape for each record. `names` (N,) are bytes, as the file system has them.
COLUMNS: dict[str, tuple[int, ...]] = {
    "digests": (),  # tell whether an item of a data set is the one that was written
    "ranges": (3,),  # where the arrays of the mesh and of the operators begin, and where the latter end
    "checksums": (2,),  # of both
    "contents": (),  # the first 16 digits of `content_hash` of the positions and faces
    "vertex_counts": (),
    "face_counts": (),
    "label_counts": (),
    "classes": (),  # of meshes in a set for classification, else 0
    "gradient_entries": (),  # nonzeros of the gradients
}

# What damage of a blob can raise.
DAMAGE = (ValueError, RuntimeError, LookupError, TypeError, AttributeError, OverflowError)


def rows_of(table: Table, rows: NDArray[np.int64] | slice) -> Table:
    """Some records of a table."""
    return {name: column[rows] for name, column in table.items()}


def table_blob(table: Table, about: dict[str, Any]) -> bytes:
    """A safetensors blob of a table and of values that JSON can hold, with a checksum."""
    arrays = {name: np.ascontiguousarray(column) for name, column in table.items()}
    arrays["names"] = arrays["names"].view(np.uint8).reshape(len(table["names"]), table["names"].itemsize)
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return safetensors_of(arrays, {"checksum": str(checksum(arrays))})


def parsed_table(blob: bytes, *more: str) -> tuple[Table, dict[str, Any]]:
    """The inverse of `table_blob`. more: names of further columns (N,). Damage raises one of DAMAGE."""
    arrays, metadata = parsed(memoryview(bytearray(blob)))
    if metadata["checksum"] != str(checksum(arrays)):
        raise ValueError("the checksum differs")
    about, names = json.loads(arrays.pop("about").tobytes()), arrays["names"]
    if names.dtype != np.uint8 or names.ndim != 2 or names.shape[1] < 1:
        raise ValueError("names should be rows of bytes")
    for name, shape in (COLUMNS | dict.fromkeys(more, ())).items():
        if (column := arrays[name]).dtype != np.int64 or column.shape != (len(names), *shape):
            raise ValueError(f"{name} should be {(len(names), *shape)} int64, not {column.shape} {column.dtype}")
    return arrays | {"names": names.view(f"S{names.shape[1]}").reshape(-1)}, about


def add_member(archive: ZipFile, name: str, blob: bytes) -> int:
    """Add a file to an archive that is being written. Returns where its content begins: at a multiple of ALIGNMENT."""
    member = ZipInfo(name)
    assert archive.fp is not None
    begin = archive.fp.tell() + 30 + len(name) + 20 + 6  # after a header, the name, the sizes and the field below
    gap = -begin % ALIGNMENT
    member.extra = struct.pack("<HHH", 0xD935, 2 + gap, ALIGNMENT) + bytes(gap)  # the field of Android's zipalign
    with archive.open(member, "w", force_zip64=True) as file:
        file.write(blob)
    return begin + gap


class Place(NamedTuple):
    """A range of bytes in a shard.

    file: the path or the URL of the shard
    size: of the shard, in bytes
    copies: the cache folder that keeps what is read behind a URL, or None
    """

    file: str
    size: int
    begin: int
    end: int
    checksum: int
    copies: str | None


def is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


def joined(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if is_url(root) else os.path.join(root, name)


def arrays_at(place: Place, check: Callable[[Arrays], None]) -> Arrays:
    """The arrays of a blob. Those of a local file are mapped into memory; writing to them doesn't change the file.

    check: raises ValueError for arrays that can't be used

    Raises DataError, which names the file, if it is missing, truncated, damaged or not the one that was written.
    """
    if is_url(place.file):
        return _remote(place, check)
    try:
        stat = os.stat(place.file)
        if stat.st_size == place.size:
            state = state_of(stat)
            # Reading beyond the end of a file that is mapped would end the process.
            return _checked(place, _map(place.file, state)[place.begin : place.end], check, state)
    except OSError as e:
        raise DataError(f"{place.file}: the shard can't be read ({e.strerror})") from e
    raise DataError(
        f"{place.file}: the shard has {stat.st_size} bytes, and the index says {place.size}. It is truncated or another"
        " one; copy it again"
    )


_sound: dict[tuple[str, FileState], set[int]] = {}  # where ranges begin whose checksum this process has found right


def _checked(
    place: Place, content: memoryview, check: Callable[[Arrays], None], state: FileState | None = None
) -> Arrays:
    """state: of the local file, for which the checksum is computed once"""
    sound = set() if state is None or not is_settled(state) else _sound.setdefault((place.file, state), set())
    try:
        arrays, _ = parsed(content)
        if place.begin not in sound:
            if checksum(arrays) != place.checksum:
                raise ValueError("the checksum differs")
            sound.add(place.begin)
        check(arrays)
    except DAMAGE as e:
        raise DataError(
            f"{place.file}: the record at byte {place.begin} is damaged or another one ({type(e).__name__}: {e}). Copy "
            "the shard again, or remove it and repeat the `diffnet precompute --write-shards` that wrote it"
        ) from e
    return arrays


@functools.lru_cache(MAPS)
def _map(file: str, state: FileState) -> memoryview:
    with open(file, "rb") as opened:
        return map_file(opened)


def _remote(place: Place, check: Callable[[Arrays], None]) -> Arrays:
    """`arrays_at` behind a URL: from the cache entry of this range, which is made if there is none.

    The caches of fsspec show a file to other threads and processes before it is complete.
    """
    entry = None
    if place.copies is not None:
        key = cache_key({}, shard=place.file, begin=place.begin, checksum=place.checksum)
        entry = entry_path(place.copies, key, "shard")
        if (arrays := read_entry(entry, check)) is not None:
            return arrays
    try:
        content = content_of(place.file, place.begin, place.end)
    except FileNotFoundError as e:
        raise DataError(f"{place.file}: the shard is missing") from e
    if len(content) != place.end - place.begin:
        raise DataError(f"{place.file}: the shard ends before byte {place.end}; it is truncated. Copy it again")
    arrays = _checked(place, memoryview(bytearray(content)), check)
    if entry is not None:
        write_entry(entry, arrays)
    return arrays


def content_of(file: str, begin: int | None = None, end: int | None = None) -> bytes:
    """A range of a file behind a URL, or all of a file. Raises FileNotFoundError, and DataError for other faults."""
    try:
        if not is_url(file):
            return Path(file).read_bytes()
        import fsspec

        # Not kept, because a file system of a parent process does not work in a forked one. fsspec keeps its own.
        system, path = fsspec.core.url_to_fs(file)
        content: bytes = system.cat_file(path, start=begin, end=end)
    except FileNotFoundError:
        raise
    except ImportError as e:
        raise DataError(f"{file}: another package is needed ({e}); 'diffnet[remote]' has those for S3") from e
    except Exception as e:  # each file system has errors of its own
        raise DataError(f"{file}: the file can't be read ({type(e).__name__}: {e})") from e
    return content
