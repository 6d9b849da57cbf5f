"""The Laplacian of the intrinsic Delaunay triangulation of closed surfaces.

It is what `robust_laplacian` computes of them (Sharp & Crane 2020, "A Laplacian for Nonmanifold Triangle Meshes"), many
edges at a time. That covers a surface with two sheets; those of a closed one don't touch, so one is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.eigen.problem import Array

Indices: TypeAlias = NDArray[np.int64]

MOLLIFIED = 1e-5  # of the mean edge length: the least that two edges of a triangle are longer by than the third
DELAUNAY = -1e-6  # the cotangent weight from which an edge stays
MOST_ROUNDS = 1000


def delaunay_laplacian(verts: Array, faces: Indices) -> tuple[scipy.sparse.csr_matrix, Array] | None:
    """The cotangent Laplacian (V, V) and vertex areas (V,) after edges are flipped until all are Delaunay.

    verts (V, 3), faces (F, 3) with three distinct corners each

    None where an edge hasn't two faces that run along it in opposite directions, or where flips don't end.
    """
    halfedges = _glued(verts, faces)
    if halfedges is None or not _make_delaunay(halfedges):
        return None
    edges = halfedges.edges()
    weights, ends = halfedges.weights(edges), (halfedges.tail[edges], halfedges.tail[halfedges.twin[edges]])
    upper = scipy.sparse.csr_matrix((weights, ends), (len(verts), len(verts)))
    around = upper + upper.T
    laplacian = scipy.sparse.diags(np.asarray(around.sum(1)).reshape(-1)) - around
    thirds = np.repeat(_areas(halfedges.length.reshape(-1, 3)) / 3, 3)
    return scipy.sparse.csr_matrix(laplacian), np.bincount(halfedges.tail, thirds, len(verts)).astype(np.float64)


@dataclass
class _Halfedges:
    """Triangles by the lengths of their edges: halfedge 3f + i runs along triangle f from its corner i to the next.

    tail: the vertex that it comes from
    twin: the halfedge along the same edge, the other way
    length: of the edge
    cotangent: of the angle opposite to it
    """

    tail: Indices
    twin: Indices
    length: Array
    cotangent: Array

    def edges(self) -> Indices:
        """One halfedge of each."""
        return np.flatnonzero(self.twin > np.arange(len(self.twin)))

    def weights(self, edges: Indices) -> Array:
        """Means of the cotangents of the two angles opposite to each edge."""
        mean: Array = (self.cotangent[edges] + self.cotangent[self.twin[edges]]) / 2
        return mean


def _areas(lengths: Array) -> Array:
    """Of triangles, by the lengths of their edges (…, 3) → (…)"""
    a, b, c = np.moveaxis(lengths, -1, 0)
    half = (a + b + c) / 2
    areas: Array = np.sqrt(np.maximum(half * (half - a) * (half - b) * (half - c), 0))
    return areas


def _cotangents(lengths: Array) -> Array:
    """Of the angles opposite to the edges of triangles (…, 3) → (…, 3)"""
    a, b, c = np.moveaxis(lengths**2, -1, 0)
    return np.stack([b + c - a, c + a - b, a + b - c], axis=-1) / (4 * _areas(lengths))[..., None]


def _glued(verts: Array, faces: Indices) -> _Halfedges | None:
    tail, head = faces.reshape(-1), faces[:, [1, 2, 0]].reshape(-1)
    edge = np.minimum(tail, head) * len(verts) + np.maximum(tail, head)
    order = np.argsort(edge)
    if len(order) % 2 == 1:
        return None
    one, other = order[::2], order[1::2]
    alone = (edge[one] != edge[other]).any() or (edge[one[1:]] == edge[one[:-1]]).any()
    if alone or (tail[one] == tail[other]).any():
        return None
    twin = np.empty_like(order)
    twin[one], twin[other] = other, one

    corners = verts[faces]
    lengths = np.linalg.norm(corners[:, [1, 2, 0]] - corners, axis=2)
    a, b, c = lengths.T
    excess = np.maximum(np.maximum(a - b - c, b - c - a), c - a - b).max()
    lengths += max(excess + MOLLIFIED * lengths.mean(), 0.0)
    return _Halfedges(tail.copy(), twin, lengths.reshape(-1), _cotangents(lengths).reshape(-1))


def _make_delaunay(halfedges: _Halfedges) -> bool:
    """Flips edges, round by round those that share no triangle. False where that doesn't end."""
    rng = np.random.default_rng(0)
    owner = np.empty(len(halfedges.twin) // 3, np.int64)
    place = np.arange(len(halfedges.twin))
    edges = halfedges.edges()
    for _ in range(MOST_ROUNDS):
        edges = edges[halfedges.weights(edges) < DELAUNAY]
        if len(edges) == 0:
            return True
        # Two triangles are their last edge's. In random order, or a row of neighbours would take as many rounds.
        rng.shuffle(edges)
        triangles = np.stack([edges, halfedges.twin[edges]], axis=1) // 3
        number = np.arange(len(edges))
        owner[triangles.reshape(-1)] = np.repeat(number, 2)
        apart = (owner[triangles] == number[:, None]).all(1)
        edges = np.concatenate([edges[~apart], _flip(halfedges, edges[apart], place)])
    return False


def _flip(halfedges: _Halfedges, edges: Indices, place: Indices) -> Indices:
    """Turns each edge to the other two corners of its triangles, and returns the halfedges around these.

    place: every halfedge's own number, kept between calls
    """
    tail, twin, length = halfedges.tail, halfedges.twin, halfedges.length
    both = np.stack([edges, twin[edges]])
    triangles = both // 3
    right, left = 3 * triangles + (both + 1) % 3, 3 * triangles + (both + 2) % 3  # 3 f + i + 1 modulo 3 is i + 1
    # The corners opposite to the edge, in a plane with the edge as an axis.
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
