"""Operators from a cache entry whose name is known, so that nothing of the mesh has to be hashed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.cache import Arrays
from diffnet.geometry.fields import FIELDS
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.operators import Operators, packed_later
from diffnet.geometry.preprocessing.assembly import assembled_fields, field_of, given_fields
from diffnet.geometry.preprocessing.entry import operators_path, read_operators
from diffnet.geometry.preprocessing.options import Options
from diffnet.geometry.preprocessing.packing import unpacked
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.memo import Later
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.op import spmm_operator
from diffnet.ops.sparse.pattern import PIECE, are_similar


def entry_name(mesh: Mesh, options: Options) -> tuple[str, NDArray[np.float64]]:
    """The name of the entry that `precompute` writes for a mesh, and the positions (V, 3) that it is computed from.

    mesh: at normalized positions
    """
    used = mesh_for_operators(mesh)
    return operators_path(used, options, "").name.partition(".")[0], used.verts


def operators_at(
    path: Path,
    faces: NDArray[np.int64],
    vertices: int,
    options: Options,
    verts: NDArray[Any] | None = None,
    backward: bool = True,
) -> Operators | None:
    """The operators in an entry, on the CPU. None as in `read_operators`.

    faces: (F, 3), of the mesh
    verts: the positions of `entry_name`, for a basis in half precision; None for float32
    backward: see `assembled_fields`
    """
    entry = read_operators(path, vertices, options)
    if entry is None:
        return None
    return Operators(**assembled_fields(entry if verts is None else unpacked(entry, verts), faces, backward))


def operators_of_tensors(
    tensors: Mapping[str, Tensor], vertices: int, faces: int, basis_dtype: torch.dtype
) -> Operators:
    """The operators of a mesh with even rows, on the device of the tensors, as a network uses them.

    The result is that of `Operators.prepared`. It takes half as many operations of PyTorch, each of which can wait for
    threads that hold Python's global lock. Large fields that networks rarely read are made when they are first read.

    tensors: of its entry in float32, for which `have_even_rows`, and `ptr`, `faces` and `face_ptr`
    """
    basis = _basis(tensors, basis_dtype)
    make = {name: partial(field_of, tensors, name, backward=False, even=True) for name in given_fields()}
    later = {name: Later(make[name]) for name in make if FIELDS[name].packed_later and name not in basis}
    rest = {name: make[name]() if name in make else None for name in FIELDS if name not in later and name not in basis}
    return packed_later({**rest, **basis}, later, {"_lengths": (vertices,), "_face_lengths": (faces,)})


def _basis(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    evecs, values, indices = tensors["evecs"], tensors["gradient"], tensors["gradient_indices"]
    none = indices.new_empty(0)
    csr = CsrArrays(tensors["gradient_indptr"], indices, none, tensors["row_order"], none)
    triton = use_kernels("auto", values, evecs)
    # The second pattern is the transpose, which this product doesn't read.
    gradient_evecs = spmm_operator([*csr, *csr, none], values, evecs[None], False, False, triton)
    return {"evecs": evecs.to(dtype), "gradient_evecs": gradient_evecs.to(dtype)}


def have_even_rows(operators: Operators) -> bool:
    """Whether products take the rows as they are stored. Call this on the CPU: on a GPU, the CPU would wait for it."""
    patterns = operators.laplacian.pattern, operators.gradient.pattern
    return all(
        len(pattern.long_pieces) == 0 and (pattern.row_order is not None or len(pattern.rows_by_length) == 0)
        for pattern in patterns
    )


def show_even_rows(arrays: Arrays) -> bool:
    """Whether operators from these arrays have even rows by a quick check, which is enough for most meshes.

    Unlike `have_even_rows`, it needs no operators, and it can be False for some meshes with even rows.
    """
    ordered = len(arrays["row_order"]) > 0
    for indptr in (arrays["laplacian_indptr"], arrays["gradient_indptr"]):
        rows, longest = len(indptr) - 1, int(np.diff(indptr).max(initial=0))
        if longest > PIECE or not (ordered or are_similar(rows, longest, int(indptr[-1]))):
            return False
    return True
