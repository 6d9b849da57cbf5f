"""Operators from cache entries that are mapped into memory, or that lie in one buffer of pinned memory.

Threads that make tensors wait for Python's global lock. Threads that read bytes into a buffer don't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffnet.geometry.fields import FIELDS
from diffnet.geometry.operators import Operators, packed_later
from diffnet.geometry.options import Options
from diffnet.geometry.store.assembly import assembled_fields, entry_fields, field_of, fields_of
from diffnet.geometry.store.cache import open_again
from diffnet.geometry.store.codec import GPU_ALIGNMENT, Arrays, Place, arrays_at, header_of, layout, places_in
from diffnet.geometry.store.entry import MATRICES, all_arrays, read_operators
from diffnet.geometry.store.transfer import TensorsAt, empty_pinned
from diffnet.ops.common.backend import use_kernels
from diffnet.ops.common.memo import Later
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.op import spmm_operator
from diffnet.ops.sparse.pattern import MAX_UNEVENNESS, PIECE, ROWS_TOGETHER


class PinnedEntries(NamedTuple):
    """Arrays in a buffer of pinned memory, (bytes,) uint8, and their places there."""

    buffer: Tensor
    places: dict[str, Place]

    @classmethod
    def of(cls, arrays: Arrays) -> PinnedEntries:
        """A copy of arrays."""
        offsets, size = layout(array.nbytes for array in arrays.values())
        places = {name: (x.dtype, x.shape, at) for (name, x), at in zip(arrays.items(), offsets, strict=True)}
        entries = cls(empty_pinned(size), places)
        for name, array in arrays_at(entries.buffer.numpy(), places).items():
            array[...] = arrays[name]
        return entries

    @property
    def are_direct(self) -> bool:
        """Whether a GPU can use them as they are. Those that an earlier version has written are not aligned."""
        aligned = all(first % GPU_ALIGNMENT == 0 for *_, first in self.places.values())
        return aligned and has_even_rows(arrays_at(self.buffer.numpy(), self.places))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> TensorsAt:
        """The tensors on a device. They share one buffer."""
        return TensorsAt(self.buffer.to(device, non_blocking=non_blocking), self.places)

    def operators(self, device: torch.device) -> Operators:
        """The operators on a device.

        The arrays are those of `tensor_arrays`, or those of an entry with symmetric patterns and its faces. They
        `has_even_rows`.
        """
        return Operators(**fields_of(self.to(device, non_blocking=True), even=True))


def read_again(paths: Iterable[Path]) -> PinnedEntries | None:
    """The arrays in entries that this process has read before, and ptr and face_ptr, which entries don't hold.

    None if an entry is gone or has changed.
    """
    with ExitStack() as files:
        try:
            opened = []
            for path in paths:
                entry = open_again(path)
                if entry is None:
                    return None
                files.enter_context(entry[0])
                opened.append(entry)
            (*starts, of_vertices, of_faces), size = layout([*(count for _, count in opened), 16, 16])
            buffer = empty_pinned(size)
            content, places = buffer.numpy().data, dict[str, Place]()
            for (file, count), start in zip(opened, starts, strict=True):
                memory = content[start : start + count]
                if file.readinto(memory) != count:  # type: ignore[attr-defined]
                    return None
                items = _places_in(header_of(memory))[0].items()
                places |= {name: (dtype, shape, start + first) for name, (dtype, shape, first) in items}
        except OSError:
            return None
    for name, rows, first in (("ptr", "mass", of_vertices), ("face_ptr", "faces", of_faces)):
        content[first : first + 16] = np.array([0, places[rows][1][0]], np.int64).data.cast("B")
        places[name] = np.dtype(np.int64), (2,), first
    return PinnedEntries(buffer, places)


_places_in = lru_cache(4096)(places_in)  # headers of about 3 kB; a sample is read in every epoch


def has_even_rows(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether facts say that products take the rows as they are stored, so that the CPU need not wait for a GPU.

    False for entries of earlier versions.
    """
    if "facts" not in arrays:
        return False
    rows, ordered = arrays["facts"][: 2 * len(MATRICES)].reshape(-1, 2).tolist(), len(arrays["row_order"]) > 0
    return all(
        longest <= PIECE and (ordered or ROWS_TOGETHER * groups <= MAX_UNEVENNESS * len(arrays[f"{name}_indices"]))
        for name, (longest, groups) in zip(MATRICES, rows, strict=True)
    )


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
    verts: the positions that operators are computed from, for a basis in half precision; None for float32
    backward: see `assembled_fields`
    """
    entry = read_operators(path, vertices, options)
    if entry is None:
        return None
    return Operators(**assembled_fields(entry if verts is None else all_arrays(entry, verts), faces, backward))


def operators_of_tensors(
    tensors: Mapping[str, Tensor], vertices: int, faces: int, basis_dtype: torch.dtype
) -> Operators:
    """The operators of a mesh with even rows, on the device of the tensors, as a network uses them.

    The result is that of `Operators.prepared`. It takes half as many operations of PyTorch, each of which can wait for
    threads that hold Python's global lock. Large fields that networks rarely read are made when they are first read.

    tensors: of its entry in float32, for which `has_even_rows`, and `ptr`, `faces` and `face_ptr`
    """
    basis = _basis(tensors, basis_dtype)
    make = {name: partial(field_of, tensors, name, backward=False, even=True) for name in entry_fields()}
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
