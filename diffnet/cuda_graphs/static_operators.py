"""`Operators` at fixed addresses, which the kernels of a CUDA graph read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from diffnet.cuda_graphs.buffers import BatchBuffers, Read
from diffnet.cuda_graphs.sizes import BatchSize
from diffnet.geometry import Operators
from diffnet.geometry.fields import FIELDS, FieldKind
from diffnet.ops import Pattern, SparseMatrix
from diffnet.ops.common.cuda_graph import NotCapturable

Fields = list[tuple[torch.dtype | None, str]]  # the names of fields, and the dtype of the basis, see `prepared`


class StaticOperators(Operators):
    """The operators of a batch in buffers that are larger than the batch.

    A network reads them like any other operators. A field gets its buffer when it is read for the first time, so
    nothing is copied that the network doesn't use. The added vertices belong to the last mesh. They have no mass and no
    edges, and eigenvectors are 0 there, so they change nothing at the vertices of the batch.

    buffers: where the fields lie
    basis: the dtype of the eigenvectors and of their gradients, see `prepared`; None for the fields of the batch as
        they are
    """

    def __init__(self, buffers: BatchBuffers, basis: torch.dtype | None = None) -> None:
        self.buffers, self.basis = buffers, basis
        self.field_values: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        """Read a field of `Operators` from its buffer."""
        if name not in FIELDS and name not in _OTHERS:
            return object.__getattribute__(self, name)
        values = self.field_values
        if name not in values:
            values[name] = _field(self, name, FIELDS[name]) if name in FIELDS else _OTHERS[name](self)
        return values[name]

    def __reduce__(self) -> NoReturn:
        raise TypeError("operators in the buffers of a CUDA graph can't be copied")

    def fields_read(self) -> Fields:
        """The fields that have been read."""
        fields: Fields = []
        for name, value in self.field_values.items():
            fields += value.fields_read() if isinstance(value, StaticOperators) else [(self.basis, name)]
        return fields

    def read(self, fields: Fields) -> None:
        """Read fields, which makes and fills their buffers."""
        for basis, name in fields:
            getattr(self if basis is None else self.prepared(basis), name)

    def rows_by_mesh(self) -> tuple[Tensor, Tensor]:
        """The rows of each mesh, (B, L) int64, and which of them are inside of it, (B, L) bool. The others follow it.

        L is at least the number of vertices of the largest mesh.
        """
        buffers, device = self.buffers, self.buffers.ptr.device
        place = torch.arange(buffers.need("longest"), device=device)
        rows = (buffers.ptr[:-1, None] + place).clamp(max=buffers.size.vertices - 1)
        return rows, place < buffers.lengths[:, None]

    def prepared(self, dtype: torch.dtype) -> StaticOperators:
        if self.basis is not None:
            return self
        key = f"prepared {dtype}"
        if key not in self.field_values:
            self.field_values[key] = StaticOperators(self.buffers, dtype)
        return self.field_values[key]

    def with_gradient_evecs(self) -> Operators:
        return self if self.gradient_evecs is not None else self.prepared(self.evecs.dtype)

    def with_basis_dtype(self, dtype: torch.dtype) -> Operators:
        return self if self.evecs.dtype == dtype else self.prepared(dtype)


def _field(static: StaticOperators, name: str, kind: FieldKind) -> Any:
    """A field in its buffer. None if the batch doesn't have it."""
    if kind.refused:
        raise NotCapturable(kind.refused)
    buffers, basis = static.buffers, static.basis if kind.is_basis else None
    if kind.kind == "extents":
        return buffers.ptr
    if kind.optional and basis is None and getattr(buffers.example, name) is None:
        return None

    if kind.kind == "pattern":
        return _pattern(buffers, name, kind.count, attrgetter(name))
    if kind.kind == "matrix":
        pattern = _pattern(buffers, name, kind.count, attrgetter(f"{name}.pattern"))
        values = _tensor(buffers, f"{name}.values", attrgetter(f"{name}.values"), (*kind.shape, kind.count))
        return SparseMatrix(pattern, values)
    key = f"{name} {basis}" if kind.is_basis else name
    return _tensor(buffers, key, attrgetter(name), kind.shape, kind.padding, basis)


