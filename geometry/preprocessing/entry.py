"""Cache entries of operators: the path, which follows from mesh and options, and reading, checking and writing."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.cache import Arrays, cache_key, check_arrays, entry_path, read_entry, write_entry
from diffnet.geometry.fields import FIELDS
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.phases import phase
from diffnet.geometry.preprocessing.options import Options
from diffnet.geometry.preprocessing.packing import MATRICES, check_half, half_keys, packed, unpacked
from diffnet.geometry.preprocessing.recipe import computed_arrays

if TYPE_CHECKING:
    import torch

# NumPy has no bfloat16, so entries hold its bits.
BASIS_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


def stored_arrays(
    mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str] | None, device: torch.device | str = "cpu"
) -> Arrays:
    """All arrays of the operators of a mesh. If the cache doesn't have them, they are computed and written.

    mesh: see `mesh_for_operators`
    cache_dir: None computes the arrays without a cache

    Raises the errors of `computed_arrays`.
    """
    if cache_dir is None:
        return computed_arrays(mesh, options, device)
    path, arrays = find_operators(mesh, options, cache_dir)
    if arrays is None:
        arrays = computed_arrays(mesh, options, device)
        with phase("write"):
            write_entry(path, entry_of(mesh, arrays, options))
    return arrays


def entry_of(mesh: Mesh, arrays: Arrays, options: Options) -> Arrays:
    """The content of the entry that holds these arrays of the operators of a mesh."""
    # Restoring arrays takes more time than reading them, so this is for users who want small entries.
    return arrays if options.basis == "float32" else packed(arrays, mesh.verts)


def find_operators(mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str]) -> tuple[Path, Arrays | None]:
    """The file of the entry of a mesh, and all arrays of its operators; None as in `read_operators`."""
    with phase("check"):
        path = operators_path(mesh, options, cache_dir)
        entry = read_operators(path, len(mesh.verts), options)
        return path, None if entry is None else unpacked(entry, mesh.verts)


def operators_path(mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the entry of a mesh, see `mesh_for_operators`. The file need not exist."""
    content: Arrays = {"verts": mesh.verts.astype(np.float32), "faces": mesh.faces.astype(np.int32)}
    if mesh.normals is not None:
        content["normals"] = mesh.normals.astype(np.float32)
    return entry_path(cache_dir, cache_key(content, **asdict(options)), "operators")


def read_operators(path: Path, vertices: int, options: Options) -> Arrays | None:
    """The content of an entry, see `packed`.

    vertices: of the mesh

    None where there is no entry and, with a warning, where `read_entry` refuses it, where names, dtypes or shapes
    differ, or where indices are out of range.
    """
    return read_entry(path, lambda arrays: check_entry(arrays, vertices, options))


def check_entry(entry: Arrays, vertices: int, options: Options) -> None:
    """Raises ValueError for an entry that can't hold the operators of a mesh with this number of vertices."""
    arrays = dict(entry)
    halves = [name for name in MATRICES if f"{name}_gaps" in arrays]
    for name in halves:
        check_half(name, {key: arrays.pop(key) for key in half_keys(name)}, vertices)

    def count(name: str) -> int:
        return arrays[name].size if name in arrays else 0

    expected: dict[str, tuple[str, tuple[Any, ...]]] = {
        "evecs_scale": ("float32", (options.k,)),
        "row_order": ("int32", (vertices if count("row_order") else 0,)),
    }
    stored = {name: kind for name, kind in FIELDS.items() if kind.stored and name not in halves}
    for name, kind in stored.items():
        sizes: dict[Any, int] = {"V": 0 if kind.optional and not count(name) else vertices, "K": options.k}
        shape = tuple(sizes.get(size, size) for size in kind.shape if size != "B")  # an entry has one mesh
        if kind.kind == "matrix":
            entries = count(f"{name}_indices")
            shape = (*shape, entries)
            expected[f"{name}_indptr"] = "int32", (vertices + 1,)
            expected[f"{name}_indices"] = "int32", (entries,)
        if name == "frames" and count(name) == 6 * vertices:
            shape = (vertices, 2, 3)
        expected[name] = BASIS_DTYPES[options.basis] if kind.is_basis else kind.stored_dtype, shape
    check_arrays(arrays, expected)
    for name, kind in stored.items():
        if kind.kind == "matrix":
            indptr, indices = arrays[f"{name}_indptr"], arrays[f"{name}_indices"]
            if indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
                raise ValueError(f"{name}_indptr doesn't ascend from 0 to {len(indices)}")
            if not _in_range(indices, vertices):
                raise ValueError(f"{name}_indices are not all from 0 to {vertices - 1}")
        elif kind.kind == "vertices" and not _in_range(arrays[name], vertices):
            raise ValueError(f"{name} has indices that are not from 0 to {vertices - 1}")
    order = arrays["row_order"]
    if not _in_range(order, vertices) or np.bincount(order).max(initial=0) > 1:
        raise ValueError(f"row_order is not a permutation of 0 to {vertices - 1}")


def _in_range(indices: NDArray[np.int32], count: int) -> bool:
    # As unsigned numbers, negative ones are larger than any index.
    return int(indices.view(np.uint32).max(initial=0)) < count
