"""How files are recognized as changed. Whatever keeps results of files goes by this module.

A file is unchanged while its inode, size and times are. Otherwise, and for files that changed within the last second,
a hash of the content decides. docs/preprocessing.md says what that finds, and what it doesn't.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from diffnet.geometry.mesh.content import decompress
from diffnet.geometry.mesh.gltf import embed_buffers

# Device, inode, size and times of change and of modification.
FileState: TypeAlias = tuple[int, int, int, int, int]
SETTLED = 1_000_000_000  # nanoseconds


class FileIdentity(NamedTuple):
    """What a file is recognized by later, also by other processes.

    state: a hash of its state without the device, whose number is another one after a restart; 0 if it can't tell
    content: a hash of its bytes, 32 hexadecimal digits
    """

    state: int
    content: str


def file_identity(path: str | os.PathLike[str], before: FileIdentity | None = None) -> FileIdentity:
    """The identity of a file. The file is read, unless it has the state that it had in `before`.

    Raises OSError.
    """
    state = state_number(path)  # before reading: a file that changes meanwhile is then read again
    if before is not None and before.state == state:
        return before
    return FileIdentity(state or 0, hash_of_content(Path(path)))


def state_number(path: str | os.PathLike[str]) -> int | None:
    """The `state` of the identity of a file. None if it can't tell, or the file is missing."""
    state = settled_state(path)
    return None if state is None else hash(state[1:])  # of numbers, so it is equal in all processes


def settled_state(path: str | os.PathLike[str]) -> FileState | None:
    """The state of a file, which changes when its content does. None if the file has just changed, or is missing."""
    try:
        state = state_of(os.stat(path))
    except (OSError, ValueError):
        return None
    return state if is_settled(state) and not _has_parts(path) else None


def state_of(stat: os.stat_result) -> FileState:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime_ns, stat.st_mtime_ns


def is_settled(state: FileState) -> bool:
    """Whether the file last changed so long ago that its next change will have another time."""
    return time.time_ns() - max(state[-2:]) > SETTLED


def hashed(*values: Any) -> int:
    """A hash of values, of which `repr` tells all, and of bytes. It fits int64."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        digest.update(value if isinstance(value, bytes) else repr(value).encode(errors="backslashreplace"))
    return int.from_bytes(digest.digest(), "little", signed=True)


def _has_parts(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).lower().endswith((".gltf", ".gltf.gz"))


def hash_of_content(path: Path) -> str:
    data = path.read_bytes()
    if _has_parts(path):
        with suppress(ValueError):  # reading the mesh names the fault
            data += embed_buffers(decompress(data) if path.suffix.lower() == ".gz" else data, path.parent)
    return hashlib.blake2b(data, digest_size=16).hexdigest()
