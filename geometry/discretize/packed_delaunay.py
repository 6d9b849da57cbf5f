"""The tufted intrinsic Delaunay Laplacian of packed meshes (Sharp & Crane 2020, "A Laplacian for Nonmanifold Triangle
Meshes") in PyTorch.

A cover has two sheets: each face has a back copy of the opposite orientation. Around each edge, the sides of
neighboring faces that see each other are glued. The sheets of a closed oriented surface don't touch, so it is taken as
it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry.discretize.connectivity import Connectivity, entries, sums
from diffnet.geometry.discretize.intrinsic_delaunay import MAX_ROUNDS, MIN_COTANGENT, MIN_EXCESS
from diffnet.geometry.discretize.packed import cross, dot, length, with_diagonal
from diffnet.ops.common.dispatch import differentiated

MIN_TURN = 1e-9  # in radians, between faces at an edge whose order is known


@dataclass
class Halfedges:
    """Triangles given by the lengths of their edges. Halfedge 3f + i runs from corner i of triangle f to the next one.

    tail: of each halfedge, the vertex where it starts
    twin: of each halfedge, the halfedge along the same edge in the other direction
    length: of each halfedge, increased such that no triangle is degenerate
    cotangent: of each halfedge, the cotangent of the angle opposite to the edge
    priority: of each halfedge, a number that no other one of its mesh has, in an order without pattern. It doesn't
        depend on other meshes.
    """

    tail: Tensor
    twin: Tensor
    length: Tensor
    cotangent: Tensor
    priority: Tensor


class Cover(NamedTuple):
    """Triangles of which each edge has two.

    lengths: of the halfedges, differentiable
    sheets: (B,), 1 for a closed oriented surface, 2 for another mesh
    unclear: (B,), whether faces of a mesh make the same angle at an edge of three or more faces, so that their order is
        a matter of choice
    """

    halfedges: Halfedges
    lengths: Tensor
    sheets: Tensor
    unclear: Tensor


class _Edges(NamedTuple):
    """The edges (E,) of the faces of packed meshes.

    mesh: of each edge
    start, faces: a halfedge of each of its faces is among so many from `start` on in the order of `by_entry`
    """

    mesh: Tensor
    start: Tensor
    faces: Tensor


def tufted_cover(c: Connectivity, positions: Tensor) -> Cover:
    """The covers of packed meshes. Lengths are differentiable in the positions."""
    edges = _edges(c)
    is_open = _is_open(c, edges)
    of_faces = c.mesh[c.usable[:, 0]]
    front, faces = torch.arange(len(c.tail), device=c.tail.device), torch.arange(len(c.usable), device=c.tail.device)
    doubled = is_open[of_faces].nonzero().squeeze(1)
    # The back copy of a face a, b, c has the corners a, c, b. Its edges are those of the face in reverse order.
    corner = 2 - torch.arange(3, device=front.device)
    source = torch.cat([front, (3 * doubled[:, None] + corner).reshape(-1)])
    copy = len(faces) + torch.zeros_like(faces).scatter(0, doubled, faces[: len(doubled)])
    back = (3 * copy[:, None] + corner).reshape(-1)

    twin, unclear = _twins(c, positions.detach(), edges, is_open, back, len(source))
    first_face = torch.searchsorted(of_faces, torch.arange(len(c.lengths), device=front.device))
    number = 2 * (source - 3 * first_face[of_faces[source // 3]])
    number[len(front) :] += 1
    tail = torch.cat([c.tail, c.head[source[len(front) :]]])
    lengths = _mollified(c, positions, of_faces).reshape(-1)[source]
    start = lengths.detach()
    halfedges = Halfedges(tail, twin, start.clone(), _of_triangles(start), _mixed(number))
    return Cover(halfedges, lengths, torch.where(is_open, 2, 1), unclear)


def _edges(c: Connectivity) -> _Edges:
    upper = (c.rows < c.columns).nonzero().squeeze(1)
    lengths = c.by_entry.lengths
    return _Edges(c.mesh[c.rows[upper]], (lengths.cumsum(0) - lengths)[upper], lengths[upper])


def _is_open(c: Connectivity, edges: _Edges) -> Tensor:
    """Whether a mesh (B,) has edges without exactly two faces that run along them in opposite directions."""
    one = c.by_entry.order[edges.start]
    other = torch.where(edges.faces == 2, c.by_entry.order[edges.start + 1], one)
    is_open = torch.zeros(len(c.lengths), dtype=torch.bool, device=one.device)
    is_open[edges.mesh[c.tail[one] == c.tail[other]]] = True
    return is_open


def _twins(
    c: Connectivity, positions: Tensor, edges: _Edges, is_open: Tensor, back: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The twin of each halfedge, and the meshes (B,) whose cover is unclear.

    back: (3F,), the halfedge of the back copy along each halfedge of the front
    """
    twin = torch.empty(count, dtype=torch.int64, device=back.device)
    unclear = torch.zeros_like(is_open)
    in_cover = is_open[edges.mesh]
    start = edges.start[~in_cover]
    one, other = c.by_entry.order[start], c.by_entry.order[start + 1]
    twin[one], twin[other] = other, one

    split = in_cover.nonzero().squeeze(1)
    if len(split) == 0:
        return twin, unclear

    # The halfedges of all faces around each edge of a cover, edge by edge and by the angle around it.
    sizes = edges.faces[split]
    edge = torch.arange(len(split), device=back.device).repeat_interleave(sizes)
    first = (sizes.cumsum(0) - sizes)[edge]
    place = torch.arange(len(edge), device=back.device) - first
    following = first + (place + 1) % sizes[edge]
    around = c.by_entry.order[edges.start[split][edge] + place]
    if int(sizes.max()) > 2:
        angles = _angles(c, positions, around, first)
        order = angles.argsort(stable=True)
        order = order[edge[order].argsort(stable=True)]
        around, angles = around[order], angles[order]
        turn = (angles[following] - angles) % (2 * torch.pi)
        equal = ~((turn > MIN_TURN) & (turn < 2 * torch.pi - MIN_TURN)) & (sizes[edge] > 2)
        unclear[edges.mesh[split[edge[equal]]]] = True
    runs_along = c.tail[around] < c.head[around]
    along, against = (torch.where(runs_along == which, around, back[around]) for which in (True, False))
    # The side along the edge of a face sees the side against the edge of the next face.
    twin[along], twin[against[following]] = against[following], along
    return twin, unclear


