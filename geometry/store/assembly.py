"""From the arrays of a cache entry to the fields of `Operators`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.fields import FIELDS
from diffnet.geometry.store.codec import Arrays
from diffnet.geometry.store.entry import tensor_arrays
from diffnet.geometry.store.transfer import aligned
from diffnet.ops import Pattern, SparseMatrix
from diffnet.ops.sparse.pattern import transposed_entries


def entry_fields() -> list[str]:
    """The names of the fields that a mesh gets from its entry and its faces."""
    return [name for name, kind in FIELDS.items() if kind.stored or not kind.optional]


def assembled_fields(arrays: Arrays, faces: NDArray[np.int64], backward: bool = True) -> dict[str, Any]:
    """The fields of the operators in a cache entry. They share the memory of its arrays, see `aligned`.

    faces: (F, 3)
    backward: see `Pattern.prepare`. Without it, this takes half of the time or less.
    """
    return fields_of(tensors_of(tensor_arrays(arrays, faces, backward)), backward)


def tensors_of(arrays: Arrays) -> dict[str, Tensor]:
    """Tensors that share the memory of arrays, see `aligned`."""
    return {name: aligned(torch.from_numpy(array)) for name, array in arrays.items()}


def fields_of(tensors: Mapping[str, Tensor], backward: bool = True, even: bool = False) -> dict[str, Any]:
    """The fields of `Operators` from these tensors, see `field_of`."""
    return {name: field_of(tensors, name, backward, even) for name in entry_fields()}


def field_of(tensors: Mapping[str, Tensor], name: str, backward: bool = True, even: bool = False) -> Any:
    """One of `entry_fields` from the tensors of `tensor_arrays`, or from those of an entry with ptr, faces, face_ptr.

    The patterns of such an entry are transposed on the device of the tensors, and should be symmetric.

    even: whether products are known to take the rows as they are stored, see `has_even_rows`
    """
    kind, tensor = FIELDS[name], tensors[name]
    if kind.optional and tensor.shape[0] == 0:
        return None
    if kind.kind == "matrix":
        return SparseMatrix(_pattern(tensors, name, backward, even), tensor)
    if kind.kind == "vertices":
        return tensor.long()
    if tensor.dtype == torch.uint16:
        tensor = tensor.view(torch.bfloat16)
    if kind.kind == "values" and tensor.dtype != torch.float32:
        tensor = tensor.float() * tensors[f"{name}_scale"]
    return tensor if tensor.ndim == len(kind.shape) else tensor[None]


def _pattern(tensors: Mapping[str, Tensor], name: str, backward: bool, even: bool) -> Pattern:
    indptr, indices, order = tensors[f"{name}_indptr"], tensors[f"{name}_indices"], tensors["row_order"]
    rows, row_order = indptr.shape[0] - 1, order if order.shape[0] > 0 else None
    pattern = Pattern(indptr, indices, rows, row_order, check=False)
    if backward:
        # Arrays that equal the own ones take memory and are copied to a GPU once.
        starts = tensors.get(f"{name}_transposed_indptr", indptr)
        columns = tensors.get(f"{name}_transposed_indices", indices)
        transposed = Pattern(starts, columns, rows, row_order, check=False)
        entries = tensors.get(f"{name}_transposed")
        pattern = pattern.with_known(
            transpose=(transposed, transposed_entries(pattern) if entries is None else entries)
        )
    if even:
        by_length = indices.new_empty(0) if row_order is None else None
        pattern = pattern.with_known(long_pieces=indices.new_empty(0, 4, dtype=torch.int64), rows_by_length=by_length)
    # Products and their backward need index arrays. `prepare` computes them here, once, outside of training steps that
    # may be compiled or captured.
    return pattern.prepare(backward=backward)
