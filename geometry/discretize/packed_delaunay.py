"""The tufted intrinsic Delaunay Laplacian (Sharp & Crane 2020) of packed meshes in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.geometry.discretize.connectivity import Connectivity, entries, sums
from diffnet.geometry.discretize.intrinsic_delaunay import MAX_ROUNDS, MIN_COTANGENT
from diffnet.geometry.discretize.packed import with_diagonal
from diffnet.geometry.discretize.tufted_cover import tufted_cover


class DelaunayLaplacian(NamedTuple):
    """The Laplacian of the triangulations after flips.

    rows, columns, values: of its entries, row by row, with a full diagonal
    areas: (V,), a third of the area of the faces around each vertex
    unclear: (B,), whether the cover of a mesh is unclear or its flips don't end
    """

    rows: Tensor
    columns: Tensor
    values: Tensor
    areas: Tensor
    unclear: Tensor


@dataclass
class Halfedges:
    """Triangles given by the lengths of their edges.

    Halfedge 3f + i runs from corner i of triangle f to the next corner. All tensors have one entry for each.

    tail: the vertex where each halfedge starts
    twin: the halfedge along the same edge in the other direction
    length: the length of the edge
    cotangent: the cotangent of the angle opposite to the edge
    priority: a number that no other halfedge of its mesh has, in an order without pattern
    """

    tail: Tensor
    twin: Tensor
    length: Tensor
    cotangent: Tensor
    priority: Tensor


def packed_delaunay_laplacian(c: Connectivity, positions: Tensor) -> DelaunayLaplacian:
    """The Laplacian of the intrinsic Delaunay triangulation of each mesh, or of its tufted cover."""
    cover = tufted_cover(c, positions)
    cotangents = _cotangents(cover.length.view(-1, 3).T).T.reshape(-1)
    halfedges = Halfedges(cover.tail, cover.twin, cover.length, cotangents, _mixed(cover.number))
    unclear = cover.unclear
    unclear[c.mesh[halfedges.tail[_make_delaunay(halfedges)]]] = True

    twin, tail = halfedges.twin, halfedges.tail
    own = torch.arange(len(twin), device=twin.device)
    head = tail[twin]
    # Edges from the smaller to the larger vertex: sums for both directions have one order, so L is symmetric.
    edges = ((tail < head) | ((tail == head) & (own < twin))).nonzero().squeeze(1)
    tail, head = tail[edges], head[edges]
    rows, columns, groups = entries(tail, head, len(c.mesh))
    mean = (halfedges.cotangent[edges] + halfedges.cotangent[twin[edges]]) / 2
    weights = torch.where(tail == head, 0, mean)  # functions have no difference along a loop
    thirds = _areas(halfedges.length.view(-1, 3).T) / 3
    nothing = thirds.new_zeros(len(c.mesh))
    both = torch.stack(
        [torch.cat([weights, weights, nothing]), torch.cat([thirds[edges // 3], thirds[twin[edges] // 3], nothing])], 1
    )
    sheets = cover.sheets[c.mesh]
    joined, areas = groups.sums(both).unbind(1)
    lengths = torch.searchsorted(rows, torch.arange(len(c.mesh) + 1, device=rows.device)).diff()
    values = with_diagonal(-joined / sheets[rows], rows, columns, lengths)
    return DelaunayLaplacian(rows, columns, values, sums(areas, lengths) / sheets, unclear)


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
    areas: Tensor = (half * x * y * z).clamp(min=0).sqrt()
    return areas


def _cotangents(lengths: Tensor) -> Tensor:
    """Cotangents (3, …) of the angles opposite to the edges of triangles with these lengths (3, …)."""
    squares = lengths * lengths
    return (squares.roll(-1, 0) + squares.roll(-2, 0) - squares) / (4 * _areas(lengths))


def _make_delaunay(h: Halfedges) -> Tensor:
    """Flip edges until all are Delaunay, in rounds of edges that share no triangle.

    Returns the edges that would still have to be flipped after MAX_ROUNDS.
    """
    device = h.twin.device
    edges = (h.twin > torch.arange(len(h.twin), device=device)).nonzero().squeeze(1)
    lowest = torch.iinfo(torch.int64).min
    owner = torch.full((len(h.twin) // 3,), lowest, device=device)
    listed = torch.full_like(h.twin, -1)
    following, previous = torch.tensor([[1, 1, -2], [2, -1, -1]], device=device)
    seen = 0
    for number in range(MAX_ROUNDS + 1):
        edges = torch.minimum(edges, h.twin[edges])
        # An edge may be in the list twice. The later one counts.
        place = torch.arange(seen, seen + len(edges), device=device)
        seen += len(edges)
        listed.scatter_reduce_(0, edges, place, "amax")
        is_bad = h.cotangent[edges] + h.cotangent[h.twin[edges]] < 2 * MIN_COTANGENT
        edges = edges[is_bad & (listed[edges] == place)]
        if len(edges) == 0 or number == MAX_ROUNDS:
            break
        # An edge is flipped if it has the highest priority in both its triangles. Priorities are random and new in each
        # round; otherwise a row of n neighboring edges could take n rounds.
        both = torch.stack([edges, h.twin[edges]])
        priority = (h.priority[edges] ^ _constant(number)).expand(2, -1)
        owners = both // 3
        owner[owners] = lowest
        owner.scatter_reduce_(0, owners.reshape(-1), priority.reshape(-1), "amax")
        apart = (owner[owners] == priority).all(0).nonzero().squeeze(1)
        edges = torch.cat([edges, _flip(h, both[:, apart], following, previous)])
    return edges


def _constant(number: int) -> int:
    """A number of 64 bits for each round."""
    return int(_mixed(torch.tensor(number + 1)))


def _flip(h: Halfedges, both: Tensor, following: Tensor, previous: Tensor) -> Tensor:
    """Flip edges, so that they join the other two corners of their triangles. Returns the halfedges around these.

    both: (2, N), both halfedges of each edge
    following, previous: (3,), the way from halfedge 3f + i to the next and the one before
    """
    side = both % 3
    right, left = both + following[side], both + previous[side]
    # Lay both triangles in a plane with the edge as the first axis: positions of the opposite corners.
    lengths = h.length[torch.stack([both, right, left])]
    squares = lengths * lengths
    along = (squares[0] + squares[2] - squares[1]) / (2 * lengths[0])
    height = 2 * _areas(lengths) / lengths[0]
    diagonal = torch.hypot(lengths[0, 0] - along.sum(0), height.sum(0))

    # The edge a → b with triangles abc and bad becomes d → c with dca and cdb.
    old = torch.stack([left[0], right[1], left[1], right[0]])
    new = torch.stack([right[0], left[0], right[1], left[1]])
    tails, sides, opposite = h.tail[old], h.length[old], h.twin[old]
    # Twins that are among the four move, too: `twin` tells for a moment where each halfedge goes.
    h.twin[old] = -1 - new
    moved = h.twin[opposite]
    opposite = torch.where(moved < 0, -1 - moved, opposite)
    h.twin[new] = opposite
    h.twin[opposite] = new
    h.tail[new], h.length[new] = tails, sides
    h.tail[both], h.length[both] = tails[::2].flip(0), diagonal.expand(2, -1)
    triangles = torch.stack([diagonal.expand(2, -1), sides[::2], sides[1::2]])
    h.cotangent[torch.stack([both, right, left])] = _cotangents(triangles)
    return new.reshape(-1)
