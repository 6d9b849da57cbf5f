"""Eigenfunctions of an elastic energy (Hartwig et al. 2023, An Elastic Basis for Spectral Shape Correspondence).

A mesh is a thin shell at rest. Its energy is that of stretched faces (membrane) and of bent inner edges. At rest the
second derivative is Jᵀ W J, with J the first derivatives of strains and angles: the strains and angles are 0 there.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from diffnet.geometry import Mesh, Operators
from diffnet.geometry.eigen.checks import shuffled, superlu
from diffnet.geometry.elements.elements import face_areas

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BENDING = 1e-2  # weight of bending for a shape of area 1, as in the paper
RIGID = 6  # motions without energy
SHIFT = 1e-3  # of the eigenvalues, relative to their size; makes the Hessian of rigid motions regular


def elastic_functions(mesh: Mesh, operators: Operators, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest elastic eigenvalues (k,) of a mesh that are not 0, and its modes along the normals (V, k).

    The functions are independent, but not orthonormal. Both are float64 and belong to a mesh scaled to area 1.
    Operators may be of a scaled mesh. Raises ValueError for faces that aren't those of a manifold.
    """
    verts = mesh.verts.astype(np.float64) / np.sqrt(face_areas(mesh).sum())
    mass = operators.mass.double().numpy()
    evals, modes = elastic_modes(verts, mesh.faces, mass / mass.sum(), k)
    normals = operators.normals.double()
    return torch.from_numpy(evals), torch.einsum("vck,vc->vk", torch.from_numpy(modes), normals)


def elastic_modes(verts: Floats, faces: Ints, mass: Floats, k: int, bending: float = BENDING) -> tuple[Floats, Floats]:
    """The k smallest eigenvalues (k,) and modes (V, 3, k) of H v = λ M v that are not rigid.

    verts: (V, 3), of a shape of area 1
    faces: (F, 3), of a connected manifold whose faces have consistent orders
    mass: (V,), positive areas of vertices

    ΣᵢMᵢ vᵢ·wᵢ is 1 for a mode with itself and 0 for two modes.
    """
    hessian = elastic_hessian(verts, faces, bending)
    order = (3 * shuffled(len(verts))[:, None] + range(3)).ravel()
    weights = np.sqrt(np.repeat(mass, 3))[order]
    scaled = sp.diags_array(1 / weights)
    matrix = scaled @ hessian.tocsr()[order][:, order] @ scaled
    shift = SHIFT * matrix.diagonal().mean() / len(verts)
    factor = superlu(sp.csr_matrix(matrix + shift * sp.eye_array(len(order))))
    inverse = LinearOperator(matrix.shape, matvec=factor.solve, dtype=np.float64)
    start = np.random.default_rng(0).normal(size=len(order))
    evals, vectors = eigsh(matrix, k + RIGID, sigma=-shift, OPinv=inverse, v0=start)
    modes = np.empty_like(vectors)
    modes[order] = vectors / weights[:, None]
    return evals[RIGID:], modes[:, RIGID:].reshape(len(verts), 3, k)


def elastic_hessian(verts: Floats, faces: Ints, bending: float = BENDING) -> sp.csr_array:
    """The second derivative (3V, 3V) of the energy at rest. Coordinate c of vertex v has row 3v + c."""
    strains, stiffness = _strains(verts, faces)
    angles, rigidity = _angles(verts, faces)
    return sp.csr_array(strains.T @ stiffness @ strains + bending * angles.T @ rigidity @ angles)


