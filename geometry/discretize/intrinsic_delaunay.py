"""The Laplacian of the intrinsic Delaunay triangulation of closed surfaces.

This computes what `robust_laplacian` computes for closed surfaces (Sharp & Crane 2020, "A Laplacian for Nonmanifold
Triangle Meshes"), but flips many edges at a time. The library covers a surface with two sheets. The sheets of a closed
surface don't touch, so one sheet is enough here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.mesh.polygons import Floats, Ints, corner_positions, sums_at_vertices

MIN_EXCESS = 1e-5  # times the mean edge length: two edges of a triangle exceed the third by at least this
MIN_COTANGENT = -1e-6  # edges with a smaller cotangent weight are flipped
MAX_ROUNDS = 1000  # of flips


def delaunay_laplacian(verts: Floats, faces: Ints) -> tuple[scipy.sparse.csr_matrix, Floats] | None:
    """The cotangent Laplacian (V, V) and vertex areas (V,) after edges are flipped until all are Delaunay.

    verts: (V, 3)
    faces: (F, 3), with three distinct corners each

    Returns None if an edge doesn't have exactly two faces that run along it in opposite directions, or if flips don't
    end.
    """
    halfedges = _glued(verts, faces)
    if halfedges is None or not _make_delaunay(halfedges):
        return None
    edges = halfedges.edges()
    weights, tail, head = halfedges.weights(edges), halfedges.tail[edges], halfedges.tail[halfedges.twin[edges]]
    weights = np.where(tail == head, 0, weights)  # flips can make an edge a loop
    degrees = np.bincount(tail, weights, len(verts)) + np.bincount(head, weights, len(verts))
    every = np.arange(len(verts))
    entries = np.concatenate([-weights, -weights, degrees])
    places = np.concatenate([tail, head, every]), np.concatenate([head, tail, every])
    laplacian = scipy.sparse.csr_matrix((entries, places), (len(verts), len(verts)))
    if laplacian.nnz < len(entries):  # edges with the same ends were added up, in an order that differs from row to row
        laplacian = (laplacian + laplacian.T) / 2
    laplacian.eliminate_zeros()
    areas = _areas(halfedges.length.reshape(-1, 3)) / 3
    return laplacian, sums_at_vertices(areas, halfedges.tail.reshape(-1, 3), len(verts))


@dataclass
class _Halfedges:
    """Triangles given by the lengths of their edges.

    Halfedge 3f + i runs from corner i of triangle f to the next corner.

    tail: the vertex where each halfedge starts
    twin: the halfedge along the same edge in the other direction
    length: the length of the edge
    cotangent: the cotangent of the angle opposite to the edge
    """

    tail: Ints
    twin: Ints
    length: Floats
    cotangent: Floats

    def edges(self) -> Ints:
        """One halfedge of each edge."""
        return np.flatnonzero(self.twin > np.arange(len(self.twin)))

    def weights(self, edges: Ints) -> Floats:
        """Cotangent weights: the mean of the cotangents of the two angles opposite to each edge."""
        return (self.cotangent[edges] + self.cotangent[self.twin[edges]]) / 2


def _areas(lengths: Floats) -> Floats:
    """Areas (…) of triangles with edges of these lengths (…, 3)."""
    a, b, c = np.moveaxis(lengths, -1, 0)
    half = (a + b + c) / 2
    return np.sqrt(np.maximum(half * (half - a) * (half - b) * (half - c), 0))


def _cotangents(lengths: Floats) -> Floats:
    """Cotangents (…, 3) of the angles opposite to the edges of triangles with these lengths (…, 3)."""
    a, b, c = np.moveaxis(lengths**2, -1, 0)
    return np.stack([b + c - a, c + a - b, a + b - c], axis=-1) / (4 * _areas(lengths))[..., None]


def _glued(verts: Floats, faces: Ints) -> _Halfedges | None:
    tail, head = faces.reshape(-1), faces[:, [1, 2, 0]].reshape(-1)
    number = np.arange(len(tail))
    along = scipy.sparse.csr_matrix((number, (tail, head)), (len(verts), len(verts)))
    against = along.T.tocsr()
    same = np.array_equal(along.indptr, against.indptr) and np.array_equal(along.indices, against.indices)
    if along.nnz != len(tail) or not same:
        return None
    twin = np.empty_like(number)
    twin[along.data] = against.data

    corners = corner_positions(verts, faces)
    lengths = np.linalg.norm(corners[[1, 2, 0]] - corners, axis=1).T
    a, b, c = lengths.T
    excess = np.maximum(np.maximum(a - b - c, b - c - a), c - a - b).max()
    lengths += max(excess + MIN_EXCESS * lengths.mean(), 0.0)
    return _Halfedges(tail.copy(), twin, lengths.reshape(-1), _cotangents(lengths).reshape(-1))


def _make_delaunay(halfedges: _Halfedges) -> bool:
    """Flip edges until all are Delaunay. False if flips don't end.

    Where the corners of several triangles lie on one circle, their edges are a matter of choice. Where flips led there,
    all of them go to the vertex of the smallest number, so the result doesn't depend on the order of flips.
    """
    changed = _flip_while(halfedges, halfedges.edges(), _is_bad)
    if changed is None:
        return False
    sides = halfedges.edges()
    edges = sides[changed[sides // 3] | changed[halfedges.twin[sides] // 3]]
    return _flip_while(halfedges, edges, _could_reach_smaller) is not None


def _is_bad(halfedges: _Halfedges, edges: Ints) -> NDArray[np.bool_]:
    return halfedges.weights(edges) < MIN_COTANGENT


def _could_reach_smaller(halfedges: _Halfedges, edges: Ints) -> NDArray[np.bool_]:
    """Whether the other diagonal is Delaunay, too, and has an end of a smaller number."""
    due = np.abs(halfedges.weights(edges)) <= -MIN_COTANGENT
    edges = edges[due]
    both = np.stack([edges, halfedges.twin[edges]])
    ends, others = halfedges.tail[both], halfedges.tail[both - both % 3 + (both + 2) % 3]
    due[due] = (others.min(0) < ends.min(0)) & (others[0] != others[1])
    return due


def _flip_while(
    halfedges: _Halfedges, edges: Ints, is_due: Callable[[_Halfedges, Ints], NDArray[np.bool_]]
) -> NDArray[np.bool_] | None:
    """Flip edges that are due until none is, in rounds of edges that share no triangle.

    Returns which triangles changed (F,), or None if flips don't end.
    """
    rng = np.random.default_rng(0)
    owner = np.empty(len(halfedges.twin) // 3, np.int64)
    place = np.arange(len(halfedges.twin))
    changed = np.zeros(len(owner), bool)
    for _ in range(MAX_ROUNDS):
        edges = edges[is_due(halfedges, edges)]
        if len(edges) == 0:
            return changed
        # An edge is flipped in this round if it is the last edge of both its triangles. The order is random; otherwise
        # a row of n neighboring edges could take n rounds.
        rng.shuffle(edges)
        triangles = np.stack([edges, halfedges.twin[edges]], axis=1) // 3
        number = np.arange(len(edges))
        owner[triangles.reshape(-1)] = np.repeat(number, 2)
        apart = (owner[triangles] == number[:, None]).all(1)
        changed[triangles[apart]] = True
        edges = np.concatenate([edges[~apart], _flip(halfedges, edges[apart], place)])
    return None


def _flip(halfedges: _Halfedges, edges: Ints, place: Ints) -> Ints:
    """Flip each edge, so that it joins the other two corners of its triangles. Returns the halfedges around these.

    place: the numbers of all halfedges, np.arange(len(twin)); changed during the call and restored
    """
    tail, twin, length = halfedges.tail, halfedges.twin, halfedges.length
    both = np.stack([edges, twin[edges]])
    triangles = both // 3
    right, left = 3 * triangles + (both + 1) % 3, 3 * triangles + (both + 2) % 3  # (3f + i + 1) mod 3 = (i + 1) mod 3
    # Lay both triangles in a plane with the edge as the first axis: positions of the opposite corners.
    along = (length[both] ** 2 + length[left] ** 2 - length[right] ** 2) / (2 * length[both])
    height = 2 * _areas(length.reshape(-1, 3)[triangles]) / length[both]
    diagonal = np.hypot(length[edges] - along.sum(0), height.sum(0))

    # The edge a → b with triangles abc and bad becomes d → c with dca and cdb.
    old = np.stack([left[0], right[1], left[1], right[0]])
    new = np.stack([right[0], left[0], right[1], left[1]])
    tails, lengths = tail[old], length[old]
    place[old] = new
    opposite = place[twin[old]]
    place[old] = old
    twin[new], twin[opposite] = opposite, new
    tail[new], length[new] = tails, lengths
    tail[both], length[both] = tails[[2, 0]], diagonal
    halfedges.cotangent.reshape(-1, 3)[triangles] = _cotangents(length.reshape(-1, 3)[triangles])
    return new.reshape(-1)
