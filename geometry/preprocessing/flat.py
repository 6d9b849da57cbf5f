"""The arrays of all tensors of `Operators`, in one buffer. Worker processes make them, without PyTorch.

Processes and GPUs take one buffer in less time than many arrays, each of which has a fixed cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.cache import Arrays
from diffnet.geometry.fields import FIELDS

# Bytes. Memory that PyTorch allocates on a GPU has this alignment. Kernels are compiled for aligned and for unaligned
# pointers, so tensors in a flat buffer have the same.
ALIGNMENT = 512

Place: TypeAlias = "tuple[np.dtype[Any], tuple[int, ...], int]"  # dtype, shape and first byte in a flat buffer


class Flat(NamedTuple):
    """Arrays in one buffer.

    buffer: (bytes,)
    places: of each array
    """

    buffer: NDArray[np.uint8]
    places: dict[str, Place]

    def arrays(self) -> Arrays:
        """The arrays. They share the memory of the buffer."""
        return {name: np.ndarray(shape, dtype, self.buffer, at) for name, (dtype, shape, at) in self.places.items()}


def flat(arrays: Arrays) -> Flat:
    """A copy of arrays in one buffer."""
    offsets, size = layout(array.nbytes for array in arrays.values())
    items = zip(arrays.items(), offsets, strict=True)
    copies = Flat(np.empty(size, np.uint8), {name: (x.dtype, x.shape, at) for (name, x), at in items})
    for name, copied in copies.arrays().items():
        copied[...] = arrays[name]
    return copies


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offset of each array in a flat buffer, in bytes, and the size of the buffer.

    sizes: of the arrays, in bytes
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


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
