"""A disk cache. Each entry is a safetensors file, named by a hash of everything that its content depends on.

Entries hold NumPy arrays, so processes that fill the cache don't need PyTorch. Reading an entry runs no code from it.
The checksum finds damage, not forgery: a user who can write to a shared cache decides the numbers that others read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.file_state import FileState, is_settled, state_of
from diffnet.geometry.mapped_file import ALIGNMENT, map_file
from diffnet.geometry.phases import phase
from diffnet.geometry.processes import warn_once

FORMAT = 9  # increase when the meaning or the layout of entries changes

Arrays: TypeAlias = dict[str, NDArray[Any]]
_Stored: TypeAlias = "tuple[str, np.dtype[Any], tuple[int, ...], int]"  # name, dtype, shape and bytes of an array

WRITERS = 4  # threads
ABANDONED = 86_400  # seconds since the last write to a temporary file
BLOCK = 4096  # bytes; the checksum adds up the words of each block

_sound: set[FileState] = set()  # the files whose checksum and content this process has found right


def cache_key(arrays: Arrays, **options: Any) -> str:
    """A hash of arrays (dtype, shape and content), options and the format version."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **options}, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def entry_path(folder: str | os.PathLike[str], key: str, kind: str) -> Path:
    """The file of an entry of some kind, such as "mesh" or "operators"."""
    return Path(os.path.join(folder, key[:2], f"{key}.{kind}.safetensors"))  # in half of the time of Path / str