def _tensor(
    buffers: BatchBuffers,
    name: str,
    read: Read,
    sizes: Sequence[str | int],
    padding: float | str = 0,
    basis: torch.dtype | None = None,
) -> Tensor:
    """A tensor in its buffer.

    sizes: its shape. It has added rows in the first dimension that is neither a number nor "K".
    padding: see `FieldKind`
    basis: see `StaticOperators`
    """
    names: list[Any] = [_COUNTS.get(size, size) for size in sizes]
    dim, count = next((i, each) for i, each in enumerate(names) if isinstance(each, str) and each != "K")

    def shape(size: BatchSize) -> tuple[int, ...]:
        extents: dict[Any, int] = {"K": buffers.example.k, **size._asdict()}
        return tuple(extents.get(each, each) for each in names)

    number = buffers.size.vertices - 1 if padding == "last" else padding  # the last vertex is an added one
    rest = None if isinstance(number, str) else number
    return buffers.rows(name, read, shape, needs=count, rest=rest, basis=basis, planes=dim == 1)


def _lengths(static: StaticOperators) -> tuple[int, ...] | None:
    """None for several meshes, whose sizes differ between batches."""
    size = static.buffers.size
    return (size.vertices,) if size.meshes == 1 else None


def _pattern(buffers: BatchBuffers, name: str, needs: str, read: Callable[[Operators], Pattern]) -> Pattern:
    """A pattern with its transpose. Its rows are always stored in an order, possibly their own."""

    def entries(size: BatchSize) -> tuple[int]:
        return (getattr(size, needs),)

    def stored(name: str, read: Callable[[Operators], Pattern], transposed: tuple[Pattern, Tensor] | None) -> Pattern:
        def row_order(source: Operators) -> Tensor:
            pattern = read(source)
            if len(pattern.long_pieces):
                raise NotCapturable("a vertex has more neighbors than a CUDA graph of kernels on sparse rows allows")
            indptr = pattern.stored_indptr
            identity = torch.arange(len(indptr) - 1, dtype=indptr.dtype, device=indptr.device)
            return identity if pattern.row_order is None else pattern.row_order

        order = buffers.rows(f"{name}.row_order", row_order, lambda size: (size.vertices,), needs=needs, rest=None)
        indptr = buffers.rows(
            f"{name}.indptr",
            lambda source: read(source).stored_indptr,
            lambda size: (size.vertices + 1,),
            needs=needs,
            rest=lambda source: read(source).nnz,
        )
        indices = buffers.rows(f"{name}.indices", lambda source: read(source).stored_indices, entries, needs=needs)
        no_pieces = torch.empty(0, 4, dtype=torch.int64, device=indptr.device)
        pattern = Pattern(indptr, indices, len(order), order, check=False)
        return pattern.with_known(transpose=transposed, long_pieces=no_pieces, rows_by_length=indptr[:0])

    transpose = stored(f"{name}.transpose", lambda source: read(source).transpose[0], None)
    places = buffers.rows(f"{name}.places", lambda source: read(source).transpose[1], entries, needs=needs, rest=None)
    return stored(name, read, (transpose, places))


# The counts of `BatchSize` for the sizes of a field.
_COUNTS: dict[Any, str] = {"B": "meshes", "V": "vertices", "F": "faces", "E": "edges"}
# Fields of a batch that follow from others.
_OTHERS: dict[str, Callable[[StaticOperators], Any]] = {
    "edges": lambda static: _tensor(static.buffers, "edges", attrgetter("edges"), ("E", 2), "last"),
    "lengths": _lengths,
}
