"""From a mesh or a point cloud to `Operators`."""

from __future__ import annotations

import os

import numpy as np
import scipy.sparse
import torch

from diffnet.geometry.cache import Arrays
from diffnet.geometry.discretize.laplacian import LaplacianKind
from diffnet.geometry.mesh.mesh import Mesh, MeshLike
from diffnet.geometry.operators import Operators
from diffnet.geometry.preprocessing.entry import BasisPrecision, Options, found_or_computed
from diffnet.ops import Pattern, SparseMatrix


def precompute(
    mesh: MeshLike,
    k: int = 128,
    laplacian: LaplacianKind = "robust",
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    basis: BasisPrecision = "float32",
    device: torch.device | str = "cpu",
) -> Operators:
    """Operators of one mesh or point cloud: mass, Laplacian, gradients, frames and k eigenpairs.

    mesh: a path, a trimesh object, or (verts (V, 3), faces (F, 3)); see `load_mesh`
    k: eigenpairs, 0 allowed; see `eigenbasis` for meshes that have fewer
    laplacian: "robust" or "cotan"; see `laplacian_and_mass`
    cache_dir: a folder that keeps results. An entry is found again by the content of the mesh and by the options, so
        the folder can be shared by data sets and by processes, and deleted at any time.
    basis: the precision that eigenvectors are kept in. "float16" and "bfloat16" save a third of the cache at k = 128;
        what is returned is float32 in any case, rounded to that precision with or without a cache.
    device: what computes the eigenbasis, see `eigenbasis`; the result is on the CPU

    Positions are rounded to float32 first, so float32 and float64 callers get the same entry; everything is computed
    in float64 from there and rounded once, to float32. Units are those of the positions: areas of `mass` are length²,
    eigenvalues 1/length², gradients 1/length. Vertices keep their numbers; where neighbours have distant ones, sparse
    matrices store their rows in an order along the surface, see `Pattern.with_row_order`.

    Raises MeshError for a mesh that can't be used, ValueError for a bad option.
    """
    return _assemble(*found_or_computed(mesh, Options(k, laplacian, basis), cache_dir, device))


def _assemble(mesh: Mesh, arrays: Arrays) -> Operators:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    order = tensors["row_order"] if len(tensors["row_order"]) > 0 else None

    def sparse(name: str) -> SparseMatrix:
        indptr, indices = tensors[f"{name}_indptr"], tensors[f"{name}_indices"]
        transposed = _transposed(indptr, indices, order)
        pattern = Pattern(indptr, indices, len(mesh.verts), order, transposed, check=False)
        # What products and their backward need is found here, once, rather than inside a step that may be compiled or
        # captured.
        return SparseMatrix(pattern.prepare(), tensors[name])

    def extent(count: int) -> torch.Tensor:
        return torch.tensor([0, count], dtype=torch.int64)

    evecs = tensors["evecs"]
    if evecs.dtype == torch.uint16:
        evecs = evecs.view(torch.bfloat16)
    return Operators(
        ptr=extent(len(mesh.verts)),
        mass=tensors["mass"],
        evals=tensors["evals"][None],
        evecs=evecs if evecs.dtype == torch.float32 else evecs.float() * tensors["evecs_scale"],
        laplacian=sparse("laplacian"),
        gradient=sparse("gradient"),
        frames=tensors["frames"],
        faces=torch.from_numpy(mesh.faces),
        face_ptr=extent(len(mesh.faces)),
        _lengths=(len(mesh.verts),),
    )


def _transposed(
    indptr: torch.Tensor, indices: torch.Tensor, row_order: torch.Tensor | None
) -> tuple[Pattern, torch.Tensor]:
    """`Pattern.transpose` of a square pattern. SciPy counts, on this thread, where PyTorch sorts on several, which for
    milliseconds after an eigenbasis still have to share the cores with those of NumPy's BLAS."""
    rows = len(indptr) - 1
    positions = np.arange(len(indices), dtype=np.int64)
    matrix = scipy.sparse.csr_array((positions, indices.numpy(), indptr.numpy()), shape=(rows, rows))
    if row_order is None:
        matrix = matrix.tocsc()
    else:
        order = row_order.numpy()
        matrix = matrix[np.argsort(order)].tocsc()[:, order]
    starts, columns = (torch.from_numpy(a.astype(np.int32, copy=False)) for a in (matrix.indptr, matrix.indices))
    return Pattern(starts, columns, rows, row_order, check=False), torch.from_numpy(matrix.data)
