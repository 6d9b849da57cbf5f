"""From a mesh or a point cloud to `Operators`."""

from __future__ import annotations

import operator
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray

from diffnet.geometry.cache import Tensors, cache_key, entry_path, read_entry, write_entry
from diffnet.geometry.eigenbasis import eigenbasis
from diffnet.geometry.errors import MeshError
from diffnet.geometry.frames import tangent_frames
from diffnet.geometry.gradient import gradient_values, one_ring
from diffnet.geometry.laplacian import LAPLACIANS, LaplacianKind, laplacian_and_mass, usable_faces
from diffnet.geometry.mesh import Mesh, MeshLike, load_mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.vertex_order import order_unless_near
from diffnet.ops import Pattern, SparseMatrix

BasisPrecision: TypeAlias = Literal["float32", "float16", "bfloat16"]
BASIS_PRECISIONS: tuple[BasisPrecision, ...] = get_args(BasisPrecision)


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
    options = _Options(k, laplacian, basis)
    checked = _rounded(load_mesh(mesh))
    path = None if cache_dir is None else _entry(checked, options, cache_dir)
    tensors = None if path is None else _cached(path, checked, options)
    if tensors is None:
        unsolved = _unsolved(checked, options)
        try:
            pairs = eigenbasis(unsolved.laplacian, unsolved.mass, k, device)
        except RuntimeError as e:
            raise MeshError(f"{checked.name}: {e}") from e
        tensors = unsolved.solved(*pairs)
        if path is not None:
            write_entry(path, tensors)
    return _assemble(tensors, checked)


def is_cached(
    mesh: MeshLike,
    k: int,
    laplacian: LaplacianKind,
    cache_dir: str | os.PathLike[str],
    *,
    basis: BasisPrecision = "float32",
) -> bool:
    """Whether there is an entry for this mesh; its content isn't looked at.

    Raises MeshError for a mesh that can't be read.
    """
    return _entry(_rounded(load_mesh(mesh)), _Options(k, laplacian, basis), cache_dir).is_file()


@dataclass
class _Options:
    """What decides the operators of a mesh; checked."""

    k: int
    laplacian: LaplacianKind
    basis: BasisPrecision

    def __post_init__(self) -> None:
        for name, value, known in (
            ("laplacian", self.laplacian, LAPLACIANS),
            ("basis", self.basis, BASIS_PRECISIONS),
        ):
            if value not in known:
                raise ValueError(f"{name} should be one of {', '.join(known)}, got {value!r}")
        if self.k < 0:
            raise ValueError(f"k should be at least 0, got {self.k}")
        self.k = operator.index(self.k)


def _entry(mesh: Mesh, options: _Options, cache_dir: str | os.PathLike[str]) -> Path:
    content: dict[str, NDArray[Any]] = {"verts": mesh.verts.astype(np.float32), "faces": mesh.faces}
    return entry_path(cache_dir, cache_key(content, **asdict(options)), "operators")


def _cached(path: Path, mesh: Mesh, options: _Options) -> Tensors | None:
    """The tensors of a cache entry, if they are what `_compute` gives for such a mesh."""
    tensors = read_entry(path)
    if tensors is None:
        return None
    vertices, k = len(mesh.verts), options.k

    def count(name: str) -> int:
        return tensors[name].numel() if name in tensors else 0

    entries = [count(f"{name}_indices") for name in ("laplacian", "gradient")]
    expected = {
        "mass": (torch.float32, (vertices,)),
        "evals": (torch.float32, (k,)),
        "evecs": (getattr(torch, options.basis), (vertices, k)),
        "evecs_scale": (torch.float32, (k,)),
        "frames": (torch.float32, (vertices, 3, 3)),
        "laplacian": (torch.float32, (entries[0],)),
        "laplacian_indptr": (torch.int32, (vertices + 1,)),
        "laplacian_indices": (torch.int32, (entries[0],)),
        "gradient": (torch.float32, (2, entries[1])),
        "gradient_indptr": (torch.int32, (vertices + 1,)),
        "gradient_indices": (torch.int32, (entries[1],)),
        "row_order": (torch.int32, (vertices if count("row_order") else 0,)),
    }
    if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == expected:
        return tensors
    warnings.warn(f"cache entry {path} holds other arrays than it should and is computed again", stacklevel=3)
    return None


