"""Vertices at the same position: which of them are joined, and the operators of a mesh with joined vertices.

Joining gives J vertices for the V original ones, which are their copies. A function on the joined mesh is lifted to a
function on the original mesh that has the same value at all copies. docs/joined_vertices.md derives the formulas.

firsts: (J,) int64, ascending; the first copy of each joined vertex
place: (V,) int64, the joined vertex of each copy
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.objects import mean_normals
from diffnet.geometry.mesh.polygons import Floats, Ints, first_at_position
from diffnet.geometry.options import JOIN_RULES, JoinRule


def joined_vertices(mesh: Mesh, join: JoinRule = "auto") -> NDArray[np.int64]:
    """For each vertex (V,) int64, the first of the vertices that it is joined with. A vertex alone has its own number.

    join: a rule for vertices at exactly the same position
        "never" joins none of them.
        "always" joins all of them.
        "auto" joins those on open edges if this connects most of the mesh. An edge is open if only one face has it. The
        mesh is connected by joining if more than half of its faces belong to components with an open edge that
        coincides with an open edge of another component. Closed surfaces that touch stay apart. In a point cloud,
        "auto" joins all points at the same position: a repeated point says nothing about the surface.

    A vertex that no face uses is not joined. `precompute` rounds positions to float32 first. Raises OptionError for an
    unknown rule.

    >>> from diffnet.geometry import load_mesh
    >>> corners = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]
    >>> joined_vertices(load_mesh((corners, [[0, 1, 2], [3, 4, 5]]))).tolist()
    [0, 1, 2, 1, 4, 2]
    """
    if join not in JOIN_RULES:
        raise OptionError(f"join should be one of {', '.join(JOIN_RULES)}, got {join!r}")
    apart = np.arange(len(mesh.verts))
    if join == "never":
        return apart
    first = first_at_position(mesh.verts)
    if mesh.is_point_cloud or np.array_equal(first, apart):
        return first
    faces = mesh.usable_faces
    if join == "always":
        candidates = np.unique(faces)
    else:
        edges = open_edges(faces, len(apart))
        if len(edges) == 0 or not _connects(faces, edges, first):
            return apart
        candidates = np.unique(edges)
    apart[candidates] = candidates[first_at_position(mesh.verts[candidates])]
    return apart


def open_edges(faces: NDArray[np.int64], vertices: int) -> NDArray[np.int64]:
    """The edges (E, 2) that only one face has."""
    tail, head = faces.reshape(-1), faces[:, [1, 2, 0]].reshape(-1)
    ends = np.minimum(tail, head), np.maximum(tail, head)
    count = scipy.sparse.csr_matrix((np.ones(len(tail)), ends), (vertices, vertices))  # sorts them, and adds up
    start = np.repeat(np.arange(vertices), np.diff(count.indptr))
    return np.stack([start, count.indices], axis=1)[count.data == 1]


def components(faces: NDArray[np.int64], vertices: int) -> NDArray[np.int64]:
    """The number (V,) of the connected component of each vertex. Rows of two corners, edges, are allowed, too."""
    first, second = faces[:, :-1].reshape(-1), faces[:, 1:].reshape(-1)
    graph = scipy.sparse.csr_matrix((np.ones(len(first)), (first, second)), (vertices, vertices))
    return scipy.sparse.csgraph.connected_components(graph, directed=False)[1]


def _connects(faces: NDArray[np.int64], edges: NDArray[np.int64], first: NDArray[np.int64]) -> bool:
    """Whether most faces are in components that share an open edge with another one.

    edges: (E, 2) the open edges
    first: see `first_at_position`
    """
    vertices = len(first)
    component = components(faces, vertices)
    places = np.sort(first[edges], axis=1)
    key = places[:, 0] * vertices + places[:, 1]
    order = np.argsort(key, kind="stable")
    before, after = (component[edges[i, 0]] for i in (order[:-1], order[1:]))
    meet = (key[order[1:]] == key[order[:-1]]) & (before != after)
    connected = np.zeros(vertices, bool)
    connected[before[meet]] = True
    connected[after[meet]] = True
    return bool(2 * connected[component[faces[:, 0]]].sum() > len(faces))


def join(mesh: Mesh, firsts: Ints, place: Ints) -> Mesh:
    """The joined mesh. It has the same faces, in the same order. Normals are the means of those of the copies."""
    normals = None if mesh.normals is None else mean_normals(mesh.normals, place, len(firsts))
    return replace(mesh, verts=mesh.verts[firsts], faces=place[mesh.faces], normals=normals)


def lift_mass(mass: Floats, place: Ints) -> Floats:
    """Mass (V,): the copies share the mass (J,) of their joined vertex equally, so integrals don't change."""
    return (mass / np.bincount(place))[place]


def lift_laplacian(laplacian: scipy.sparse.csr_matrix, firsts: Ints, place: Ints) -> scipy.sparse.csr_matrix:
    """The Laplacian (V, V) of functions on the copies, from that of the joined mesh (J, J).

    It is symmetric and positive semi-definite, and its null space is that of the joined mesh, lifted. Lifted
    eigenvectors are eigenvectors with the same eigenvalues, with respect to `lift_mass`. Differences between copies
    decay at the rate of the shortest waves.
    """
    every, share = np.arange(len(place)), 1 / np.bincount(place)
    identity = scipy.sparse.eye(len(place), format="csr")
    mean = scipy.sparse.csr_matrix((share[place], (every, place)))  # its transpose averages over copies
    at_first = identity[:, firsts]
    half = (mean - at_first / 2) @ laplacian @ at_first.T

    further = np.flatnonzero(firsts[place] != every)
    difference = identity[further] - identity[firsts[place[further]]]
    stiffness = (share * np.asarray(abs(laplacian).sum(axis=1)).reshape(-1))[place[further]]
    lifted = scipy.sparse.csr_matrix(half + half.T + difference.T @ scipy.sparse.diags(stiffness) @ difference)
    lifted.sort_indices()
    return lifted


def lift_gradient(
    values: Floats, pattern: scipy.sparse.csr_matrix, firsts: Ints, place: Ints
) -> tuple[Floats, scipy.sparse.csr_matrix]:
    """Values (2, nnz') and pattern (V, V) of the gradient, from those of the joined mesh, (2, nnz) and (J, J).

    Each copy has the row of its joined vertex. Rows read functions at first copies.
    """
    numbered = scipy.sparse.csr_matrix((np.arange(pattern.nnz), pattern.indices, pattern.indptr), pattern.shape)
    rows = numbered[place]
    lifted = scipy.sparse.csr_matrix((np.ones(rows.nnz), firsts[rows.indices], rows.indptr), (len(place), len(place)))
    return values[:, rows.data], lifted
