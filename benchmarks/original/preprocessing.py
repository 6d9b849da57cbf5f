"""Preprocessing by the recipe of the original implementation of DiffusionNet, written plainly.

The recipe is a cotangent Laplacian, SciPy's `eigsh` with a small shift, and a loop over the vertices that solves one
least-squares problem per vertex for the gradient (Sharp et al. 2022, "Implementation"). It shows what the original
costs. `precompute(…, operators="original")` has the same result in less time, and tests compare the two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import potpourri3d
import scipy.sparse
import scipy.sparse.linalg
from numpy.typing import NDArray

Array = NDArray[np.float64]


def original_precompute(verts: Array, faces: NDArray[np.int64], k: int) -> dict[str, Any]:
    """Laplacian, mass, k eigenpairs, frames and gradient of a mesh. Every vertex must belong to a face."""
    laplacian = potpourri3d.cotan_laplacian(verts, faces, denom_eps=1e-10)
    mass = potpourri3d.vertex_areas(verts, faces)
    mass += 1e-8 * mass.mean()
    evals, evecs = original_eigenbasis(laplacian, mass, k)
    frames = _frames(verts, faces)
    gradient = _gradient(verts, faces, frames)
    return {
        "laplacian": laplacian.astype(np.float32),
        "mass": mass.astype(np.float32),
        "evals": evals.astype(np.float32),
        "evecs": evecs.astype(np.float32),
        "frames": frames.astype(np.float32),
        "gradient": gradient,
    }


def original_eigenbasis(laplacian: scipy.sparse.spmatrix, mass: Array, k: int) -> tuple[Array, Array]:
    """The k smallest eigenpairs of L φ = λ M φ: evals (k,) and evecs (V, k)."""
    shift = 1e-8
    shifted = (laplacian + shift * scipy.sparse.identity(len(mass))).tocsc()
    evals, evecs = scipy.sparse.linalg.eigsh(shifted, k, scipy.sparse.diags(mass), sigma=shift)
    return np.clip(evals, 0, None), evecs


def _frames(verts: Array, faces: NDArray[np.int64]) -> Array:
    of_faces = np.cross(verts[faces[:, 1]] - verts[faces[:, 0]], verts[faces[:, 2]] - verts[faces[:, 0]])
    of_faces /= np.linalg.norm(of_faces, axis=1, keepdims=True) + 1e-6
    normals = np.zeros_like(verts)
    for corner in range(3):
        np.add.at(normals, faces[:, corner], of_faces)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    axes = np.where(np.abs(normals[:, :1]) < 0.9, [[1.0, 0, 0]], [[0, 1.0, 0]])
    x = axes - (axes * normals).sum(1, keepdims=True) * normals
    x /= np.linalg.norm(x, axis=1, keepdims=True) + 1e-6
    return np.stack([x, np.cross(normals, x), normals], axis=1)


def _gradient(verts: Array, faces: NDArray[np.int64], frames: Array) -> scipy.sparse.csr_matrix:
    """A complex sparse matrix: real and imaginary parts are the X and Y components."""
    halves = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    edges = np.unique(np.concatenate([halves, halves[:, ::-1]]), axis=0)
    along = verts[edges[:, 1]] - verts[edges[:, 0]]
    tangent = np.stack([(along * frames[edges[:, 0], axis]).sum(1) for axis in range(2)], axis=1)

    outgoing: list[list[int]] = [[] for _ in range(len(verts))]
    for edge, tail in enumerate(edges[:, 0]):
        outgoing[tail].append(edge)
    rows, columns, values = [], [], []
    for vertex, incident in enumerate(outgoing):
        if not incident:
            continue
        lhs = np.zeros((len(incident), 2))
        rhs = np.zeros((len(incident), len(incident) + 1))
        lookup = [vertex]
        for i, edge in enumerate(incident):
            lhs[i] = tangent[edge]
            rhs[i, 0], rhs[i, i + 1] = -1, 1
            lookup.append(int(edges[edge, 1]))
        solution = np.linalg.inv(lhs.T @ lhs + 1e-5 * np.identity(2)) @ lhs.T @ rhs
        for i, column in enumerate(lookup):
            rows.append(vertex)
            columns.append(column)
            values.append(solution[0, i] + 1j * solution[1, i])
    return scipy.sparse.csr_matrix((values, (rows, columns)), shape=(len(verts), len(verts)))
