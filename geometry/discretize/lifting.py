"""Operators of a mesh with joined vertices, at all vertices of the original mesh.

Joining gives J vertices for the V original ones, which are their copies. A function on the joined mesh is lifted to a
function on the original mesh that has the same value at all copies. docs/joined_vertices.md derives the formulas.

firsts: (J,) int64, ascending; the first copy of each joined vertex
place: (V,) int64, the joined vertex of each copy
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse

from diffnet.geometry.discretize.triangles import Array, Indices
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.mesh.normals import mean_normals


def join(mesh: Mesh, firsts: Indices, place: Indices) -> Mesh:
    """The joined mesh. It has the same faces, in the same order. Normals are the means of those of the copies."""
    normals = None if mesh.normals is None else mean_normals(mesh.normals, place, len(firsts))
    return replace(mesh, verts=mesh.verts[firsts], faces=place[mesh.faces], normals=normals)


def lift_mass(mass: Array, place: Indices) -> Array:
    """Mass (V,): the copies share the mass (J,) of their joined vertex equally, so integrals don't change."""
    shared: Array = (mass / np.bincount(place))[place]
    return shared


def lift_laplacian(laplacian: scipy.sparse.csr_matrix, firsts: Indices, place: Indices) -> scipy.sparse.csr_matrix:
    """The Laplacian (V, V) of functions on the copies, from that of the joined mesh (J, J).

    It is symmetric and positive semi-definite, and its null space is that of the joined mesh, lifted. Lifted
    eigenvectors are eigenvectors with the same eigenvalues, with respect to `lift_mass`. Differences between copies
    decay at the rate of the shortest waves.
    """
    joined, copies = laplacian.shape[0], len(place)
    share = 1 / np.bincount(place)
    mean = scipy.sparse.csr_matrix(
        (share[place], (np.arange(copies), place)), (copies, joined)
    )  # its transpose averages over copies
    at_first = scipy.sparse.csr_matrix((np.ones(joined), (firsts, np.arange(joined))), (copies, joined))
    half = (mean - at_first / 2) @ laplacian @ at_first.T

    further = np.flatnonzero(firsts[place] != np.arange(copies))
    rows = np.arange(len(further))
    shape = len(further), copies
    difference = scipy.sparse.csr_matrix((np.ones(len(further)), (rows, further)), shape) - scipy.sparse.csr_matrix(
        (np.ones(len(further)), (rows, firsts[place[further]])), shape
    )
    stiffness = (share * np.asarray(abs(laplacian).sum(axis=1)).reshape(-1))[place[further]]
    lifted = scipy.sparse.csr_matrix(half + half.T + difference.T @ scipy.sparse.diags(stiffness) @ difference)
    lifted.sort_indices()
    return lifted


def lift_gradient(
    values: Array, pattern: scipy.sparse.csr_matrix, firsts: Indices, place: Indices
) -> tuple[Array, scipy.sparse.csr_matrix]:
    """Values (2, nnz') and pattern (V, V) of the gradient, from those of the joined mesh, (2, nnz) and (J, J).

    Each copy has the row of its joined vertex. Rows read functions at first copies.
    """
    numbered = scipy.sparse.csr_matrix((np.arange(pattern.nnz), pattern.indices, pattern.indptr), pattern.shape)
    rows = numbered[place]
    lifted = scipy.sparse.csr_matrix((np.ones(rows.nnz), firsts[rows.indices], rows.indptr), (len(place), len(place)))
    return values[:, rows.data], lifted
