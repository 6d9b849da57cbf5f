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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from diffnet.geometry.file_state import FileState, is_settled, state_of
from diffnet.geometry.processes import phase, warn_once
from diffnet.geometry.store.codec import GPU_ALIGNMENT, Arrays as Arrays, checksum, map_file, parsed, safetensors_of

FORMAT = 9  # increase when the meaning or the layout of entries changes

WRITERS = 4  # threads
ABANDONED = 86_400  # seconds since the last write to a temporary file

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
        with path.open("rb") as opened:  # once: another process may replace the entry
            file, memory = state_of(os.fstat(opened.fileno())), map_file(opened)
        arrays, metadata = parsed(memory)
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


def open_again(path: Path) -> tuple[BinaryIO, int] | None:
    """An entry that `read_entry` has found right, and its bytes. None if it hasn't, or if the file has changed since.

    Raises OSError.
    """
    file = path.open("rb", buffering=0)
    stat = os.fstat(file.fileno())
    if state_of(stat) in _sound:
        return file, stat.st_size
    file.close()
    return None


def has_entry(path: Path) -> bool:
    """Whether there is an entry that this process may read. That of another user may be closed to others."""
    return os.access(path, os.R_OK)


def check_arrays(arrays: Arrays, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raises ValueError for other names, dtypes or shapes than the expected ones."""
    if {name: (array.dtype.name, array.shape) for name, array in arrays.items()} != expected:
        raise ValueError("it holds other arrays than it should")


def write_entry(path: Path, arrays: Arrays) -> None:
    """Write an entry. Other processes see either the whole entry or none, even with several writers at once.

    If the entry can't be written, for example because the disk is full, this warns and goes on.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            metadata = {"format": str(FORMAT), "key": path.name, "checksum": str(checksum(arrays))}
            temporary.write_bytes(safetensors_of(arrays, metadata, GPU_ALIGNMENT))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        _warn_of_folder(path, "written", e)


def _warn_of_folder(path: Path, what: str, fault: Exception) -> None:
    """Warn that entries beside this one can't be read or written. Many share such a fault: the folder is named once."""
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
