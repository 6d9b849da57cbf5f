"""The computation of a mesh's operators as NumPy arrays, before and after the eigenbasis.

This module doesn't import PyTorch, so worker processes start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.discretize.coincident import join, joined_vertices, lift_gradient, lift_laplacian, lift_mass
from diffnet.geometry.discretize.frames import tangent_frames
from diffnet.geometry.discretize.gradient import gradient_values, one_ring, order_unless_near, pattern_with_diagonal
from diffnet.geometry.discretize.laplacian import laplacian_and_mass
from diffnet.geometry.discretize.original import SHIFT, Parts, original_parts
from diffnet.geometry.eigen.problem import Array, Pairs
from diffnet.geometry.eigen.solve import eigenbasis, shifted_pairs
from diffnet.geometry.errors import MeshError, raised_as
from diffnet.geometry.fields import FIELDS
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.options import BasisPrecision, Options, chosen_laplacian
from diffnet.geometry.processes import phase
from diffnet.geometry.store.codec import Arrays
from diffnet.geometry.store.entry import rounded_frames

if TYPE_CHECKING:
    import torch


@dataclass
class Discretization:
    """The operators of a mesh without their eigenpairs.

    name: the mesh, for messages
    arrays: everything that a cache entry holds except the eigenpairs, in single precision
    laplacian, mass: in double precision, for the eigensolver; of the joined mesh, if vertices are joined
    place: (V,) the row of each vertex in the eigenvectors, or None if no vertices are joined
    lone_mass: for the original's operators, see `shifted_pairs`; None for others
    """

    name: str
    arrays: Arrays
    laplacian: scipy.sparse.csr_matrix
    mass: Array
    place: NDArray[np.int64] | None = None
    lone_mass: Array | None = None


def computed_arrays(mesh: Mesh, options: Options, device: torch.device | str = "cpu") -> Arrays:
    """All arrays of a cache entry of a mesh, see `mesh_for_operators`. The device computes the eigenpairs.

    Raises the errors of `discretize`, `solve` and `complete`.
    """
    with phase("assemble"):
        discretization = discretize(mesh, options)
    with phase("solve"):
        pairs = solve(discretization, options.k, device)
    return complete(discretization, pairs, options.basis)


def discretize(mesh: Mesh, options: Options) -> Discretization:
    """Laplacian, mass, frames and gradient of a mesh, see `mesh_for_operators`.

    Raises MeshError for a mesh without a surface, and for values that single precision can't hold.
    """
    original = options.operators == "original"
    first = joined_vertices(mesh, "never" if original and options.join == "auto" else options.join)
    firsts, place = np.unique(first, return_inverse=True)
    joined = len(firsts) < len(first)
    surface = join(mesh, firsts, place) if joined else mesh
    parts = original_parts(surface) if original else _parts(surface, options)
    laplacian, mass, frames, edges, gradient, lone_mass = parts
    problem = laplacian, mass - lone_mass
    if joined:
        mass, frames = lift_mass(mass, place), frames[place]
        laplacian = lift_laplacian(laplacian, firsts, place)
        gradient, edges = lift_gradient(gradient, edges, firsts, place)

    arrays = operator_arrays(mesh.name, laplacian, mass, frames, gradient, edges, joined=first if joined else None)
    return Discretization(mesh.name, arrays, *problem, place if joined else None, lone_mass if original else None)


def _parts(mesh: Mesh, options: Options) -> Parts:
    axes = None if mesh.normals is None else tangent_frames(mesh, mesh.normals)
    laplacian, mass = laplacian_and_mass(mesh, chosen_laplacian(options.laplacian, options.operators), axes)
    frames = rounded_frames(tangent_frames(mesh) if axes is None else axes)
    edges = pattern_with_diagonal(laplacian) if mesh.is_point_cloud else one_ring(mesh.usable_faces, len(mesh.verts))
    return Parts(laplacian, mass, frames, edges, gradient_values(mesh.verts, frames, edges), np.zeros(len(mass)))


def operator_arrays(
    name: str,
    laplacian: scipy.sparse.csr_matrix,
    mass: Array,
    frames: Array,
    gradient: Array,
    edges: scipy.sparse.csr_matrix,
    **optional: NDArray[Any] | None,
) -> Arrays:
    """The arrays of a cache entry except the eigenpairs. Rows are stored along the surface, see `order_unless_near`.

    name: the mesh, for messages
    gradient: values (2, nnz) on the pattern `edges`
    optional: see `optional_arrays`

    Raises MeshError for values that single precision can't hold.
    """
    arrays = _in_single_precision(
        name, {"mass": mass, "laplacian": laplacian.data, "gradient": gradient, "frames": frames}
    )
    arrays |= optional_arrays(**optional)
    order = order_unless_near(edges)
    arrays["row_order"] = np.zeros(0, np.int32) if order is None else order.astype(np.int32)
    for which, matrix in (("laplacian", laplacian), ("gradient", edges)):
        if order is not None:
            numbered = scipy.sparse.csr_matrix((np.arange(matrix.nnz), matrix.indices, matrix.indptr), matrix.shape)
            matrix = numbered[order]
            arrays[which] = np.ascontiguousarray(arrays[which][..., matrix.data])
        arrays[f"{which}_indptr"] = matrix.indptr.astype(np.int32)
        arrays[f"{which}_indices"] = matrix.indices.astype(np.int32)
    return arrays


def optional_arrays(**optional: NDArray[Any] | None) -> Arrays:
    """The optional fields of `Operators` in a cache entry, empty if they are None or not given."""
    arrays = {}
    for which, kind in FIELDS.items():
        if kind.stored and kind.optional:
            value = optional.get(which)
            empty = np.zeros((0, *kind.shape[1:]))
            arrays[which] = (empty if value is None else value).astype(kind.stored_dtype)
    return arrays


def solve(discretization: Discretization, k: int, device: torch.device | str = "cpu") -> Pairs:
    """The k smallest eigenpairs in double precision. Raises MeshError where the solver doesn't converge."""
    with raised_as(MeshError, discretization.name, RuntimeError):
        return eigenbasis(discretization.laplacian, discretization.mass, k, device)