def read_entry(path: Path, check: Callable[[Arrays], None] = lambda arrays: None) -> Arrays | None:
    """The arrays of an entry, mapped into memory. Writing to them doesn't change the file.

    The checksum is computed once in each process.

    check: raises ValueError for arrays that can't be used, such as indices out of range

    None if there is no entry. None with a warning if it is damaged, has another format, was written under another name,
    may not be read, or fails the check.
    """
    wait(filter(None, [_pending.get(path)]))
    try:
        arrays, metadata, file = _map(path)
        if metadata.get("format") != str(FORMAT):
            raise ValueError(f"its format is {metadata.get('format', '5 or older')}, not {FORMAT}")
        if metadata["key"] != path.name:
            raise ValueError(f"it was written as {metadata['key']}")
        if file not in _sound and metadata["checksum"] != str(checksum(arrays)):
            raise ValueError("the checksum differs")
        check(arrays)
        if is_settled(file):
            _sound.add(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as e:
        _warn_of_folder(path, "read and are computed again", e)
        return None
    # Damage can cause any of these.
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as e:
        warnings.warn(f"cache entry {path} can't be read and is computed again ({type(e).__name__}: {e})", stacklevel=2)
        return None
    return arrays


MAX_HEADERS = 4096  # of about 3 kB each
# What `open_again` has found in the header of a file: `begin` and `arrays` of a `SoundEntry`.
_headers: dict[tuple[FileState, tuple[str, ...] | None], tuple[int, list[_Stored]]] = {}


class SoundEntry(NamedTuple):
    """An open entry that `read_entry` has found sound.

    begin: the byte at which the first of its arrays that are wanted begins
    arrays: name, dtype, shape and bytes, with those before the next one, of each of these in their order in the file
    """

    file: BinaryIO
    begin: int
    arrays: list[_Stored]

    def read(self, pieces: Sequence[memoryview]) -> bool:
        """Read the arrays into pieces of memory. Returns whether the file has them all."""
        if hasattr(os, "preadv"):  # one call, which gives up Python's global lock once
            count = os.preadv(self.file.fileno(), pieces, self.begin)
        else:
            self.file.seek(self.begin)
            count = sum(self.file.readinto(piece) for piece in pieces)  # type: ignore[attr-defined]
        return count == sum(map(len, pieces))


def open_again(path: Path, wanted: tuple[str, ...] | None = None) -> SoundEntry | None:
    """Open an entry that `read_entry` has found sound. None if it hasn't, or if the file has changed since.

    wanted: the names of the arrays to read, by default all

    Raises OSError.
    """
    file = path.open("rb", buffering=0)
    state = state_of(os.fstat(file.fileno()))
    if state in _sound:
        found = _headers.get((state, wanted))
        if found is None:
            if len(_headers) >= MAX_HEADERS:
                _headers.clear()
            found = _headers[state, wanted] = _arrays_in(file, wanted)
        begin, arrays = found
        if arrays:
            return SoundEntry(file, begin, arrays)
    file.close()
    return None


def _arrays_in(file: BinaryIO, wanted: tuple[str, ...] | None) -> tuple[int, list[_Stored]]:
    """`begin` and `arrays` of a `SoundEntry`."""
    size = int.from_bytes(file.read(8), "little")
    found = sorted(each for each in _described(file.read(size))[0] if wanted is None or each[2] in wanted)
    if not found:
        return 0, []
    begin, ends = found[0][0], [*(first for first, *_ in found[1:]), found[-1][1]]
    described = zip(found, ends, strict=True)
    return 8 + size + begin, [(name, dtype, shape, end - at) for (at, _, name, dtype, shape), end in described]


def has_entry(path: Path) -> bool:
    """Whether there is an entry that this process may read. That of another user may be closed to others."""
    return os.access(path, os.R_OK)


def check_arrays(arrays: Arrays, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raises ValueError for other names, dtypes or shapes than the expected ones."""
    if {name: (array.dtype.name, array.shape) for name, array in arrays.items()} != expected:
        raise ValueError("it holds other arrays than it should")


_NAMES = "F64", "F32", "F16", "U8", "U16", "U32", "I64", "I32"
_DTYPES = {name: np.dtype(f"<{name[0].lower()}{int(name[1:]) // 8}") for name in _NAMES}
_PADDING = "__padding"  # begins the names of arrays of zeros, after which the next array is aligned


def _map(path: Path) -> tuple[Arrays, dict[str, str], FileState]:
    """The arrays, the metadata and the state of a safetensors file.

    The safetensors library opens a file twice by name. Another process may replace the entry in between.
    """
    with path.open("rb") as file:
        state = state_of(os.fstat(file.fileno()))
        buffer = map_file(file)
    return *parsed(buffer), state


def parsed(buffer: memoryview) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file in memory, which share this memory, and its metadata.

    Damage raises ValueError, RuntimeError, LookupError, TypeError or AttributeError, or gives other arrays.
    """
    begin = 8 + int.from_bytes(buffer[:8], "little")
    found, metadata = _described(bytes(buffer[8:begin]))
    arrays = {}
    for first, last, name, dtype, shape in found:
        content = np.frombuffer(buffer, np.uint8, last - first, begin + first)
        arrays[name] = content.view(dtype).reshape(shape)
    return arrays, metadata


def _described(header: bytes) -> tuple[list[tuple[int, int, str, np.dtype[Any], tuple[int, ...]]], dict[str, str]]:
    """First byte, end, name, dtype and shape of each array of a safetensors file, and its metadata. See `parsed`."""
    described = json.loads(header)
    metadata = described.pop("__metadata__", {})
    return [
        (*about["data_offsets"], name, _DTYPES[about["dtype"]], tuple(about["shape"]))
        for name, about in described.items()
        if not name.startswith(_PADDING)
    ], metadata


def safetensors_of(arrays: Arrays, metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file. Each array begins at a multiple of ALIGNMENT bytes.

    The format allows no gaps, so there are arrays of zeros between them. `parsed` leaves them out.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    pieces, end = list[Any](), 0

    def add(name: str, array: NDArray[Any]) -> None:
        nonlocal end
        begin, end = end, end + array.nbytes
        dtype = f"{array.dtype.kind.upper()}{8 * array.itemsize}"
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (begin, end)}
        pieces.append(array.data)

    for name, array in arrays.items():
        if array.nbytes and end % ALIGNMENT:
            add(f"{_PADDING}{end}", np.zeros(-end % ALIGNMENT, np.uint8))
        add(name, np.asarray(array, order="C"))
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def write_entry(path: Path, arrays: Arrays) -> None:
    """Write an entry. Other processes see either the whole entry or none, even with several writers at once.

    If the entry can't be written, for example because the disk is full, this warns and goes on.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            metadata = {"format": str(FORMAT), "key": path.name, "checksum": str(checksum(arrays))}
            temporary.write_bytes(safetensors_of(arrays, metadata))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        _warn_of_folder(path, "written", e)


def _warn_of_folder(path: Path, what: str, fault: Exception) -> None:
    """Warn that entries beside this one can't be read or written.

    Many entries share such a fault, so the text names the folder alone.
    """
    reason = getattr(fault, "strerror", None) or fault
    warn_once(f"entries of the cache folder {path.parent.parent} can't be {what} ({reason})")


def remove_abandoned(folder: str | os.PathLike[str]) -> None:
    """Remove temporary files that processes have left in a cache when they were killed, a day ago or earlier."""
    for path in Path(folder).glob("??/*.tmp"):
        with suppress(OSError):  # of another user, or just removed by another process
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


def write_later(path: Path, content: Callable[[], Arrays], written: Callable[[], Any] = lambda: None) -> Future[None]:
    """Call write_entry(path, content()) in another thread, which calls `written` afterwards.

    This process waits for the entry before it reads it, and before it ends.
    """

    def write() -> None:
        try:
            with phase("write"):
                write_entry(path, content())
        finally:
            _pending.pop(path, None)
        written()

    future = _pending[path] = _writers().submit(write)
    if future.done():
        _pending.pop(path, None)
    return future


_pending: dict[Path, Future[None]] = {}  # entries that are being written


@functools.cache
def _writers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WRITERS)


def _forget_writing() -> None:
    """In a forked process, which has none of the threads: don't wait for entries that the parent writes."""
    _pending.clear()
    _writers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_writing)


def checksum(arrays: Arrays) -> int:
    """A number that depends on names, dtypes, shapes and content.

    It is the CRC of sums, because NumPy adds up words five times as fast as zlib computes a CRC. The sum of each block
    and the sum at each place in the blocks show any damage of up to three words, and moved and missing blocks.
    """
    found = 0
    for name, array in sorted(arrays.items()):
        found = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), found)
        content = np.ascontiguousarray(array).reshape(-1)
        words = content.view(f"u{content.itemsize}")
        whole = content.nbytes // BLOCK * (BLOCK // content.itemsize)
        blocks = words[:whole].reshape(-1, BLOCK // content.itemsize)
        for dim in (0, 1):
            found = zlib.crc32(blocks.sum(dim, np.uint64 if content.itemsize == 8 else np.uint32).data, found)
        found = zlib.crc32(words[whole:].data, found)
    return found
