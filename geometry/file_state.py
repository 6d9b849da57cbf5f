"""How files are recognized as changed. Whatever keeps results of files goes by this module.

A file is taken for unchanged while its inode, its size and its times of change and of modification stay. `cp -p`,
`rsync -t` and `touch -r` give a file the size and the time of modification of another one, but users can't set a time
of change. Where one of these differs, as in a copy of a data set with its cache on another machine, a hash of the
content decides. It also decides for files that changed within the last second, because a second change can leave their
times, and for glTF files, whose buffers can be in other files.

Limits: Windows and some file systems keep no time of change. There, a file that is overwritten in place by one of the
same size and time of modification is not noticed. A change is also missed if the clock of a file server is behind by
more than a second, and a file changes twice within one tick of it.
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
    return None if state is None else hashed(state[1:])


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
