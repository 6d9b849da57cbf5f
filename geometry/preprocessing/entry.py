"""Cache entries of operators: the path, which follows from mesh and options, and the check of the arrays that are read.

`cache.write_entry` writes them.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.cache import Arrays, cache_key, entry_path, read_entry
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.preprocessing.options import Options

# NumPy has no bfloat16, so entries hold its bits.
BASIS_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


def operators_path(mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the entry of a mesh with rounded positions and the normals in use. The file need not exist."""
    content: Arrays = {"verts": mesh.verts.astype(np.float32), "faces": mesh.faces}
    if mesh.normals is not None:
        content["normals"] = mesh.normals.astype(np.float32)
    return entry_path(cache_dir, cache_key(content, **asdict(options)), "operators")


def read_operators(path: Path, mesh: Mesh, options: Options) -> Arrays | None:
    """The arrays of an entry.

    None where there is no entry and, with a warning, where `read_entry` refuses it, where names, dtypes or shapes
    differ, or where indices are out of range.
    """
    return read_entry(path, lambda arrays: _check(arrays, len(mesh.verts), options))


def _check(arrays: Arrays, vertices: int, options: Options) -> None:
    """Raises ValueError for arrays that can't be the operators of a mesh with this number of vertices."""

    def count(name: str) -> int:
        return arrays[name].size if name in arrays else 0

    entries = [count(f"{name}_indices") for name in ("laplacian", "gradient")]
    k = options.k
    expected = {
        "mass": ("float32", (vertices,)),
        "evals": ("float32", (k,)),
        "evecs": (BASIS_DTYPES[options.basis], (vertices, k)),
        "evecs_scale": ("float32", (k,)),
        "frames": ("float32", (vertices, 3, 3)),
        "laplacian": ("float32", (entries[0],)),
        "laplacian_indptr": ("int32", (vertices + 1,)),
        "laplacian_indices": ("int32", (entries[0],)),
        "gradient": ("float32", (2, entries[1])),
        "gradient_indptr": ("int32", (vertices + 1,)),
        "gradient_indices": ("int32", (entries[1],)),
        "row_order": ("int32", (vertices if count("row_order") else 0,)),
        "joined": ("int32", (vertices if count("joined") else 0,)),
    }
    if {name: (array.dtype.name, array.shape) for name, array in arrays.items()} != expected:
        raise ValueError("it holds other arrays than it should")
    for name in ("laplacian", "gradient"):
        indptr, indices = arrays[f"{name}_indptr"], arrays[f"{name}_indices"]
        if indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
            raise ValueError(f"{name}_indptr doesn't ascend from 0 to {len(indices)}")
        if not _in_range(indices, vertices):
            raise ValueError(f"{name}_indices are not all from 0 to {vertices - 1}")
    if not _in_range(arrays["joined"], vertices):
        raise ValueError(f"joined has indices that are not from 0 to {vertices - 1}")
    order = arrays["row_order"]
    if not _in_range(order, vertices) or np.bincount(order).max(initial=0) > 1:
        raise ValueError(f"row_order is not a permutation of 0 to {vertices - 1}")


def _in_range(indices: NDArray[np.int32], count: int) -> bool:
    # As unsigned numbers, negative ones are larger than any index.
    return int(indices.view(np.uint32).max(initial=0)) < count
