"""What follows from the faces of packed meshes alone, and sums in a fixed order, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.ops import Pattern
from diffnet.ops.common.checks import check_count, check_is_tensor, check_lengths

PIECE = 64  # rows of a mesh that one thread of a GPU adds up


class Connectivity:
    """The faces of packed meshes, and all that follows from them alone. It serves any number of positions.

    Args:
        faces: (F, 3) integers, packed vertex indices of the triangles, mesh by mesh. Operators are on their device.
        vertices: V
        lengths: the number of vertices of each mesh; None for one mesh
        check: whether to check the faces. The check waits for a GPU. Pass False for faces that are known to be right.
        turned_faces: (F,) bool, the faces whose normals are turned, see `Mesh.turned_faces`; None turns none

    Attributes:
        faces: (F, 3) int64
        lengths: as given
        pattern: (V, V), the pattern of the Laplacian and the gradient: each vertex and its neighbors along edges

    Raises TypeError for arguments of other types, and ValueError for other shapes, vertices that don't exist, a face
    that joins two meshes, faces that aren't mesh by mesh, and faces none of which has three distinct corners.
    """

    def __init__(
        self,
        faces: Tensor,
        vertices: int,
        lengths: Sequence[int] | None = None,
        *,
        check: bool = True,
        turned_faces: Tensor | None = None,
    ) -> None:
        if check:
            _check_faces(faces, vertices)
        self.lengths = tuple(check_lengths(lengths, "vertices", vertices))
        self.faces = faces = faces.long()
        device = faces.device
        self.per_mesh = Extents(self.lengths, device)
        sizes = torch.tensor(self.lengths, device=device)
        self.ptr = F.pad(sizes.cumsum(0), (1, 0))
        meshes = torch.arange(len(sizes), device=device)
        self.mesh = meshes.repeat_interleave(sizes, output_size=vertices)  # of each vertex
        of_faces = self.mesh[faces]
        if check and (of_faces != of_faces[:, :1]).any():
            raise ValueError("a face joins vertices of two meshes")
        if check and (of_faces[1:, 0] < of_faces[:-1, 0]).any():
            raise ValueError("faces should be mesh by mesh, as their vertices are")
        self.face_ptr = _starts(of_faces[:, 0].contiguous(), len(sizes))

        a, b, c = faces.unbind(1)
        is_usable = (a != b) & (b != c) & (c != a)  # the others have no geometry
        self.usable = faces[is_usable]
        self.turned = None if turned_faces is None else turned_faces[is_usable][:, None]
        if check and len(self.usable) == 0:
            raise ValueError(f"none of the {len(faces)} faces has three distinct corners")
        self.tail, self.head = self.usable.reshape(-1), self.usable.roll(-1, 1).reshape(-1)
        self.by_vertex = Corners(self.tail, vertices)
        self.used = self.by_vertex.lengths > 0
        self.rows, self.columns, self.by_entry = entries(self.tail, self.head, vertices)
        self.pattern = matrix_pattern(self.rows, self.columns, vertices)
        self.entries_of_rows = self.pattern.stored_indptr.diff().long()


def _check_faces(faces: Tensor, vertices: int) -> None:
    check_is_tensor("faces", faces)
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise ValueError(f"faces should have shape (F, 3), shape is {tuple(faces.shape)}")
    if faces.is_floating_point() or faces.is_complex() or faces.dtype == torch.bool:
        raise TypeError(f"faces should be integers, got {faces.dtype}")
    if len(faces) and not 0 <= int(faces.min()) <= int(faces.max()) < vertices:
        raise ValueError(f"faces should be from 0 to {vertices - 1}, got {int(faces.min())} to {int(faces.max())}")


class Groups(NamedTuple):
    """Rows that belong to groups.

    order: the rows, group by group
    lengths: the number of rows of each group
    """

    order: Tensor
    lengths: Tensor

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of each group, added in a fixed order."""
        return sums(rows[self.order], self.lengths)


