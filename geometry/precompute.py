"""From a mesh or a point cloud to `Operators`."""

from __future__ import annotations

import operator
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

from diffnet.geometry.cache import Arrays, cache_key, entry_path, read_entry, write_entry
from diffnet.geometry.eigenbasis import eigenbasis
from diffnet.geometry.errors import MeshError
from diffnet.geometry.frames import tangent_frames
from diffnet.geometry.gradient import gradient_values, one_ring
from diffnet.geometry.laplacian import LAPLACIANS, LaplacianKind, laplacian_and_mass, usable_faces
from diffnet.geometry.mesh import Mesh, MeshLike, load_mesh
from diffnet.geometry.operators import Operators
from diffnet.ops import Pattern, SparseMatrix


def precompute(
    mesh: MeshLike,
    k: int = 128,
    laplacian: LaplacianKind = "robust",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Operators:
    """Operators of one mesh or point cloud: mass, Laplacian, gradients, frames and k eigenpairs.

    mesh: a path, a trimesh object, or (verts (V, 3), faces (F, 3)); see `load_mesh`
    k: eigenpairs, 0 allowed; see `eigenbasis` for meshes that have fewer
    laplacian: "robust" or "cotan"; see `laplacian_and_mass`
    cache_dir: a folder that keeps results. An entry is found again by the content of the mesh and by the options, so
        the folder can be shared by data sets and by processes, and deleted at any time.

    Positions are rounded to float32 first, so float32 and float64 callers get the same entry; everything is computed
    in float64 from there and rounded once, to float32. Units are those of the positions: areas of `mass` are length²,
    eigenvalues 1/length², gradients 1/length.

    Raises MeshError for a mesh that can't be used, ValueError for a bad option.
    """
    if laplacian not in LAPLACIANS:
        raise ValueError(f"laplacian should be one of {', '.join(LAPLACIANS)}, got {laplacian!r}")
    if k < 0:
        raise ValueError(f"k should be at least 0, got {k}")
    k = operator.index(k)
    checked = _rounded(load_mesh(mesh))
    if cache_dir is None:
        return _assemble(_compute(checked, k, laplacian), checked)
    path = _entry(checked, k, laplacian, cache_dir)
    arrays = _cached(path, checked, k)
    if arrays is None:
        arrays = _compute(checked, k, laplacian)
        write_entry(path, arrays)
    return _assemble(arrays, checked)


def is_cached(mesh: MeshLike, k: int, laplacian: LaplacianKind, cache_dir: str | os.PathLike[str]) -> bool:
    """Whether `precompute` would find a sound entry for this mesh. Raises MeshError for a mesh that can't be read."""
    checked = _rounded(load_mesh(mesh))
    return _cached(_entry(checked, k, laplacian, cache_dir), checked, k) is not None


def _entry(mesh: Mesh, k: int, laplacian: LaplacianKind, cache_dir: str | os.PathLike[str]) -> Path:
    content: Arrays = {"verts": mesh.verts.astype(np.float32), "faces": mesh.faces}
    return entry_path(cache_dir, cache_key(content, k=k, laplacian=laplacian))


def _cached(path: Path, mesh: Mesh, k: int) -> Arrays | None:
    """The arrays of a cache entry, if they are what `_compute` gives for such a mesh."""
    arrays = read_entry(path)
    if arrays is None:
        return None
    vertices = len(mesh.verts)
    entries = [
        arrays[f"{name}_indices"].size if f"{name}_indices" in arrays else 0 for name in ("laplacian", "gradient")
    ]
    expected = {
        "mass": ("float32", (vertices,)),
        "evals": ("float32", (k,)),
        "evecs": ("float32", (vertices, k)),
        "frames": ("float32", (vertices, 3, 3)),
        "laplacian": ("float32", (entries[0],)),
        "laplacian_indptr": ("int32", (vertices + 1,)),
        "laplacian_indices": ("int32", (entries[0],)),
        "gradient": ("float32", (2, entries[1])),
        "gradient_indptr": ("int32", (vertices + 1,)),
        "gradient_indices": ("int32", (entries[1],)),
    }
    if {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == expected:
        return arrays
    warnings.warn(f"cache entry {path} holds other arrays than it should and is computed again", stacklevel=3)
    return None


def _rounded(mesh: Mesh) -> Mesh:
    """The mesh at float32 positions (held as float64), moved to the origin first where it lies far away from it."""
    surface = mesh.verts if mesh.is_point_cloud else mesh.verts[np.unique(mesh.faces)]
    low, high = surface.min(axis=0), surface.max(axis=0)
    center = (low + high) / 2
    verts = mesh.verts
    if np.abs(center).max() > 64 * (high - low).max():  # float32 would lose 6 of the 24 bits to the offset
        verts = verts - center
    with np.errstate(over="ignore"):
        verts = verts.astype(np.float32).astype(np.float64)
    if not np.isfinite(verts).all():
        raise MeshError(f"{mesh.name}: coordinates up to {np.abs(mesh.verts).max():.3g} are beyond single precision")
    return replace(mesh, verts=verts)


def _compute(mesh: Mesh, k: int, kind: LaplacianKind) -> Arrays:
    laplacian, mass = laplacian_and_mass(mesh, kind)
    frames = tangent_frames(mesh)
    pattern = one_ring(usable_faces(mesh), len(mesh.verts)) if not mesh.is_point_cloud else _with_diagonal(laplacian)
    gradient = gradient_values(mesh.verts, frames, pattern)
    try:
        evals, evecs = eigenbasis(laplacian, mass, k)
    except RuntimeError as e:
        raise MeshError(f"{mesh.name}: {e}") from e
    arrays = {
        "mass": mass,
        "evals": evals,
        "evecs": evecs,
        "laplacian": laplacian.data,
        "gradient": gradient,
        "frames": frames,
    }
    with np.errstate(over="ignore"):
        arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise MeshError(f"{mesh.name}: {name} has entries that are not finite in single precision")
    for name, matrix in (("laplacian", laplacian), ("gradient", pattern)):
        arrays[f"{name}_indptr"] = matrix.indptr.astype(np.int32)
        arrays[f"{name}_indices"] = matrix.indices.astype(np.int32)
    return arrays


def _with_diagonal(laplacian: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The pattern of a point cloud's Laplacian: its local triangulations are the only neighbours a cloud has."""
    pattern = abs(laplacian) + scipy.sparse.eye(laplacian.shape[0], format="csr")
    pattern.sort_indices()
    return scipy.sparse.csr_matrix(pattern)


def _assemble(arrays: Arrays, mesh: Mesh) -> Operators:
    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(arrays[name])

    def sparse(name: str) -> SparseMatrix:
        pattern = Pattern(tensor(f"{name}_indptr"), tensor(f"{name}_indices"), len(mesh.verts))
        return SparseMatrix(pattern, tensor(name))

    def extent(count: int) -> torch.Tensor:
        return torch.tensor([0, count], dtype=torch.int64)

    laplacian, gradient = sparse("laplacian"), sparse("gradient")
    # What products and their backward need is found here, once, rather than inside a step that may be compiled or
    # captured. The Laplacian is symmetric, and what uses it in a step needs no transpose.
    gradient.pattern.prepare()
    _ = laplacian.pattern.long_pieces
    return Operators(
        ptr=extent(len(mesh.verts)),
        mass=tensor("mass"),
        evals=tensor("evals")[None],
        evecs=tensor("evecs"),
        laplacian=laplacian,
        gradient=gradient,
        frames=tensor("frames"),
        faces=torch.from_numpy(mesh.faces),
        face_ptr=extent(len(mesh.faces)),
        _lengths=(len(mesh.verts),),
    )
