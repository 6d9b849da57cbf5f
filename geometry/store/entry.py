"""The arrays of operators: those that cache entries hold, and those that follow from them.

This module doesn't import PyTorch, because worker processes compute entries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.fields import FIELDS
from diffnet.geometry.options import Options
from diffnet.geometry.store.cache import check_arrays, read_entry
from diffnet.geometry.store.codec import Arrays
from diffnet.geometry.store.halves import MATRICES, check_half, half_keys

ROWS_TOGETHER = 8  # as in ops/sparse/pattern.py, which needs PyTorch
# NumPy has no bfloat16, so entries hold its bits.
BASIS_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


def read_operators(path: Path, vertices: int, options: Options) -> Arrays | None:
    """The content of an entry, see `small_entry`.

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
    if "facts" in arrays:  # entries of earlier versions don't have them
        expected["facts"] = "int32", (2 * len(MATRICES) + 2,)
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


def with_facts(arrays: Arrays, warns: bool) -> Arrays:
    """The arrays of the operators of a mesh with `facts`, int32, so that readers need not find them out.

    They are, for each of MATRICES, the entries of the longest row and the sum over groups of ROWS_TOGETHER of those of
    their longest rows; whether a pattern is not symmetric; and whether `precompute` warns of the mesh.
    """
    lengths = [np.diff(arrays[f"{name}_indptr"]) for name in MATRICES]
    groups = np.arange(0, len(arrays["mass"]), ROWS_TOGETHER)
    rows = [(int(each.max(initial=0)), int(np.maximum.reduceat(each, groups).sum())) for each in lengths]
    asymmetric = any(f"{name}_transposed_indices" in _transposed(name, arrays) for name in MATRICES)
    return arrays | {"facts": np.array([*sum(rows, ()), asymmetric, warns], np.int32)}


def tensor_arrays(arrays: Arrays, faces: NDArray[np.int64], backward: bool = True) -> Arrays:
    """The arrays of a cache entry and what follows from them: everything from which `fields_of` makes operators.

    The arrays share the memory of the given ones where they have the same values.

    faces: (F, 3)
    backward: whether to transpose the matrices, which takes half of the time or more
    """
    found: dict[str, NDArray[Any]] = {
        "ptr": np.array([0, len(arrays["mass"])], np.int64),
        "faces": faces,
        "face_ptr": np.array([0, len(faces)], np.int64),
        **arrays,
    }
    for name, kind in FIELDS.items():
        if kind.stored and kind.kind == "vertices":
            found[name] = arrays[name].astype(np.int64)
        elif kind.stored and kind.kind == "matrix" and backward:
            found |= _transposed(name, arrays)
        elif kind.stored and kind.shape[:1] == ("B",):
            found[name] = arrays[name][None]
    return found


def _transposed(name: str, arrays: Arrays) -> Arrays:
    """The arrays of `Pattern.transpose` of a square matrix. Those that equal the matrix's own ones are left out.

    SciPy counts entries on this thread. PyTorch sorts them on several threads, which share the cores with the threads
    of NumPy's BLAS for some milliseconds after an eigenbasis.
    """
    indptr, indices, order = arrays[f"{name}_indptr"], arrays[f"{name}_indices"], arrays["row_order"]
    rows = len(indptr) - 1
    matrix = scipy.sparse.csr_array((np.arange(len(indices), dtype=np.int64), indices, indptr), shape=(rows, rows))
    matrix = matrix[np.argsort(order)].tocsc()[:, order] if len(order) else matrix.tocsc()
    transposed = {f"{name}_transposed": matrix.data}
    starts, columns = (a.astype(np.int32, copy=False) for a in (matrix.indptr, matrix.indices))
    if not (np.array_equal(starts, indptr) and np.array_equal(columns, indices)):
        transposed |= {f"{name}_transposed_indptr": starts, f"{name}_transposed_indices": columns}
    return transposed