def _strains(verts: Floats, faces: Ints) -> tuple[sp.csr_array, sp.csr_array]:
    """Derivatives (3F, 3V) of the strains E₁₁, E₂₂, E₁₂ of faces, and their weights (3F, 3F).

    The energy of a face of area A is A (½ (tr E)² + tr E²), as both Lamé constants are 1.
    """
    corners = verts[faces]
    x = _unit(corners[:, 1] - corners[:, 0])
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    areas = np.linalg.norm(normals, axis=1) / 2
    y = np.cross(normals / (2 * areas[:, None]), x)
    opposite = np.roll(corners, -2, 1) - np.roll(corners, -1, 1)
    # The gradient of the hat function of each corner, in the axes x and y of the face.
    hats = np.cross(normals[:, None] / (2 * areas[:, None, None]) ** 2, opposite)
    along = np.stack([np.einsum("fcd,fd->fc", hats, x), np.einsum("fcd,fd->fc", hats, y)], 2)
    rows = np.stack(
        [
            along[:, :, :1] * x[:, None],
            along[:, :, 1:] * y[:, None],
            (along[:, :, 1:] * x[:, None] + along[:, :, :1] * y[:, None]) / 2,
        ],
        1,
    )
    block = np.array([[3.0, 1.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 4.0]])
    weights = sp.kron(sp.diags_array(areas), block, format="csr")
    return _rows_of(rows.reshape(-1, 3, 3), np.repeat(faces, 3, 0), len(verts)), sp.csr_array(weights)


def _angles(verts: Floats, faces: Ints) -> tuple[sp.csr_array, sp.csr_array]:
    """Derivatives (E, 3V) of the angles θ between the normals at inner edges, and their weights (E, E).

    The energy of an edge is (θ − θ at rest)² ‖e‖² / a, where a is a third of the area of its faces.
    """
    i, j, k, opposite = _inner_edges(faces)
    edge = verts[j] - verts[i]
    squared = (edge**2).sum(1)
    length = np.sqrt(squared)[:, None]
    of_k = np.cross(edge, verts[k] - verts[i])
    of_opposite = np.cross(verts[opposite] - verts[i], edge)
    gradients, at_i, at_j, areas = [], np.zeros_like(edge), np.zeros_like(edge), np.zeros(len(edge))
    for apex, normal in ((k, of_k), (opposite, of_opposite)):
        squares = (normal**2).sum(1)  # of twice the areas
        lift = length * normal / squares[:, None]  # a unit normal divided by the height
        foot = (((verts[apex] - verts[i]) * edge).sum(1) / squared)[:, None]  # 0 at i and 1 at j
        at_i -= (1 - foot) * lift
        at_j -= foot * lift
        gradients.append(lift)
        areas += np.sqrt(squares) / 2
    rows = np.stack([at_i, at_j, *gradients], 1)
    weights = sp.diags_array(2 * squared / (areas / 3), format="csr")
    return _rows_of(rows, np.stack([i, j, k, opposite], 1), len(verts)), sp.csr_array(weights)


def _inner_edges(faces: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """The ends of each edge with two faces, the third vertex of the face that has it in this order, and the other."""
    sides = np.concatenate([np.roll(faces, -shift, 1) for shift in range(3)])
    places = {(a, b): c for a, b, c in sides.tolist()}
    if len(places) != len(sides):
        raise ValueError("the faces aren't those of a manifold with consistent orders")
    edges = [(a, b, c, places[b, a]) for (a, b), c in places.items() if a < b and (b, a) in places]
    i, j, k, opposite = np.array(edges, np.int64).reshape(-1, 4).T
    return i, j, k, opposite


def _rows_of(rows: Floats, vertices: Ints, count: int) -> sp.csr_array:
    """A matrix (N, 3 count) from derivatives (N, C, 3) by the positions of C vertices (N, C)."""
    columns = 3 * vertices[:, :, None] + np.arange(3)
    numbers = np.broadcast_to(np.arange(len(rows))[:, None, None], rows.shape)
    return sp.csr_array(sp.coo_array((rows.ravel(), (numbers.ravel(), columns.ravel())), shape=(len(rows), 3 * count)))


def _unit(x: Floats) -> Floats:
    return x / np.linalg.norm(x, axis=1, keepdims=True)
