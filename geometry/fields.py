"""The fields of `Operators`. Each is declared here once, and the code that handles fields follows its declaration.

This module doesn't import PyTorch, because worker processes read from it which fields a cache entry holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from diffnet.ops import Pattern, SparseMatrix


@dataclass(frozen=True)
class FieldKind:
    """What a field is, and how it is packed, stored and put into the buffers of CUDA graphs.

    kind: "values", a floating-point tensor; "vertices", a tensor of vertex indices whose rows come first; "extents",
        (B+1,), where each mesh begins; "matrix", a `SparseMatrix` (V, V); "pattern", a `Pattern` (V, V)
    shape: of a tensor: numbers, "B" meshes, "V" vertices, "F" faces and "K" eigenpairs. A batch packs B, V or F. Of a
        matrix, the sets of values. Of extents, the rows that they divide.
    optional: whether None is the default
    missing: computes the field of a mesh that lacks it, if other meshes of its batch have it. If this is None, the
        whole batch lacks it then.
    packed_later: whether a batch packs it when it is first read, which suits large fields
    is_basis: whether `Operators.prepared` chooses the dtype
    stored: whether cache entries hold it. `FORMAT` in `geometry/store/cache.py` increases when this changes.
    padding: the value of added rows in a CUDA graph; "own" is the number of the row, "last" that of the last vertex
    count: of a matrix or pattern, the count in `BatchSize` that gives the entries
    refused: why CUDA graphs can't hold it, or "" if they can
    """

    kind: Literal["values", "vertices", "extents", "matrix", "pattern"]
    shape: tuple[Any, ...] = ()
    optional: bool = False
    missing: Callable[[Any], Any] | None = None
    packed_later: bool = False
    is_basis: bool = False
    stored: bool = False
    padding: float | Literal["own", "last"] = 0
    count: str = ""
    refused: str = ""

    @property
    def stored_dtype(self) -> str:
        """The NumPy dtype in cache entries. For a basis, `Options.basis` decides."""
        return "int32" if self.kind == "vertices" else "float32"

    @property
    def packed_dim(self) -> int:
        return [size in ("B", "V", "F") for size in self.shape].index(True)


def declared(*args: Any, **options: Any) -> dict[str, FieldKind]:
    """The metadata of a field. The arguments are those of `FieldKind`."""
    return {"kind": FieldKind(*args, **options)}


def _row_numbers(operators: Any) -> Tensor:
    from torch import arange

    return arange(operators.num_vertices, device=operators.device)


@dataclass(frozen=True, eq=False)
class Fields:
    """The fields of `Operators`, see there."""

    ptr: Tensor = field(metadata=declared("extents", ("V",)))
    mass: Tensor = field(metadata=declared("values", ("V",), stored=True))
    evals: Tensor = field(metadata=declared("values", ("B", "K"), stored=True))
    evecs: Tensor = field(metadata=declared("values", ("V", "K"), packed_later=True, is_basis=True, stored=True))
    laplacian: SparseMatrix = field(
        metadata=declared(
            "matrix",
            packed_later=True,
            stored=True,
            refused="implicit diffusion reads from the GPU how far its solver has come",
        )
    )
    gradient: SparseMatrix = field(metadata=declared("matrix", (2,), packed_later=True, stored=True, count="entries"))
    frames: Tensor = field(metadata=declared("values", ("V", 3, 3), packed_later=True, stored=True))
    faces: Tensor = field(metadata=declared("vertices", ("F", 3), packed_later=True, padding="last"))
    face_ptr: Tensor = field(
        metadata=declared("extents", ("F",), refused="the number of faces of each mesh differs between batches")
    )
    gradient_evecs: Tensor | None = field(default=None, metadata=declared("values", (2, "V", "K"), is_basis=True))
    neighborhood: Pattern | None = field(
        default=None, metadata=declared("pattern", missing=lambda o: o.gradient.pattern, count="neighbors")
    )
    joined: Tensor | None = field(
        default=None, metadata=declared("vertices", ("V",), missing=_row_numbers, stored=True, padding="own")
    )


def kinds_of(operators: type[Fields]) -> dict[str, FieldKind]:
    return {f.name: replace(f.metadata["kind"], optional=f.default is None) for f in fields(operators)}


FIELDS = kinds_of(Fields)