def _angles(c: Connectivity, positions: Tensor, around: Tensor, first: Tensor) -> Tensor:
    """The angle of each face around its edge, from −π to π, against that of the first face.

    around: (N,), a halfedge of the face along the edge
    first: (N,), the place of the first face of the edge
    """
    tail, head = c.tail[around], c.head[around]
    low = positions[torch.minimum(tail, head)]
    axis = positions[torch.maximum(tail, head)] - low
    axis = axis / length(axis)[:, None]
    outward = positions[c.usable.roll(-2, 1).reshape(-1)[around]] - low
    start = outward[first] - dot(outward[first], axis)[:, None] * axis
    return torch.atan2(dot(outward, cross(axis, start)), dot(outward, start))


def _mollified(c: Connectivity, positions: Tensor, of_faces: Tensor) -> Tensor:
    """The lengths (F, 3) of the edges of faces, increased such that no triangle is degenerate."""
    corners = F.embedding(c.usable, positions)  # its backward adds up in a fixed order
    lengths = length(corners.roll(-1, 1) - corners)
    around = c.rows != c.columns
    of_entries = length(F.embedding(c.rows, positions) - F.embedding(c.columns, positions))
    totals = sums(torch.stack([of_entries, around.double()], 1), c.entries_of_rows)
    total, count = c.per_mesh.sums(totals).unbind(1)
    mean = total / count.clamp(min=1)
    # Twice the longest edge less the circumference, by which a triangle violates the triangle inequality.
    one, two, three = lengths.unbind(1)
    excess = 2 * lengths.amax(1) - (one + two + three) + MIN_EXCESS * mean[of_faces]
    largest = c.per_mesh.maxima(c.by_vertex.maxima(excess.detach().repeat_interleave(3)))
    # Maxima have no second derivatives, so the excess is read where it is largest, at the last of equal faces.
    number = torch.arange(len(excess), device=excess.device, dtype=excess.dtype)
    numbers = torch.where(excess.detach() == largest[of_faces], number, 0).repeat_interleave(3)
    last = c.per_mesh.maxima(c.by_vertex.maxima(numbers)).long()
    added = torch.where(largest > 0, excess[last], largest)
    return lengths + added[of_faces][:, None]


