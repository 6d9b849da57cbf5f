"""A disk cache: one safetensors file an entry, named by a hash of everything that decides its content."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 2  # raise when the meaning or the layout of entries changes

Tensors = dict[str, Tensor]


def cache_key(arrays: dict[str, NDArray[Any]], **options: Any) -> str:
    """A hash of arrays (dtype, shape and content), options and the format version."""
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **options}, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def entry_path(folder: str | os.PathLike[str], key: str, kind: str) -> Path:
    return Path(folder) / key[:2] / f"{key}.{kind}.safetensors"


def read_entry(path: Path) -> Tensors | None:
    """The tensors of an entry, mapped into memory rather than copied; writing to them doesn't change the file.

    None where there is none, or, with a warning, where it is damaged.
    """
    try:
        with safe_open(path, framework="pt") as entry:
            tensors = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118, not a dictionary
            expected = (entry.metadata() or {}).get("crc32")
        if str(_checksum(tensors)) != expected:
            raise SafetensorError("the checksum differs")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (SafetensorError, OSError, ValueError) as e:
        warnings.warn(f"cache entry {path} can't be read and is computed again ({type(e).__name__}: {e})", stacklevel=2)
        return None
    return tensors


def write_entry(path: Path, tensors: Tensors) -> None:
    """Write an entry so that it is either there whole or not at all, also with several writers at once.

    A cache that can't be written (a full disk, say) costs a warning, not the result.
    """
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # What safetensors writes only its owner may read, and users share caches: as the umask has it instead.
            temporary.touch(exist_ok=False)
            mode = temporary.stat().st_mode
            save_file(tensors, temporary, metadata={"crc32": str(_checksum(tensors))})
            temporary.chmod(mode)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as e:
        warnings.warn(f"cache entry {path} can't be written ({e})", stacklevel=2)


def _checksum(tensors: Tensors) -> int:
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, checksum)
    return checksum
