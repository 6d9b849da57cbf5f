"""From a mesh or a point cloud to `Operators`."""

from __future__ import annotations

import os
import warnings

import numpy as np
import scipy.sparse
import torch

from diffnet.geometry.argument_names import refuses
from diffnet.geometry.cache import Arrays, write_entry
from diffnet.geometry.diagnosis import diagnose
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.preprocessing.device import usable_device
from diffnet.geometry.preprocessing.entry import operators_path, read_operators
from diffnet.geometry.preprocessing.options import BasisPrecision, JoinRule, LaplacianKind, Options
from diffnet.geometry.preprocessing.recipe import complete, discretize, round_positions, solve
from diffnet.ops import Pattern, SparseMatrix


@refuses(
    verts="(verts, faces)",
    k_eig="k",
    op_cache_dir="cache_dir",
    overwrite_cache="another cache_dir, or delete the folder; entries are never out of date",
)
def precompute(
    mesh: MeshLike,
    k: int = 128,
    laplacian: LaplacianKind = "robust",
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    basis: BasisPrecision = "float32",
    device: torch.device | str = "cpu",
    join: JoinRule = "auto",
) -> Operators:
    """Operators of one mesh or point cloud: mass, Laplacian, gradient, frames and k eigenpairs, all on the CPU.

    mesh: a path, a trimesh object, (verts (V, 3), faces (F, 3)), or an object that has them; see `load_mesh`
    k: number of eigenpairs, at least 0. See `eigenbasis` for meshes that have fewer.
    laplacian: "robust" or "cotan"; see `laplacian_and_mass`
    cache_dir: a folder for results. The content of the mesh and the options identify an entry, so data sets and
        processes can share the folder. It can be deleted at any time. Entries are checked when they are read: damage,
        a different key, an older format and indices out of range are found, and the entry is computed again. Reading
        runs no code from an entry. But the checks can't tell whether its numbers are right, and changing a file while
        it is in use can crash a reader. So share a folder only with users whom you trust with your results.
    basis: the precision in which eigenvectors are stored. "float16" and "bfloat16" save a third of the cache at
        k = 128. The returned eigenvectors are float32, rounded to that precision with or without a cache.
    device: the device that computes the eigenbasis, "cpu", "cuda" or "cuda:N"; see `eigenbasis`
    join: whether vertices at the same position are joined before anything is computed. "auto" joins them where this
        connects most of the mesh, as in a triangle soup, in which every face has its own vertices. "always" joins all
        of them, "never" joins none. `joined_vertices` has the exact rule. The operators keep all vertices of the mesh
        and their numbers: joined vertices have equal rows in `evecs` and `frames`, and share their mass. `joined` tells
        which they are.

    Positions are first rounded to float32, so float32 and float64 inputs share an entry. Everything else is computed in
    float64 and rounded once, to float32. The units are those of the positions: `mass` has length², eigenvalues have
    1/length², gradients have 1/length. Vertices keep their numbers. Where neighbors have distant numbers, the sparse
    matrices store their rows in an order along the surface; see `Pattern.with_row_order`.

    Raises MeshError for a mesh that can't be used, and OptionError for a bad option or a device that is not available.
    Warns if the mesh has as many components as eigenpairs, or more: each component has an eigenvalue 0, so there are no
    others then.

    >>> verts = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    >>> faces = [[0, 2, 1], [0, 1, 3], [1, 2, 3], [0, 3, 2]]
    >>> operators = precompute((verts, faces), k=3)
    >>> operators.num_vertices, operators.k
    (4, 3)
    >>> round(float(operators.mass.sum()), 3)  # the surface area, (3 + √3) / 2
    2.366
    """
    options = Options(k, laplacian, basis, join)
    device = usable_device(device)
    checked = round_positions(load_mesh(mesh))
    path = None if cache_dir is None else operators_path(checked, options, cache_dir)
    arrays = None if path is None else read_operators(path, checked, options)
    if arrays is None:
        discretization = discretize(checked, options.laplacian, options.join)  # Laplacian, mass, frames, gradient
        pairs = solve(discretization, options.k, device)
        arrays = complete(discretization, pairs, options.basis)
        if path is not None:
            write_entry(path, arrays)
    _warn_of_components(checked, arrays)
    return _operators(checked, arrays)


def _warn_of_components(mesh: Mesh, arrays: Arrays) -> None:
    """Warn if all eigenvalues are the zeros of components."""
    k = len(arrays["evals"])
    if k == 0 or arrays["evals"][-1] > 0:
        return
    components = _components(arrays)
    if components < max(k, 2):  # a single eigenpair is always the constant
        return
    found = diagnose(mesh)
    hint = ""
    if 0 < found.joined_components < components:
        hint = (
            f'. With join="always", it would have {found.joined_components}: then the {found.coincident_vertices} '
            "vertices at the position of another would be joined"
        )
    warnings.warn(
        f"{mesh.name}: every eigenvalue is 0, so diffusion can only average over components. The mesh has {components} "
        f"components, and k is {k}. Use k > {components}, or a mesh with fewer components{hint}",
        stacklevel=3,
    )


def _components(arrays: Arrays) -> int:
    """The number of connected components, without vertices that no face uses."""
    indptr, indices, order = (arrays[name] for name in ("laplacian_indptr", "laplacian_indices", "row_order"))
    rows = np.repeat(order if len(order) else np.arange(len(indptr) - 1), np.diff(indptr))
    live = arrays["mass"] > 0
    graph = scipy.sparse.csr_matrix((np.ones(len(rows)), (rows, indices)), (len(live), len(live)))
    _, label = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return len(np.unique(label[live]))


def _operators(mesh: Mesh, arrays: Arrays) -> Operators:
    """Operators that share the memory of the arrays of a cache entry."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    order = tensors["row_order"] if len(tensors["row_order"]) > 0 else None

    def sparse(name: str) -> SparseMatrix:
        indptr, indices = tensors[f"{name}_indptr"], tensors[f"{name}_indices"]
        pattern = Pattern(indptr, indices, len(mesh.verts), order, check=False)
        pattern = pattern.with_known(transpose=_transposed(indptr, indices, order))
        # Products and their backward need index arrays. `prepare` computes them here, once, outside of training steps
        # that may be compiled or captured.
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
        joined=tensors["joined"].long() if len(tensors["joined"]) > 0 else None,
    )


def _transposed(
    indptr: torch.Tensor, indices: torch.Tensor, row_order: torch.Tensor | None
) -> tuple[Pattern, torch.Tensor]:
    """`Pattern.transpose` of a square pattern, by SciPy.

    SciPy counts entries on this thread. PyTorch sorts them on several threads, which share the cores with the threads
    of NumPy's BLAS for some milliseconds after an eigenbasis.
    """
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
