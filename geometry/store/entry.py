"""The arrays of operators: those that cache entries hold, and those that follow from them.

Small entries are those of a basis in half precision: the arrays of operators without what follows from others. A matrix
with a symmetric pattern is stored as its upper triangle. `NAME_lengths` (V,) are the entries of each row, and
`NAME_gaps` (nnz,) the number of the column minus that of the row, both in the order in which rows are stored.
`laplacian_upper` (nnz,) are the values of the Laplacian. Those of the gradient follow from the positions, the frames
and the pattern. Of the frames, (V, 2, 3), tangent x and normal are stored. An array is left out only if it is restored
with equal values. So operators are the same with and without a cache.

This module doesn't import PyTorch, because worker processes compute entries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.discretize.gradient import gradient_values
from diffnet.geometry.fields import FIELDS
from diffnet.geometry.options import Options
from diffnet.geometry.store.cache import check_arrays, read_entry
from diffnet.geometry.store.codec import Arrays

MATRICES = ("laplacian", "gradient")
Array = NDArray[np.float64]
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
    if "facts" in arrays:
        return arrays
    lengths = [np.diff(arrays[f"{name}_indptr"]) for name in MATRICES]
    groups = np.arange(0, len(arrays["mass"]), ROWS_TOGETHER)
    rows = [(int(each.max(initial=0)), int(np.maximum.reduceat(each, groups).sum())) for each in lengths]
    asymmetric = any(f"{name}_transposed_indices" in _transposed(name, arrays) for name in MATRICES)
    return arrays | {"facts": np.array([*sum(rows, ()), asymmetric, warns], np.int32)}


def tensor_arrays(arrays: Arrays, faces: NDArray[np.int64], backward: bool = True) -> Arrays:
    """The arrays of a cache entry and what follows from them: everything from which `fields_of` makes operators.

    They share memory where they have the same values.

    faces: (F, 3)
    backward: whether to transpose the matrices, which takes half of the time or more
    """
    result: dict[str, NDArray[Any]] = {
        "ptr": np.array([0, len(arrays["mass"])], np.int64),
        "faces": faces,
        "face_ptr": np.array([0, len(faces)], np.int64),
        **arrays,
    }
    for name, kind in FIELDS.items():
        if kind.stored and kind.kind == "vertices":
            result[name] = arrays[name].astype(np.int64)
        elif kind.stored and kind.kind == "matrix" and backward:
            result |= _transposed(name, arrays)
        elif kind.stored and kind.shape[:1] == ("B",):
            result[name] = arrays[name][None]
    return result


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


# ---- small entries ----


def small_entry(arrays: Arrays, verts: Array) -> Arrays:
    """The content of an entry.

    arrays: all arrays of the operators, see `complete`
    verts: (V, 3), the positions from which they were computed
    """
    entry = dict(arrays)
    frames = np.ascontiguousarray(arrays["frames"][:, ::2])
    if np.array_equal(_frames(frames), arrays["frames"]):
        entry["frames"] = frames
    for name in MATRICES:
        half = _half(name, arrays)
        if name == "gradient" and not _has_diagonal(half):
            continue  # of joined vertices, which read functions at the first ones
        whole = _whole(name, half, arrays["frames"], arrays["row_order"], verts)
        if all(np.array_equal(array, arrays[key]) for key, array in whole.items()):
            entry = {key: array for key, array in entry.items() if key not in whole} | half
    return entry


def all_arrays(entry: Arrays, verts: Array) -> Arrays:
    """All arrays of the operators from the content of an entry. The inverse of `small_entry`."""
    frames = entry["frames"] if entry["frames"].shape[1] == 3 else _frames(entry["frames"])
    arrays = entry | {"frames": frames}
    for name in MATRICES:
        half = {key: arrays.pop(key) for key in half_keys(name) if key in arrays}
        if half:
            arrays |= _whole(name, half, frames, entry["row_order"], verts)
    return arrays


def half_keys(name: str) -> list[str]:
    """The arrays that stand for a matrix of which the upper triangle is stored."""
    return [f"{name}_lengths", f"{name}_gaps", *(["laplacian_upper"] if name == "laplacian" else [])]


def check_half(name: str, half: Arrays, vertices: int) -> None:
    """Raises ValueError for arrays that can't be the upper triangle of a matrix (V, V)."""
    lengths, gaps, *values = (half[key] for key in half_keys(name))
    if lengths.shape != (vertices,) or lengths.dtype.kind != "u" or gaps.dtype.kind != "u":
        raise ValueError(f"{name}_lengths or {name}_gaps are other arrays than they should be")
    if gaps.shape != (int(lengths.sum()),):
        raise ValueError(f"{name}_lengths should add up to the entries, {gaps.shape}")
    if any(array.shape != gaps.shape or array.dtype != np.float32 for array in values):
        raise ValueError(f"{name}_upper is another array than it should be")
    if len(gaps) and int((_rows(lengths).astype(np.int64) + gaps).max()) >= vertices:
        raise ValueError(f"{name}_gaps lead to columns that are not from 0 to {vertices - 1}")
    if name == "gradient" and not _has_diagonal(half):
        raise ValueError(f"{name}_gaps don't have the whole diagonal")


