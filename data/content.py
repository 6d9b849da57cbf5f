"""What follows from the content of meshes and labels alone: hashes, and generators of random numbers."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry import Mesh


def content_hash(*arrays: NDArray[Any]) -> str:
    """A hash of the shapes and the content of arrays: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def generator_of(mesh: Mesh) -> np.random.Generator:
    """A generator of random numbers that depend on the vertices and the faces of a mesh alone."""
    return np.random.default_rng(zlib.crc32(mesh.faces.tobytes(), zlib.crc32(mesh.verts.tobytes())))
