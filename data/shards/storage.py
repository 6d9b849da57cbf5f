"""Ranges of the bytes of shards, in a folder or behind a URL."""

from __future__ import annotations

import functools
import os
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from diffnet.data.labeled import DataError
from diffnet.data.shards.tables import DAMAGE
from diffnet.geometry.file_state import FileState, is_settled, state_of
from diffnet.geometry.store.codec import Arrays, checksum, map_file, parsed

MAPS = 64  # shards that are mapped into memory at a time
LOCAL_BYTES = 64 * 2**30  # of local copies of remote records
LOOKED_AT_EVERY = 2**30  # bytes of new copies after which old ones are removed


class Place(NamedTuple):
    """A range of bytes in a shard.

    root: the folder, or a URL of `fsspec`
    size: of the shard, in bytes
    copies: a folder for local copies of ranges behind a URL, or None
    """

    root: str
    shard: str
    size: int
    begin: int
    end: int
    checksum: int
    copies: str | None

    @property
    def file(self) -> str:
        return joined(self.root, self.shard)


def is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


def joined(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if is_url(root) else os.path.join(root, name)


def arrays_at(place: Place, check: Callable[[Arrays], None]) -> Arrays:
    """The arrays of a blob. Those of a local file are mapped into memory; writing to them doesn't change the file.

    check: raises ValueError for arrays that can't be used

    Raises DataError, which names the file, if it is missing, truncated, damaged or not the one that was written.
    """
    if is_url(place.root):
        return _copied(place, check)
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


def whole_file(root: str, name: str) -> bytes:
    """The content of a small file. Raises FileNotFoundError if it is missing, DataError if it can't be read."""
    if is_url(root):
        return _fetched(joined(root, name), None, None)
    try:
        return Path(root, name).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as e:
        raise DataError(f"{joined(root, name)}: the file can't be read ({e.strerror})") from e


def _fetched(url: str, begin: int | None, end: int | None) -> bytes:
    """A range of a file behind a URL. Raises FileNotFoundError if it is missing, DataError for other faults."""
    try:
        import fsspec

        # Not kept, because a file system of a parent process does not work in a forked one. fsspec keeps its own.
        system, path = fsspec.core.url_to_fs(url)
        content = system.cat_file(path, start=begin, end=end)
    except FileNotFoundError:
        raise
    except ImportError as e:
        raise DataError(f"{url}: another package is needed ({e}); 'diffnet[remote]' has those for S3") from e
    except Exception as e:  # each file system has errors of its own
        raise DataError(f"{url}: the file can't be read ({type(e).__name__}: {e})") from e
    return bytes(content)


def _copied(place: Place, check: Callable[[Arrays], None]) -> Arrays:
    """`arrays_at` behind a URL: from the local copy of the range, which is made first if there is none."""
    copy = None if place.copies is None else Path(place.copies, f"{place.shard}-{place.begin}-{place.checksum:x}")
    if copy is not None:
        try:
            content = bytearray(copy.read_bytes())
            os.utime(copy)  # the oldest copies are removed first
            return _checked(place, memoryview(content), check)
        except (OSError, DataError):  # missing or damaged; it is made again
            pass
    try:
        content = bytearray(_fetched(place.file, place.begin, place.end))
    except FileNotFoundError as e:
        raise DataError(f"{place.file}: the shard is missing") from e
    if len(content) != place.end - place.begin:
        raise DataError(f"{place.file}: the shard ends before byte {place.end}; it is truncated. Copy it again")
    arrays = _checked(place, memoryview(content), check)
    if copy is not None:
        _keep(copy, content)
    return arrays


_kept = 0  # bytes of copies since old ones were removed


def _keep(copy: Path, content: bytearray) -> None:
    """Write a local copy, and remove the oldest ones if there are too many. If this fails, it warns and goes on."""
    global _kept
    temporary = copy.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            temporary.replace(copy)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        warnings.warn(f"{copy.parent}: local copies of shards can't be written ({e.strerror})", stacklevel=2)
    _kept += len(content)
    if _kept >= min(LOOKED_AT_EVERY, LOCAL_BYTES // 8):
        _kept = 0
        remove_oldest(copy.parent)


def remove_oldest(folder: Path) -> None:
    """Remove the files that were not used for the longest time, until the rest has at most LOCAL_BYTES."""
    found = []
    for file in folder.iterdir():
        try:
            stat = file.stat()
        except FileNotFoundError:  # another process has removed it
            continue
        found.append((stat.st_mtime_ns, stat.st_size, file))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= LOCAL_BYTES:
            break
        file.unlink(missing_ok=True)
        total -= size