def _has_diagonal(half: Arrays) -> bool:
    lengths, gaps = half["gradient_lengths"], half["gradient_gaps"]
    if not lengths.all():
        return False
    firsts = np.cumsum(lengths, dtype=np.int64) - lengths
    return not gaps[firsts].any()


def rounded_frames(frames: Array) -> Array:
    """Frames (V, 3, 3) as they are restored from single precision, float64."""
    return _frames(frames[:, ::2].astype(np.float32)).astype(np.float64)


def _frames(tangents_and_normals: NDArray[np.float32]) -> NDArray[np.float32]:
    """Frames (V, 3, 3) from their first and third axes, (V, 2, 3)."""
    frames = np.empty((len(tangents_and_normals), 3, 3), np.float32)
    frames[:, ::2] = tangents_and_normals
    x, normal = np.ascontiguousarray(tangents_and_normals.transpose(1, 2, 0), np.float64)
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        frames[:, 1, i] = normal[j] * x[k] - normal[k] * x[j]
    return frames


def _half(name: str, arrays: Arrays) -> Arrays:
    indptr, indices = (arrays[f"{name}_{part}"] for part in ("indptr", "indices"))
    order = arrays["row_order"]
    places = np.argsort(order).astype(np.int32) if len(order) else None
    numbers = np.arange(len(indices), dtype=np.int32)
    vertices = len(indptr) - 1
    matrix = scipy.sparse.csr_array(
        (numbers, indices if places is None else places[indices], indptr), (vertices, vertices)
    )
    matrix.sort_indices()
    rows = _rows(np.diff(indptr))
    upper = matrix.indices >= rows
    lengths, gaps = np.bincount(rows[upper], minlength=vertices), (matrix.indices - rows)[upper]
    half = {f"{name}_lengths": _compact(lengths), f"{name}_gaps": _compact(gaps)}
    return half | ({"laplacian_upper": arrays[name][matrix.data[upper]]} if name == "laplacian" else {})


def _whole(name: str, half: Arrays, frames: NDArray[np.float32], order: NDArray[np.int32], verts: Array) -> Arrays:
    """Values, indptr and indices of a matrix."""
    lengths, gaps = half[f"{name}_lengths"], half[f"{name}_gaps"]
    shape = len(lengths), len(lengths)
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    columns = _rows(lengths)
    columns += gaps
    # The numbers of the entries, from 1: SciPy leaves out sums that are 0.
    numbers = np.arange(1, len(gaps) + 1, dtype=np.int32)
    lower = scipy.sparse.csr_array((numbers, columns, starts), shape).T.tocsr()
    upper = scipy.sparse.csr_array((np.where(gaps == 0, np.int32(0), numbers), columns, starts), shape)
    matrix = upper + lower
    if len(order):
        matrix.indices = order[matrix.indices]
        matrix.has_sorted_indices = False
        matrix.sort_indices()
    if name == "laplacian":
        values = half["laplacian_upper"][matrix.data - 1]
    else:
        values = _gradient(verts, frames, matrix, order)
    return {name: values, f"{name}_indptr": matrix.indptr, f"{name}_indices": matrix.indices}


def _gradient(
    verts: Array, frames: NDArray[np.float32], matrix: scipy.sparse.csr_array, order: NDArray[np.int32]
) -> NDArray[np.float32]:
    """The values (2, nnz) of the gradient, for rows in the order in which they are stored."""
    entries = None
    if len(order):
        numbers = np.arange(matrix.nnz)
        stored = scipy.sparse.csr_array((numbers, matrix.indices, matrix.indptr), matrix.shape)
        matrix = stored[np.argsort(order)]
        entries = np.argsort(matrix.data)
    with np.errstate(over="ignore"):
        values = gradient_values(verts, frames.astype(np.float64), matrix).astype(np.float32)
    return values if entries is None else np.ascontiguousarray(values[:, entries])


def _rows(lengths: NDArray[Any]) -> NDArray[np.int32]:
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def _compact(numbers: NDArray[Any]) -> NDArray[Any]:
    """The same non-negative integers in the smallest dtype."""
    return numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
