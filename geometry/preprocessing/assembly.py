"""From the arrays of a cache entry to the fields of `Operators`."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray

from diffnet.geometry.cache import Arrays
from diffnet.geometry.fields import FIELDS, FieldKind
from diffnet.ops import Pattern, SparseMatrix


def assembled_fields(arrays: Arrays, faces: NDArray[np.int64], backward: bool = True) -> dict[str, Any]:
    """The fields of the operators in a cache entry. They share the memory of its arrays.

    faces: (F, 3)
    backward: see `Pattern.prepare`. Without it, this takes half of the time or less.
    """
    vertices = len(arrays["mass"])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    order = tensors["row_order"] if len(tensors["row_order"]) > 0 else None

    def sparse(name: str) -> SparseMatrix:
        indptr, indices = tensors[f"{name}_indptr"], tensors[f"{name}_indices"]
        pattern = Pattern(indptr, indices, vertices, order, check=False)
        if backward:
            pattern = pattern.with_known(transpose=_transposed(indptr, indices, order))
        # Products and their backward need index arrays. `prepare` computes them here, once, outside of training steps
        # that may be compiled or captured.
        return SparseMatrix(pattern.prepare(backward=backward), tensors[name])

    def extent(count: int) -> torch.Tensor:
        return torch.tensor([0, count], dtype=torch.int64)

    def stored(name: str, kind: FieldKind) -> Any:
        tensor = tensors[name]
        if kind.optional and len(tensor) == 0:
            return None
        if kind.kind == "matrix":
            return sparse(name)
        if kind.kind == "vertices":
            return tensor.long()
        if tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        if tensor.dtype != torch.float32:
            tensor = tensor.float() * tensors[f"{name}_scale"]
        return tensor[None] if kind.shape[0] == "B" else tensor

    fields = {name: stored(name, kind) for name, kind in FIELDS.items() if kind.stored}
    return {"ptr": extent(vertices), "faces": torch.from_numpy(faces), "face_ptr": extent(len(faces)), **fields}


def _transposed(
    indptr: torch.Tensor, indices: torch.Tensor, row_order: torch.Tensor | None
) -> tuple[Pattern, torch.Tensor]:
    """`Pattern.transpose` of a square pattern, by SciPy.

    SciPy counts entries on this thread. PyTorch sorts them on several threads, which share the cores with the threads
    of NumPy's BLAS for some milliseconds after an eigenbasis.
    """
    rows = len(indptr) - 1
    positions = np.arange(len(indices), dtype=np.int64)
    matrix = scipy.sparse.csr_array((positions, indices.numpy(), indptr.numpy()), shape=(rows, rows))
    if row_order is None:
        matrix = matrix.tocsc()
    else:
        order = row_order.numpy()
        matrix = matrix[np.argsort(order)].tocsc()[:, order]
    starts, columns = (torch.from_numpy(a.astype(np.int32, copy=False)) for a in (matrix.indptr, matrix.indices))
    if torch.equal(starts, indptr) and torch.equal(columns, indices):
        starts, columns = indptr, indices  # they take memory and are copied to a GPU once
    return Pattern(starts, columns, rows, row_order, check=False), torch.from_numpy(matrix.data)
