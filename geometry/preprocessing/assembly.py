"""From the arrays of a cache entry to the fields of `Operators`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.cache import Arrays
from diffnet.geometry.fields import FIELDS, FieldKind
from diffnet.geometry.preprocessing.flat import tensor_arrays
from diffnet.ops import Pattern, SparseMatrix


def assembled_fields(arrays: Arrays, faces: NDArray[np.int64], backward: bool = True) -> dict[str, Any]:
    """The fields of the operators in a cache entry. They share the memory of its arrays.

    faces: (F, 3)
    backward: see `Pattern.prepare`. Without it, this takes half of the time or less.
    """
    return fields_of(tensors_of(tensor_arrays(arrays, faces, backward)), backward)


def tensors_of(arrays: Arrays) -> dict[str, Tensor]:
    """Tensors that share the memory of arrays."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def fields_of(tensors: Mapping[str, Tensor], backward: bool = True, even: bool = False) -> dict[str, Any]:
    """The fields of `Operators` from the tensors of `tensor_arrays`.

    even: whether no row is long and products take the rows as they are stored, which a GPU would have to be asked for
    """
    vertices = tensors["mass"].shape[0]
    order = tensors["row_order"] if tensors["row_order"].shape[0] > 0 else None

    def sparse(name: str) -> SparseMatrix:
        indptr, indices = tensors[f"{name}_indptr"], tensors[f"{name}_indices"]
        pattern = Pattern(indptr, indices, vertices, order, check=False)
        if backward:
            # Arrays that equal the own ones take memory and are copied to a GPU once.
            starts = tensors.get(f"{name}_transposed_indptr", indptr)
            columns = tensors.get(f"{name}_transposed_indices", indices)
            transposed = Pattern(starts, columns, vertices, order, check=False)
            pattern = pattern.with_known(transpose=(transposed, tensors[f"{name}_transposed"]))
        if even:
            rows = indices.new_empty(0) if order is None else None
            pattern = pattern.with_known(long_pieces=indices.new_empty(0, 4, dtype=torch.int64), rows_by_length=rows)
        # Products and their backward need index arrays. `prepare` computes them here, once, outside of training steps
        # that may be compiled or captured.
        return SparseMatrix(pattern.prepare(backward=backward), tensors[name])

    def stored(name: str, kind: FieldKind) -> Any:
        tensor = tensors[name]
        if kind.optional and tensor.shape[0] == 0:
            return None
        if kind.kind == "matrix":
            return sparse(name)
        if tensor.dtype == torch.uint16:
            tensor = tensor.view(torch.bfloat16)
        if kind.kind == "values" and tensor.dtype != torch.float32:
            tensor = tensor.float() * tensors[f"{name}_scale"]
        return tensor

    fields = {name: stored(name, kind) for name, kind in FIELDS.items() if kind.stored}
    return {"ptr": tensors["ptr"], "faces": tensors["faces"], "face_ptr": tensors["face_ptr"], **fields}
