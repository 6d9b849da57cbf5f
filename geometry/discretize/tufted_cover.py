"""Covers of packed meshes with two sheets (Sharp & Crane 2020, "A Laplacian for Nonmanifold Triangle Meshes").

Each face has a back copy of the opposite orientation. Around each edge, the sides of neighboring faces that see each
other are glued. The sheets of a closed oriented surface don't touch, so it is taken as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet.geometry.discretize.connectivity import Connectivity, sums
from diffnet.geometry.discretize.intrinsic_delaunay import MIN_EXCESS
from diffnet.geometry.discretize.packed import cross, dot, length

MIN_TURN = 1e-9  # in radians, between faces at an edge whose order is known


class Cover(NamedTuple):
    """Triangles of which each edge has two. Halfedge 3f + i runs from corner i of triangle f to the next corner.

    tail: of each halfedge, the vertex where it starts
    twin: of each halfedge, the halfedge along the same edge in the other direction
    length: of each halfedge, increased such that no triangle is degenerate
    number: of each halfedge, a number that no other one of its mesh has, and that doesn't depend on other meshes
    sheets: (B,), 1 for a closed oriented surface, 2 for another mesh
    unclear: (B,), whether faces of a mesh make the same angle at an edge of three or more faces, so that their order is
        a matter of choice
    """

    tail: Tensor
    twin: Tensor
    length: Tensor
    number: Tensor
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
    return Cover(
        tail=torch.cat([c.tail, c.head[source[len(front) :]]]),
        twin=twin,
        length=_mollified(c, positions, of_faces).reshape(-1)[source],
        number=number,
        sheets=torch.where(is_open, 2, 1),
        unclear=unclear,
    )


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
    added = c.per_mesh.maxima(c.by_vertex.maxima(excess.repeat_interleave(3)))
    return lengths + added[of_faces][:, None]
