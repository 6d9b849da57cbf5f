"""A disk cache: one safetensors file an entry, named by a hash of everything that decides its content."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import uuid
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 4  # raise when the meaning or the layout of entries changes

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
        tensors, metadata = _map(path)
        if metadata["crc32"] != str(_checksum(tensors)):
            raise ValueError("the checksum differs")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as e:  # whatever damage leads to
        warnings.warn(f"cache entry {path} can't be read and is computed again ({type(e).__name__}: {e})", stacklevel=2)
        return None
    return tensors


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


def _map(path: Path) -> tuple[Tensors, dict[str, str]]:
    """The tensors and the metadata of a safetensors file.

    The library opens a file twice, by its name, and in between another process may put an entry in its place.
    """
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    begin = 8 + int.from_bytes(buffer[:8], "little")
    header = json.loads(buffer[8:begin])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, about in header.items():
        first, last = about["data_offsets"]
        content = torch.empty(0, dtype=torch.uint8)
        if last != first:  # which frombuffer refuses
            content = torch.frombuffer(buffer, dtype=torch.uint8, count=last - first, offset=begin + first)
        tensors[name] = content.view(_DTYPES[about["dtype"]]).reshape(about["shape"])
    return tensors, metadata


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
        if tensor.numel() > 0:  # others can't be viewed as bytes: the strides that NumPy gives them are 0
            checksum = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, checksum)
    return checksum
