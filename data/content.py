"""Hashes of the content of meshes and labels, by which runs and networks know them again."""

from __future__ import annotations

import hashlib
from typing import Any

from numpy.typing import NDArray


def content_hash(*arrays: NDArray[Any]) -> str:
    """A hash of the shapes and the content of arrays: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()