def complete(discretization: Discretization, pairs: Pairs, basis: BasisPrecision) -> Arrays:
    """All arrays of a cache entry. Eigenvectors are rounded to the given precision.

    Raises MeshError for eigenpairs that single precision can't hold.
    """
    if discretization.lone_mass is not None:
        pairs = shifted_pairs(pairs, discretization.lone_mass, SHIFT)
    evals, evecs = pairs
    if discretization.place is not None:
        evecs = evecs[discretization.place]
    return with_pairs(discretization.name, discretization.arrays, (evals, evecs), basis)


def with_pairs(name: str, arrays: Arrays, pairs: tuple[NDArray[Any], NDArray[Any]], basis: BasisPrecision) -> Arrays:
    """The arrays of a cache entry with its eigenpairs: evals (k,) and evecs (V, k).

    Raises MeshError, which begins with the name, for eigenpairs that single precision can't hold.
    """
    evals, evecs = pairs
    arrays = arrays | _in_single_precision(name, {"evals": evals, "evecs": evecs})
    # Eigenvectors of small components are large and would overflow in half precision without a scale.
    scale = np.ones(len(evals), np.float32)
    if basis != "float32":
        largest = np.abs(arrays["evecs"]).max(0)
        scale = np.where(largest > 0, largest, np.float32(1))
        arrays["evecs"] = _in_half_precision(arrays["evecs"] / scale, basis)
    return arrays | {"evecs_scale": scale}


def _in_single_precision(name: str, arrays: dict[str, NDArray[Any]]) -> Arrays:
    with np.errstate(over="ignore"):
        rounded = {which: np.ascontiguousarray(array, np.float32) for which, array in arrays.items()}
    for which, array in rounded.items():
        if not np.isfinite(array).all():
            raise MeshError(f"{name}: {which} has entries that are not finite in single precision")
    return rounded


def _in_half_precision(values: NDArray[np.float32], precision: BasisPrecision) -> NDArray[Any]:
    if precision == "float16":
        return values.astype(np.float16)
    # NumPy has no bfloat16: keep the upper half of the bits, rounded to nearest, ties to even.
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