class DelaunayLaplacian(NamedTuple):
    """The Laplacian of the triangulations after flips.

    rows, columns, values: of its entries, row by row, with a full diagonal
    areas: (V,), a third of the area of the faces around each vertex
    unclear: (B,), whether `robust_laplacian` may find another Laplacian or other areas: the cover of a mesh is unclear,
        its flips don't end, or flips of two sheets led to edges that are a matter of choice
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    areas: Tensor
    unclear: Tensor


def packed_delaunay_laplacian(c: Connectivity, positions: Tensor) -> DelaunayLaplacian:
    """The Laplacian of the intrinsic Delaunay triangulation of each mesh, or of its tufted cover.

    It is differentiable in the positions. Which edges are flipped has no gradient.
    """
    halfedges, lengths, sheets, unclear = tufted_cover(c, positions)
    rounds, free, rest = _make_delaunay(halfedges)
    of_free = c.mesh[halfedges.tail[free]]
    unclear[of_free[sheets[of_free] > 1]] = True
    unclear[c.mesh[halfedges.tail[rest]]] = True
    lengths = _through_flips(lengths, rounds) if differentiated([lengths]) else halfedges.length

    twin, tail = halfedges.twin, halfedges.tail
    side = torch.arange(len(twin), device=twin.device)
    head = tail[twin]
    edges = ((tail < head) | ((tail == head) & (side < twin))).nonzero().squeeze(1)  # from the smaller vertex
    tail, head = tail[edges], head[edges]
    rows, columns, groups = entries(tail, head, len(c.mesh))
    cotangents, thirds = _of_triangles(lengths), _areas(lengths.view(-1, 3).T) / 3
    mean = (cotangents[edges] + cotangents[twin[edges]]) / 2
    weights = torch.where(tail == head, 0, mean)  # functions have no difference along a loop
    nothing = thirds.new_zeros(len(c.mesh))
    both = torch.stack(
        [torch.cat([weights, weights, nothing]), torch.cat([thirds[edges // 3], thirds[twin[edges] // 3], nothing])], 1
    )
    joined, areas = groups.sums(both).unbind(1)
    sheets = sheets[c.mesh]
    lengths_of_rows = torch.searchsorted(rows, torch.arange(len(c.mesh) + 1, device=rows.device)).diff()
    values = with_diagonal(-joined / sheets[rows], rows, columns, lengths_of_rows)
    return DelaunayLaplacian(rows, columns, values, sums(areas, lengths_of_rows) / sheets, unclear)


def _mixed(numbers: Tensor) -> Tensor:
    """Different numbers for different numbers, in an order without pattern (the finalizer of MurmurHash3)."""
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        numbers = (numbers ^ _upper_bits(numbers)) * factor
    return numbers ^ _upper_bits(numbers)


def _upper_bits(numbers: Tensor) -> Tensor:
    return (numbers >> 33) & 0x7FFFFFFF


def _areas(lengths: Tensor) -> Tensor:
    """Areas (…) of triangles with edges of these lengths (3, …)."""
    a, b, c = lengths
    half = (a + b + c) / 2
    x, y, z = half - lengths
    squared = half * x * y * z
    return torch.where(squared > 0, squared.clamp(min=torch.finfo(squared.dtype).tiny).sqrt(), 0)


def _cotangents(lengths: Tensor) -> Tensor:
    """Cotangents (3, …) of the angles opposite to the edges of triangles with these lengths (3, …)."""
    squares = lengths * lengths
    return (squares.roll(-1, 0) + squares.roll(-2, 0) - squares) / (4 * _areas(lengths))


def _of_triangles(lengths: Tensor) -> Tensor:
    """The cotangent of the angle opposite to each halfedge, from the length of each."""
    return _cotangents(lengths.view(-1, 3).T).T.reshape(-1)


def _make_delaunay(h: Halfedges) -> tuple[list[Tensor], Tensor, Tensor]:
    """Flip edges until all are Delaunay, and then those that are a matter of choice, as `delaunay_laplacian` does.

    Returns both halfedges (2, N) of the edges of each round, the edges that flips made a matter of choice, and those
    that would still have to be flipped after MAX_ROUNDS.
    """
    edges = (h.twin > torch.arange(len(h.twin), device=h.twin.device)).nonzero().squeeze(1)
    rounds, rest = _flip_while(h, edges, _is_bad)
    if not rounds:
        return rounds, edges[:0], rest
    changed = torch.zeros(len(h.twin) // 3, dtype=torch.bool, device=edges.device)
    changed[torch.cat(rounds, 1) // 3] = True
    around = changed.repeat_interleave(3).nonzero().squeeze(1)
    free = around[_is_free(h, torch.stack([around, h.twin[around]]))]
    further, others = _flip_while(h, free, _could_reach_smaller)
    return rounds + further, free, torch.cat([rest, others])


def _is_bad(h: Halfedges, both: Tensor) -> Tensor:
    one, other = h.cotangent[both]
    return one + other < 2 * MIN_COTANGENT


def _other_ends(h: Halfedges, both: Tensor) -> tuple[Tensor, Tensor]:
    """The corners opposite to edges, which their triangles would join after a flip."""
    one, other = h.tail[both - both % 3 + (both + 2) % 3]
    return one, other


def _is_free(h: Halfedges, both: Tensor) -> Tensor:
    """Whether both diagonals of the triangles at an edge are Delaunay, and don't join the same vertices."""
    (a, b), (c, d) = h.tail[both], _other_ends(h, both)
    one, other = h.cotangent[both]
    same = (torch.minimum(a, b) == torch.minimum(c, d)) & (torch.maximum(a, b) == torch.maximum(c, d))
    return ((one + other).abs() <= -2 * MIN_COTANGENT) & ~same


