"""A disk cache of operators: one npz file an entry, named by a hash of everything that decides its content."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1  # raise when the meaning or the layout of entries changes

Arrays = dict[str, NDArray[Any]]


def cache_key(arrays: Arrays, **options: Any) -> str:
    """A hash of arrays (dtype, shape and content), options and the format version."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **options}, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def entry_path(folder: str | os.PathLike[str], key: str) -> Path:
    return Path(folder) / key[:2] / f"{key}.npz"


def read_entry(path: Path) -> Arrays | None:
    """The arrays of an entry; None where there is none, or, with a warning, where it can't be read."""
    try:
        with np.load(path, allow_pickle=False) as entry:
            return {name: entry[name] for name in entry.files}  # zip members carry checksums, checked on reading
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as e:  # a damaged zip raises whatever the damage leads to: zlib.error, RuntimeError, TypeError …
        warnings.warn(f"cache entry {path} can't be read and is computed again ({type(e).__name__}: {e})", stacklevel=2)
        return None


def write_entry(path: Path, arrays: Arrays) -> None:
    """Write an entry so that it is either there whole or not at all, also with several writers at once.

    A cache that can't be written (a full disk, say) costs a warning, not the result.
    """
    # A name by hand rather than by tempfile, whose files nobody else may read: users share caches.
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        warnings.warn(f"cache entry {path} can't be written ({e})", stacklevel=2)