def _rounded(mesh: Mesh) -> Mesh:
    """The mesh at float32 positions (held as float64), moved to the origin first where it lies far away from it."""
    used = np.full(len(mesh.verts), mesh.is_point_cloud)
    used[mesh.faces] = True
    surface = mesh.verts[used]
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


@dataclass
class Unsolved:
    """What an entry of the cache has of a mesh, but for eigenpairs, and the Laplacian and mass that have these."""

    name: str
    options: _Options
    arrays: dict[str, NDArray[Any]]
    laplacian: scipy.sparse.csr_matrix
    mass: NDArray[np.float64]

    def solved(self, evals: NDArray[np.float64], evecs: NDArray[np.float64]) -> Tensors:
        """Raises MeshError where single precision doesn't hold them."""
        arrays = self.arrays | _in_single_precision(self.name, {"evals": evals, "evecs": evecs})
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        # Small components have large eigenvectors, which half precision would not hold.
        options = self.options
        scale = tensors["evecs"].abs().amax(0) if options.basis != "float32" else torch.ones(options.k)
        tensors["evecs_scale"] = torch.where(scale > 0, scale, 1.0)
        tensors["evecs"] = (tensors["evecs"] / tensors["evecs_scale"]).to(getattr(torch, options.basis))
        return tensors


def unsolved_entry(
    mesh: MeshLike,
    k: int,
    laplacian: LaplacianKind,
    cache_dir: str | os.PathLike[str],
    *,
    basis: BasisPrecision = "float32",
) -> tuple[Path, Unsolved] | None:
    """What `precompute` does before it needs eigenpairs, and the path of the entry; None where the cache has it.

    Raises MeshError for a mesh that can't be used.
    """
    options = _Options(k, laplacian, basis)
    checked = _rounded(load_mesh(mesh))
    path = _entry(checked, options, cache_dir)
    return None if _cached(path, checked, options) is not None else (path, _unsolved(checked, options))


def _unsolved(mesh: Mesh, options: _Options) -> Unsolved:
    laplacian, mass = laplacian_and_mass(mesh, options.laplacian)
    frames = tangent_frames(mesh)
    pattern = one_ring(usable_faces(mesh), len(mesh.verts)) if not mesh.is_point_cloud else _with_diagonal(laplacian)
    gradient = gradient_values(mesh.verts, frames, pattern)
    arrays = _in_single_precision(
        mesh.name, {"mass": mass, "laplacian": laplacian.data, "gradient": gradient, "frames": frames}
    )
    found = order_unless_near(pattern)
    order = None if found is None else torch.from_numpy(found.astype(np.int32))
    arrays["row_order"] = np.zeros(0, np.int32) if order is None else order.numpy()
    for name, matrix in (("laplacian", laplacian), ("gradient", pattern)):
        indptr, indices = (torch.from_numpy(a.astype(np.int32)) for a in (matrix.indptr, matrix.indices))
        own = SparseMatrix(Pattern(indptr, indices, len(mass), check=False), torch.from_numpy(arrays[name]))
        stored = own.with_row_order(order)
        arrays[name] = stored.values.numpy()
        arrays[f"{name}_indptr"] = stored.pattern.indptr.numpy()
        arrays[f"{name}_indices"] = stored.pattern.indices.numpy()
    return Unsolved(mesh.name, options, arrays, laplacian, mass)


def _in_single_precision(name: str, arrays: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[Any]]:
    with np.errstate(over="ignore"):
        rounded = {which: np.ascontiguousarray(array, np.float32) for which, array in arrays.items()}
    for which, array in rounded.items():
        if not np.isfinite(array).all():
            raise MeshError(f"{name}: {which} has entries that are not finite in single precision")
    return rounded


def _with_diagonal(laplacian: scipy.sparse.csr_matrix) -> scipy.sparse.csr_matrix:
    """The pattern of a point cloud's Laplacian: its local triangulations are the only neighbours a cloud has."""
    pattern = abs(laplacian) + scipy.sparse.eye(laplacian.shape[0], format="csr")
    pattern.sort_indices()
    return scipy.sparse.csr_matrix(pattern)


def _assemble(tensors: Tensors, mesh: Mesh) -> Operators:
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