def _could_reach_smaller(h: Halfedges, both: Tensor) -> Tensor:
    """Whether the other diagonal is Delaunay, too, and has an end of a smaller number."""
    c, d = _other_ends(h, both)
    return _is_free(h, both) & (torch.minimum(c, d) < h.tail[both].amin(0)) & (c != d)


def _flip_while(
    h: Halfedges, edges: Tensor, is_due: Callable[[Halfedges, Tensor], Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Flip edges that are due until none is, in rounds of edges that share no triangle.

    Returns both halfedges of the edges of each round, and the edges that are due after MAX_ROUNDS.
    """
    device = h.twin.device
    rounds: list[Tensor] = []
    lowest = torch.iinfo(torch.int64).min
    owner = torch.full((len(h.twin) // 3,), lowest, device=device)
    listed = torch.full_like(h.twin, -1)
    seen = 0
    for number in range(MAX_ROUNDS + 1):
        edges = torch.minimum(edges, h.twin[edges])
        # An edge may be in the list twice. The later one counts.
        place = torch.arange(seen, seen + len(edges), device=device)
        seen += len(edges)
        listed.scatter_reduce_(0, edges, place, "amax")
        both = torch.stack([edges, h.twin[edges]])
        both = both[:, is_due(h, both) & (listed[edges] == place)]
        edges = both[0]
        if len(edges) == 0 or number == MAX_ROUNDS:
            break
        # An edge is flipped if it has the highest priority in both its triangles. Priorities are random and new in each
        # round; otherwise a row of n neighboring edges could take n rounds.
        priority = (h.priority[edges] ^ int(_mixed(torch.tensor(number + 1)))).expand(2, -1)
        owners = both // 3
        owner[owners] = lowest
        owner.scatter_reduce_(0, owners.reshape(-1), priority.reshape(-1), "amax")
        apart = (owner[owners] == priority).all(0).nonzero().squeeze(1)
        rounds.append(both[:, apart])
        edges = torch.cat([edges, _flip(h, rounds[-1])])
    return rounds, edges


def _flip(h: Halfedges, both: Tensor) -> Tensor:
    """Flip edges, so that they join the other two corners of their triangles. Returns the halfedges around these.

    both: (2, N), both halfedges of each edge
    """
    changed, lengths = _changed_lengths(h.length, both)
    right, left = changed[1:]
    # The edge a → b with triangles abc and bad becomes d → c with dca and cdb.
    old = torch.stack([left[0], right[1], left[1], right[0]])
    new = torch.stack([right[0], left[0], right[1], left[1]])
    tails, opposite = h.tail[old], h.twin[old]
    # Twins that are among the four move, too: `twin` tells for a moment where each halfedge goes.
    h.twin[old] = -1 - new
    moved = h.twin[opposite]
    opposite = torch.where(moved < 0, -1 - moved, opposite)
    h.twin[new] = opposite
    h.twin[opposite] = new
    h.tail[new], h.tail[both] = tails, tails[::2].flip(0)
    h.length[changed], h.cotangent[changed] = lengths, _cotangents(lengths)
    return new.reshape(-1)


def _changed_lengths(length: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """The halfedges (3, 2, N) of the triangles of edges, and the lengths that they have after these are flipped."""
    side, first = both % 3, both - both % 3
    right, left = first + (side + 1) % 3, first + (side + 2) % 3
    changed = torch.stack([both, right, left])
    # Lay both triangles in a plane with the edge as the first axis: positions of the opposite corners.
    edge, to_right, to_left = lengths = length[changed]
    along = (edge**2 + to_left**2 - to_right**2) / (2 * edge)
    height = 2 * _areas(lengths) / edge
    diagonal = torch.hypot(edge[0] - (along[0] + along[1]), height[0] + height[1])
    # The triangles abc and bad become dca and cdb.
    around = [diagonal.expand(2, -1), to_left, to_right.flip(0)]
    return changed, torch.stack(around)


def _through_flips(length: Tensor, rounds: list[Tensor]) -> Tensor:
    """The lengths of halfedges after the flips of all rounds, differentiable in the lengths before them."""
    for both in rounds:
        changed, lengths = _changed_lengths(length, both)
        length = length.index_put((changed,), lengths)
    return length