class Corners:
    """The corners of faces around each vertex.

    Sums have the order of `sums_at_vertices`: rounding decides where the tangent frames of symmetric meshes start.
    """

    def __init__(self, vertex: Tensor, vertices: int) -> None:
        corner = torch.arange(3, device=vertex.device).repeat(len(vertex) // 3)
        ordered, order = (3 * vertex + corner).int().sort(stable=True)
        self._groups = Groups(order, _starts(ordered, 3 * vertices).diff())
        self.lengths = self._groups.lengths.view(-1, 3).sum(1)

    def sums(self, rows: Tensor) -> Tensor:
        """The sum of the rows of the corners at each vertex."""
        first, second, third = self._groups.sums(rows).view(-1, 3, *rows.shape[1:]).unbind(1)
        return first + second + third

    def maxima(self, rows: Tensor) -> Tensor:
        """The maximum of the rows of the corners at each vertex, at least 0."""
        return _reduced(rows[self._groups.order], self._groups.lengths, "max").view(-1, 3, *rows.shape[1:]).amax(1)


class Extents:
    """Sums and maxima over consecutive rows, where the numbers of rows are known on the host and may be large.

    A thread of a GPU reduces PIECE rows, and others reduce its results, so the result for an extent doesn't depend on
    the other extents.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.levels: list[Tensor] = []
        rest = np.asarray(lengths, np.int64)
        while not self.levels or (rest > 1).any():
            pieces = np.maximum(-(-rest // PIECE), 1)
            of_pieces = np.full(pieces.sum(), PIECE, np.int64)
            of_pieces[pieces.cumsum() - 1] = rest - PIECE * (pieces - 1)
            self.levels.append(torch.from_numpy(of_pieces).to(device))
            rest = pieces

    def sums(self, rows: Tensor) -> Tensor:
        for lengths in self.levels:
            rows = sums(rows, lengths)
        return rows

    def maxima(self, rows: Tensor) -> Tensor:
        """The maximum of each extent, at least 0."""
        for lengths in self.levels:
            rows = _reduced(rows, lengths, "max")
        return rows


def entries(tail: Tensor, head: Tensor, vertices: int) -> tuple[Tensor, Tensor, Groups]:
    """The entries of the symmetric matrix (V, V) with a full diagonal that edges (N,) make.

    Returns the row and the column of each entry, row by row, and groups of the 2 N + V contributions to them: those of
    the edges above the diagonal, those of the edges below it, and those of the diagonal. Contributions above and below
    it are in the same order, so sums are symmetric.
    """
    low, high = torch.minimum(tail, head), torch.maximum(tail, head)
    diagonal = torch.arange(vertices, device=tail.device) * (vertices + 1)
    ordered, order = torch.cat([low * vertices + high, high * vertices + low, diagonal]).sort(stable=True)
    is_first = F.pad(ordered[1:] != ordered[:-1], (1, 0), value=True)
    first = is_first.nonzero().squeeze(1)
    lengths = first.diff(append=first.new_full((1,), len(ordered)))
    entry = ordered[first]
    rows = entry // vertices
    return rows, entry - rows * vertices, Groups(order, lengths)


def matrix_pattern(rows: Tensor, columns: Tensor, vertices: int) -> Pattern:
    """The pattern (V, V) of entries that are sorted by row and column."""
    lengths = _starts(rows, vertices).diff()
    return Pattern.from_row_lengths(lengths, columns.int(), vertices, check=False)


def _starts(ordered: Tensor, count: int) -> Tensor:
    """Where each of the numbers 0 to count starts in ascending numbers, (count + 1,). It doesn't wait for a GPU."""
    return torch.searchsorted(ordered, torch.arange(count + 1, device=ordered.device, dtype=ordered.dtype))


def sums(rows: Tensor, lengths: Tensor) -> Tensor:
    """Sums of consecutive rows, added in a fixed order. They have all derivatives."""
    return _of_segments(rows, lengths, len(rows), False)


class _Segments(torch.autograd.Function):
    """Sums of segments, or a row for each segment, repeated for each of its rows: each is the transpose of the other.

    PyTorch's `segment_reduce` has no second derivatives and no forward mode.

    count: the rows of all segments
    """

    @staticmethod
    def forward(rows: Tensor, lengths: Tensor, count: int, repeats: bool) -> Tensor:
        if repeats:
            return rows.repeat_interleave(lengths, 0, output_size=count)
        return _reduced(rows, lengths, "sum")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, bool], output: Tensor) -> None:
        _, ctx.lengths, ctx.count, ctx.repeats = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _of_segments(grad, ctx.lengths, ctx.count, not ctx.repeats), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _of_segments(tangent, ctx.lengths, ctx.count, ctx.repeats)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return _of_segments(rows.movedim(in_dims[0], -1), *rest), -1  # type: ignore[arg-type]


_of_segments: Callable[[Tensor, Tensor, int, bool], Tensor] = _Segments.apply


def _reduced(rows: Tensor, lengths: Tensor, how: str) -> Tensor:
    """Sums or maxima of consecutive rows, of which a maximum is at least 0. NaN stays NaN."""
    # On a GPU, PyTorch reduces a vector in another order than columns, with one block of threads for each segment.
    columns = rows[:, None] if rows.ndim == 1 else rows
    reduced = torch.segment_reduce(columns, how, lengths=lengths, axis=0, initial=0, unsafe=True)
    return reduced.squeeze(1) if rows.ndim == 1 else reduced


def boundary_vertices(faces: Tensor, vertices: int) -> Tensor:
    """Return which vertices lie on the boundary, (V,) bool: on an edge that belongs to exactly one face.

    faces: (F, 3) integers
    vertices: the number of vertices, V

    Vertices that no face uses are not on the boundary. On a GPU, it waits for the GPU.

    Raises TypeError for faces that are no integer tensor, ValueError for another shape and vertices that don't exist.

    >>> import torch
    >>> boundary_vertices(torch.tensor([[0, 1, 2], [0, 2, 3], [0, 3, 1]]), 5).tolist()  # around vertex 0
    [False, True, True, True, False]
    """
    check_count("vertices", vertices, 0)
    _check_faces(faces, vertices)
    corners = faces.long()
    ends = torch.stack([corners, corners.roll(-1, 1)]).sort(0).values.reshape(2, -1)
    ends = ends[:, ends[0] != ends[1]]  # a face with a repeated corner has a side without length
    edges, count = torch.unique(ends[0] * vertices + ends[1], return_counts=True)
    alone = edges[count == 1]
    mask = torch.zeros(vertices, dtype=torch.bool, device=faces.device)
    mask[alone // max(vertices, 1)] = True
    mask[alone % max(vertices, 1)] = True
    return mask
