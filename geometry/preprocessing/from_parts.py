"""The fields of `Operators` from matrices that other programs have computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, SuperLU, eigsh
from torch import Tensor

from diffnet.geometry.discretize.frames import tangent_frames
from diffnet.geometry.discretize.gradient import gradient_values, one_ring, pattern_with_diagonal
from diffnet.geometry.discretize.original import SHIFT
from diffnet.geometry.eigen.checks import shuffled, superlu
from diffnet.geometry.eigen.lanczos import random_rows
from diffnet.geometry.eigen.problem import USUAL_SHIFT, Array, Component, Pairs, checked_problem, diagonal_of
from diffnet.geometry.mesh.mesh import Mesh, make_mesh
from diffnet.geometry.mesh.normalize import round_positions
from diffnet.geometry.mesh.objects import real_array
from diffnet.geometry.preprocessing.recipe import Discretization, complete, operator_arrays, solve
from diffnet.geometry.store.assembly import assembled_fields
from diffnet.geometry.store.entry import rounded_frames
from diffnet.ops import SparseMatrix
from diffnet.ops.common.checks import check_count
from diffnet.ops.common.precision import scipy_array

NAME = "from_parts"  # for messages
_OR_POSITIONS = "or verts (V, 3), and faces (F, 3) if there are any, to compute it from"
MAX_ASYMMETRY = 1e-5  # of the largest entry; single precision rounds to 1e-7
MAX_ROW_SUM = 1e-4  # of the sum of the absolute values of a row
MAX_DEVIATION = 1e-3  # largest entry of ΦᵀMΦ − I, and of F Fᵀ − I for a frame F
MAX_DESCENT = 1e-4  # of the largest eigenvalue
ROUNDING = 1e-6  # of the sum of the absolute values of a row; single precision rounds to 1e-7
MAX_INACCURACY = 1e-2  # relative error of eigenpairs; rounding to half precision has 2e-4, that of slivers up to 1e-3


def fields_from_parts(
    mass: Any,
    laplacian: Any,
    evals: Any,
    evecs: Any,
    grad_x: Any,
    grad_y: Any,
    frames: Any,
    verts: Any,
    faces: Any,
    k: int,
) -> dict[str, Any]:
    """The fields of one mesh, see `Operators.from_parts`."""
    check_count("k", k, 0)
    _check_together(evals=evals, evecs=evecs)
    _check_together(grad_x=grad_x, grad_y=grad_y)
    if verts is None and grad_x is None:
        raise ValueError(f"from_parts needs a gradient: pass grad_x and grad_y (V, V), {_OR_POSITIONS}")
    if verts is None and frames is None:
        raise ValueError(
            f"from_parts needs the tangent frames of grad_x and grad_y: pass frames (V, 3, 3), {_OR_POSITIONS}"
        )
    mass = diagonal_of(_as_scipy("mass", mass) if _is_matrix(mass) else real_array("masses", mass))
    laplacian, mass = checked_problem(_as_scipy("laplacian", laplacian), mass)
    _check_problem(laplacian, mass)
    vertices = len(mass)
    mesh = _mesh(verts, faces, vertices)

    if frames is not None:
        frames = _checked_frames(_array("frames", frames, (vertices, 3, 3)))
    if grad_x is not None:
        gradient, edges = _merged([_square("grad_x", grad_x, vertices), _square("grad_y", grad_y, vertices)])
        frames = _frames_of(mesh, edges, gradient) if frames is None else frames
    else:
        cloud = mesh.is_point_cloud
        edges = pattern_with_diagonal(laplacian) if cloud else one_ring(mesh.usable_faces, vertices)
        frames = rounded_frames(tangent_frames(mesh)) if frames is None else frames
        gradient = gradient_values(mesh.verts, frames, edges)

    arrays = operator_arrays(NAME, laplacian, mass, frames, gradient, edges)
    discretization = Discretization(NAME, arrays, laplacian, mass)
    exact = _without_rounded_sums(laplacian, needed=evals is None and k > 0)
    if evals is None:
        _positive_factor(exact, mass, k, MAX_DESCENT)
        pairs = solve(replace(discretization, laplacian=exact), k)
    else:
        pairs = _checked_pairs(evals, evecs, mass)
        _check_residual(exact, mass, *pairs)
    return assembled_fields(complete(discretization, pairs, "float32"), mesh.faces)


def _check_together(**parts: Any) -> None:
    names = [name for name, value in parts.items() if value is not None]
    if len(names) == 1:
        (missing,) = parts.keys() - set(names)
        raise ValueError(f"{names[0]} is given without {missing}; pass both, or neither to have them computed")


def _is_matrix(value: Any) -> bool:
    """Whether a value is a matrix of any kind, not a vector."""
    return isinstance(value, SparseMatrix) or scipy.sparse.issparse(value) or getattr(value, "ndim", 1) == 2


def _as_scipy(name: str, matrix: Any) -> scipy.sparse.csr_matrix:
    """A matrix of any kind in float64. Columns ascend within a row and occur once."""
    if isinstance(matrix, SparseMatrix):
        matrix = matrix.to_scipy()
    elif isinstance(matrix, Tensor):
        if matrix.ndim != 2:
            raise ValueError(f"{name} should be a matrix (V, V), shape is {tuple(matrix.shape)}")
        entries = matrix.detach().cpu().to_sparse(layout=torch.sparse_coo).coalesce()
        arrays = scipy_array(entries.values()), entries.indices().numpy()
        matrix = scipy.sparse.coo_matrix(arrays, tuple(entries.shape))
    elif not scipy.sparse.issparse(matrix):
        matrix = np.asarray(matrix)
        if matrix.ndim != 2 or matrix.dtype == object:
            text = f"shape is {matrix.shape}" if matrix.dtype != object else f"got {type(matrix[()]).__name__}"
            raise ValueError(f"{name} should be a matrix (V, V) of SciPy, NumPy or PyTorch, or a SparseMatrix, {text}")
    if np.iscomplexobj(matrix):
        raise ValueError(
            f"{name} should be real, dtype is {matrix.dtype}; pass the parts of a complex gradient G as "
            "grad_x=G.real and grad_y=G.imag"
        )
    csr = scipy.sparse.csr_matrix(matrix, dtype=np.float64, copy=True)
    csr.sum_duplicates()
    return csr


def _square(name: str, value: Any, vertices: int) -> scipy.sparse.csr_matrix:
    matrix = _as_scipy(name, value)
    if matrix.shape != (vertices, vertices):
        raise ValueError(f"{name} should have shape ({vertices}, {vertices}), shape is {matrix.shape}")
    if not np.isfinite(matrix.data).all():
        raise ValueError(f"{name} has entries that are not finite")
    return matrix


def _array(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    array = real_array(name, value)
    if array.shape != shape:
        raise ValueError(f"{name} should have shape {shape}, shape is {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has entries that are not finite")
    return array


def _mesh(verts: Any, faces: Any, vertices: int) -> Mesh:
    if verts is None:
        return make_mesh(np.zeros((vertices, 3)), faces, name=NAME)  # checks the faces; positions aren't used
    mesh = round_positions(make_mesh(verts, faces, name=NAME))
    if len(mesh.verts) != vertices:
        raise ValueError(f"there are {len(mesh.verts)} verts, but {vertices} masses")
    return mesh


def _check_problem(laplacian: scipy.sparse.csr_matrix, mass: Array) -> None:
    largest = np.abs(laplacian.data).max(initial=0)
    asymmetry = abs(laplacian - laplacian.T).max() if laplacian.nnz else 0.0
    if asymmetry > MAX_ASYMMETRY * largest:
        raise ValueError(
            f"laplacian should be symmetric, but entries differ from those of its transpose by up to {asymmetry:.3g}, "
            f"the largest entry is {largest:.3g}; if it is divided by the masses, multiply its rows by them"
        )
    rows = np.bincount(np.repeat(np.arange(len(mass)), np.diff(laplacian.indptr)), np.abs(laplacian.data), len(mass))
    bad = np.flatnonzero((mass == 0) & (rows > 0))
    if len(bad) or not mass.any():
        first = int(bad[0]) if len(bad) else 0
        raise ValueError(
            f"mass should be positive at vertices that the laplacian connects, but {len(bad) or len(mass)} masses are "
            f"0; the first is mass[{first}]"
        )


def _checked_pairs(evals: Any, evecs: Any, mass: Array) -> Pairs:
    values = real_array("evals", evals)
    if values.ndim != 1:
        raise ValueError(f"evals should have shape (K,), shape is {values.shape}")
    values = _array("evals", values, values.shape)
    vectors = _array("evecs", evecs, (len(mass), len(values)))
    slack = MAX_DESCENT * np.abs(values).max(initial=0)
    if (np.diff(values) < -slack).any() or values.min(initial=0) < -slack:
        raise ValueError(
            f"evals should be at least 0 and ascend, got {values[:3].tolist()} … {values[-3:].tolist()}; sort them and "
            "the columns of evecs, and solve for the smallest eigenvalues of the positive semi-definite laplacian"
        )
    gram = vectors.T @ (mass[:, None] * vectors)
    present = vectors.any(axis=0)  # a mesh with fewer pairs has vectors of zeros in place of the others
    deviation = np.abs(gram - np.diag(present.astype(np.float64))).max(initial=0)
    if not deviation <= MAX_DEVIATION:
        raise ValueError(
            f"evecs should be orthonormal with respect to mass: ΦᵀMΦ differs from I by up to {deviation:.3g}, more "
            f"than {MAX_DEVIATION:g}. Solve the generalized problem L φ = λ M φ, or leave evals and evecs out"
        )
    return values, vectors


def _without_rounded_sums(laplacian: scipy.sparse.csr_matrix, *, needed: bool) -> scipy.sparse.csr_matrix:
    """The Laplacian with rows that sum to 0 exactly, if they do up to rounding.

    At slivers, entries are so large that their rounding to single precision makes the matrix indefinite.

    needed: raise ValueError for other sums
    """
    sums, sizes = (np.asarray(m.sum(axis=1)).reshape(-1) for m in (laplacian, abs(laplacian)))
    bad = np.flatnonzero(np.abs(sums) > MAX_ROW_SUM * sizes)
    if needed and len(bad):
        raise ValueError(
            f"the rows of laplacian should sum to 0, but {len(bad)} don't; row {bad[0]} sums to {sums[bad[0]]:.3g}. "
            "Pass evals and evecs of such a matrix, for example from scipy.sparse.linalg.eigsh"
        )
    return laplacian if len(bad) else scipy.sparse.csr_matrix(laplacian - scipy.sparse.diags(sums))


def _positive_factor(
    laplacian: scipy.sparse.csr_matrix, mass: Array, k: int, unit: float
) -> tuple[SuperLU, NDArray[np.int64]]:
    """Factorization of L + σM, where σ is `unit` × the k-th eigenvalue by Weyl's law, and the vertices of its rows.

    Raises ValueError for an eigenvalue of L below −σ that isn't due to rounding to single precision.
    """
    live = np.flatnonzero(mass)
    order = live[shuffled(len(live))]
    laplacian, mass = laplacian[order][:, order], mass[order]
    slack = ROUNDING * np.asarray(abs(laplacian).sum(axis=1)).reshape(-1)
    shift = Component(laplacian, mass, max(k, 1)).shift(unit)
    with suppress(RuntimeError):  # a pivot is exactly 0
        factor = superlu(laplacian + scipy.sparse.diags(slack + shift * mass))
        if (factor.U.diagonal() > 0).all():
            return factor, order
    scale, least = scipy.sparse.diags(mass**-0.5), -shift
    with suppress(ArpackNoConvergence):
        options = {"which": "SA", "tol": 1e-3, "maxiter": 1000, "return_eigenvectors": False}
        (least,) = eigsh(scale @ laplacian @ scale, 1, **options)
    raise ValueError(
        f"laplacian should be positive semi-definite, but L φ = λ M φ has eigenvalues down to {least:.3g}; check the "
        "signs of its entries"
    )


def _check_residual(laplacian: scipy.sparse.csr_matrix, mass: Array, evals: Array, evecs: Array) -> None:
    """Check L φ = λ M φ. The error of the vectors is (L + σM)⁻¹ times the residual, as in `eigen/checks.py`."""
    factor, order = _positive_factor(laplacian, mass, len(evals), USUAL_SHIFT)
    mixture = random_rows(4, len(evals)).T
    mixed, image = evecs @ mixture, mass[:, None] * (evecs @ (evals[:, None] * mixture))
    root = np.sqrt(mass[order, None])
    size = np.linalg.norm(root * mixed[order])
    for shift in (SHIFT, 0.0):  # the original implementation solves for L + SHIFT
        residual = laplacian @ mixed + shift * mixed - image
        error = np.linalg.norm(root * factor.solve(residual[order]))
        if error <= MAX_INACCURACY * size:
            return
    quotients = np.einsum("vk,vk->k", evecs, laplacian @ evecs)
    worst = int(np.argmax(np.abs(quotients - evals)))
    raise ValueError(
        f"evals and evecs should be eigenpairs, L φ = λ M φ, but they are accurate only to {error / size:.3g}, not to "
        f"{MAX_INACCURACY:g}; evals[{worst}] is {evals[worst]:.6g}, and φᵀLφ of its vector is {quotients[worst]:.6g}. "
        "Pass the pairs of this laplacian and this mass, or leave evals and evecs out"
    )


def _checked_frames(frames: Array) -> Array:
    deviation = np.abs(frames @ frames.swapaxes(1, 2) - np.eye(3)).max((1, 2))
    bad = np.flatnonzero((deviation > MAX_DEVIATION) | (np.linalg.det(frames) < 0))
    if len(bad):
        raise ValueError(
            "frames should be right-handed and orthonormal, with the rows tangent x, tangent y and normal, but "
            f"{len(bad)} are not; the first is frames[{bad[0]}] = {(frames[bad[0]].round(4) + 0).tolist()}"
        )
    return frames


def _merged(matrices: Sequence[scipy.sparse.csr_matrix]) -> tuple[Array, scipy.sparse.csr_matrix]:
    """Values (2, nnz) of matrices on one pattern, which has all of their entries and the diagonal."""
    pattern = pattern_with_diagonal(*matrices)

    def keys(matrix: scipy.sparse.csr_matrix) -> NDArray[np.int64]:
        rows = np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))
        return rows * matrix.shape[1] + matrix.indices

    everywhere = keys(pattern)
    values = np.zeros((len(matrices), pattern.nnz))
    for row, matrix in zip(values, matrices, strict=True):
        row[np.searchsorted(everywhere, keys(matrix))] = matrix.data
    return values, pattern


def _frames_of(mesh: Mesh, pattern: scipy.sparse.csr_matrix, gradient: Array) -> Array:
    """The frames (V, 3, 3) in which a gradient is given: its X component of the positions is tangent x."""
    by_geometry = tangent_frames(mesh)
    x, y = (scipy.sparse.csr_matrix((v, pattern.indices, pattern.indptr), pattern.shape) @ mesh.verts for v in gradient)
    normals = by_geometry[:, 2]
    normals = normals * np.where((np.cross(x, y) * normals).sum(1) < 0, -1.0, 1.0)[:, None]
    tangents = x - (x * normals).sum(1, keepdims=True) * normals
    size = np.linalg.norm(tangents, axis=1, keepdims=True)
    tangents = tangents / np.where(size > 0, size, 1.0)
    frames = np.stack([tangents, np.cross(normals, tangents), normals], axis=1)
    return np.where(size[:, None] > 0, frames, by_geometry)
