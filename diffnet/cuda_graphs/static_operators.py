"""`Operators` at fixed addresses, which the kernels of a CUDA graph read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from diffnet.cuda_graphs.buffers import BatchBuffers, Rest
from diffnet.geometry import Operators
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
        self.made: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        """Read a field of `Operators` from its buffer."""
        if name not in _FIELDS:
            return object.__getattribute__(self, name)
        made = self.made
        if name not in made:
            made[name] = _FIELDS[name](self)
        return made[name]

    def __reduce__(self) -> NoReturn:
        raise TypeError("operators in the buffers of a CUDA graph can't be copied")

    def fields_read(self) -> Fields:
        """The fields that have been read."""
        found: Fields = []
        for name, made in self.made.items():
            found += made.fields_read() if isinstance(made, StaticOperators) else [(self.basis, name)]
        return found

    def read(self, fields: Fields) -> None:
        """Read fields, which makes and fills their buffers."""
        for basis, name in fields:
            getattr(self if basis is None else self.prepared(basis), name)

    def prepared(self, dtype: torch.dtype) -> StaticOperators:
        if self.basis is not None:
            return self
        key = f"prepared {dtype}"
        if key not in self.made:
            self.made[key] = StaticOperators(self.buffers, dtype)
        made: StaticOperators = self.made[key]
        return made

    def with_gradient_evecs(self) -> Operators:
        return self if self.gradient_evecs is not None else self.prepared(self.evecs.dtype)

    def with_basis_dtype(self, dtype: torch.dtype) -> Operators:
        return self if self.evecs.dtype == dtype else self.prepared(dtype)


def _basis(name: str) -> Callable[[StaticOperators], Tensor]:
    def make(static: StaticOperators) -> Tensor:
        buffers, dtype = static.buffers, static.basis
        key, k = f"{name} {dtype}", buffers.example.k

        def read(source: Operators) -> Tensor:
            tensor: Tensor = getattr(source if dtype is None else source.prepared(dtype), name)
            return tensor

        fill = buffers.rows if name == "evecs" else buffers.planes
        return fill(key, read, lambda size: (size.vertices, k))

    return make


def _gradient_evecs(static: StaticOperators) -> Tensor | None:
    given = static.basis is not None or static.buffers.example.gradient_evecs is not None
    return _basis("gradient_evecs")(static) if given else None


def _lengths(static: StaticOperators) -> tuple[int, ...] | None:
    """None for several meshes, whose sizes differ between batches."""
    size = static.buffers.size
    return (size.vertices,) if size.meshes == 1 else None


def _corners(name: str) -> Callable[[StaticOperators], Tensor]:
    """Faces or edges. Those that are added join the last vertex, which is an added one, to itself."""

    def make(static: StaticOperators) -> Tensor:
        buffers, last = static.buffers, static.buffers.size.vertices - 1
        corners = getattr(buffers.example, name).shape[1]
        return buffers.rows(
            name,
            lambda source: getattr(source, name),
            lambda size: (getattr(size, name), corners),
            needs=name,
            rest=lambda source: last,
        )

    return make


def _gradient(static: StaticOperators) -> SparseMatrix:
    buffers = static.buffers
    pattern = _pattern(buffers, "gradient", "entries", lambda source: source.gradient.pattern)
    values = buffers.planes(
        "gradient.values", lambda source: source.gradient.values, lambda size: (size.entries,), needs="entries"
    )
    return SparseMatrix(pattern, values)


def _neighborhood(static: StaticOperators) -> Pattern | None:
    def read(source: Operators) -> Pattern:
        assert source.neighborhood is not None
        return source.neighborhood

    given = static.buffers.example.neighborhood is not None
    return _pattern(static.buffers, "neighborhood", "neighbors", read) if given else None


def _pattern(buffers: BatchBuffers, name: str, needs: str, read: Callable[[Operators], Pattern]) -> Pattern:
    """A pattern with its transpose. Its rows are always stored in an order, possibly their own."""

    def stored(name: str, read: Callable[[Operators], Pattern], transposed: tuple[Pattern, Tensor] | None) -> Pattern:
        def row_order(source: Operators) -> Tensor:
            pattern = read(source)
            if len(pattern.long_pieces):
                raise NotCapturable("a vertex has more neighbors than a CUDA graph of kernels on sparse rows allows")
            indptr = pattern.stored_indptr
            own = torch.arange(len(indptr) - 1, dtype=indptr.dtype, device=indptr.device)
            return own if pattern.row_order is None else pattern.row_order

        def entries(size: Any) -> tuple[int]:
            return (getattr(size, needs),)

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
    places = buffers.rows(
        f"{name}.places",
        lambda source: read(source).transpose[1],
        lambda size: (getattr(size, needs),),
        needs=needs,
        rest=None,
    )
    return stored(name, read, (transpose, places))


def _joined(static: StaticOperators) -> Tensor | None:
    """The added vertices are joined with no other."""
    given = static.buffers.example.joined is not None
    return _rows("joined", rest=None)(static) if given else None


def _refused(reason: str) -> Callable[[StaticOperators], NoReturn]:
    def refuse(static: StaticOperators) -> NoReturn:
        raise NotCapturable(reason)

    return refuse


def _rows(name: str, *dims: int, rest: Rest | None = lambda _: 0) -> Callable[[StaticOperators], Tensor]:
    return lambda static: static.buffers.rows(
        name, lambda source: getattr(source, name), lambda size: (size.vertices, *dims), rest=rest
    )


_FIELDS: dict[str, Callable[[StaticOperators], Any]] = {
    "ptr": lambda static: static.buffers.ptr,
    "mass": _rows("mass"),
    "evals": lambda static: static.buffers.rows(
        "evals", lambda source: source.evals, lambda size: (size.meshes, static.buffers.example.k)
    ),
    "evecs": _basis("evecs"),
    "gradient_evecs": _gradient_evecs,
    "laplacian": _refused("implicit diffusion reads from the GPU how far its solver has come"),
    "gradient": _gradient,
    "frames": _rows("frames", 3, 3),
    "faces": _corners("faces"),
    "face_ptr": _refused("the number of faces of each mesh differs between batches"),
    "edges": _corners("edges"),
    "neighborhood": _neighborhood,
    "joined": _joined,
    "lengths": _lengths,
}
