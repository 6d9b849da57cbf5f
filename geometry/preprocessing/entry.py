"""What the cache holds of the operators of a mesh, and how it is computed. All in NumPy, see `cache`."""

from __future__ import annotations

import operator
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from diffnet.geometry.cache import Arrays, cache_key, entry_path, read_entry, write_entry
from diffnet.geometry.discretize.frames import tangent_frames
from diffnet.geometry.discretize.gradient import gradient_values, one_ring
from diffnet.geometry.discretize.laplacian import LAPLACIANS, LaplacianKind, laplacian_and_mass, usable_faces
from diffnet.geometry.discretize.vertex_order import order_unless_near
from diffnet.geometry.eigen.solve import eigenbasis
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_mesh

if TYPE_CHECKING:
    import torch

BasisPrecision: TypeAlias = Literal["float32", "float16", "bfloat16"]
BASIS_PRECISIONS: tuple[BasisPrecision, ...] = get_args(BasisPrecision)
# NumPy has no bfloat16; those are held by their bits.
_BASIS_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


@dataclass
class Options:
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
                raise OptionError(f"{name} should be one of {', '.join(known)}, got {value!r}")
        if self.k < 0:
            raise OptionError(f"k should be at least 0, got {self.k}")
        self.k = operator.index(self.k)


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
    return has_entry(mesh, Options(k, laplacian, basis), cache_dir)


def has_entry(mesh: MeshLike, options: Options, cache_dir: str | os.PathLike[str]) -> bool:
    """See `is_cached`."""
    return _path(_rounded(load_mesh(mesh)), options, cache_dir).is_file()


def found_or_computed(
    mesh: MeshLike,
    options: Options,
    cache_dir: str | os.PathLike[str] | None,
    device: torch.device | str = "cpu",
) -> tuple[Mesh, Arrays]:
    """See `precompute`: the mesh as it is used, and what an entry has of it."""
    checked = _rounded(load_mesh(mesh))
    path = None if cache_dir is None else _path(checked, options, cache_dir)
    arrays = None if path is None else _cached(path, checked, options)
    if arrays is None:
        unsolved = _unsolved(checked, options)
        try:
            pairs = eigenbasis(unsolved.laplacian, unsolved.mass, options.k, device)
        except RuntimeError as e:
            raise MeshError(f"{checked.name}: {e}") from e
        arrays = unsolved.solved(*pairs)
        if path is not None:
            write_entry(path, arrays)
    return checked, arrays


def unsolved_entry(mesh: MeshLike, options: Options, cache_dir: str | os.PathLike[str]) -> tuple[Path, Unsolved] | None:
    """What has to be done before eigenpairs are needed, and the path of the entry; None where the cache has it.

    Raises MeshError for a mesh that can't be used.
    """
    checked = _rounded(load_mesh(mesh))
    path = _path(checked, options, cache_dir)
    return None if _cached(path, checked, options) is not None else (path, _unsolved(checked, options))


@dataclass
class Unsolved:
    """What an entry of the cache has of a mesh, but for eigenpairs, and the Laplacian and mass that have these."""

    name: str
    options: Options
    arrays: Arrays
    laplacian: scipy.sparse.csr_matrix
    mass: NDArray[np.float64]

    def solved(self, evals: NDArray[np.float64], evecs: NDArray[np.float64]) -> Arrays:
        """Raises MeshError where single precision doesn't hold them."""
        arrays = self.arrays | _in_single_precision(self.name, {"evals": evals, "evecs": evecs})
        # Small components have large eigenvectors, which half precision would not hold.
        scale = np.ones(self.options.k, np.float32)
        if self.options.basis != "float32":
            largest = np.abs(arrays["evecs"]).max(0)
            scale = np.where(largest > 0, largest, np.float32(1))
            arrays["evecs"] = _in_half_precision(arrays["evecs"] / scale, self.options.basis)
        return arrays | {"evecs_scale": scale}


def _path(mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str]) -> Path:
    content: Arrays = {"verts": mesh.verts.astype(np.float32), "faces": mesh.faces}
    return entry_path(cache_dir, cache_key(content, **asdict(options)), "operators")


def _cached(path: Path, mesh: Mesh, options: Options) -> Arrays | None:
    """The arrays of a cache entry, if they are what such a mesh has."""
    arrays = read_entry(path)
    if arrays is None:
        return None
    vertices, k = len(mesh.verts), options.k

    def count(name: str) -> int:
        return arrays[name].size if name in arrays else 0

    entries = [count(f"{name}_indices") for name in ("laplacian", "gradient")]
    expected = {
        "mass": ("float32", (vertices,)),
        "evals": ("float32", (k,)),
        "evecs": (_BASIS_DTYPES[options.basis], (vertices, k)),
        "evecs_scale": ("float32", (k,)),
        "frames": ("float32", (vertices, 3, 3)),
        "laplacian": ("float32", (entries[0],)),
        "laplacian_indptr": ("int32", (vertices + 1,)),
        "laplacian_indices": ("int32", (entries[0],)),
        "gradient": ("float32", (2, entries[1])),
        "gradient_indptr": ("int32", (vertices + 1,)),
        "gradient_indices": ("int32", (entries[1],)),
        "row_order": ("int32", (vertices if count("row_order") else 0,)),
    }
    if {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == expected:
        return arrays
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


def _unsolved(mesh: Mesh, options: Options) -> Unsolved:
    laplacian, mass = laplacian_and_mass(mesh, options.laplacian)
    frames = tangent_frames(mesh)
    pattern = one_ring(usable_faces(mesh), len(mesh.verts)) if not mesh.is_point_cloud else _with_diagonal(laplacian)
    gradient = gradient_values(mesh.verts, frames, pattern)
    arrays = _in_single_precision(
        mesh.name, {"mass": mass, "laplacian": laplacian.data, "gradient": gradient, "frames": frames}
    )
    order = order_unless_near(pattern)
    arrays["row_order"] = np.zeros(0, np.int32) if order is None else order.astype(np.int32)
    for name, matrix in (("laplacian", laplacian), ("gradient", pattern)):
        if order is not None:
            numbered = scipy.sparse.csr_matrix((np.arange(matrix.nnz), matrix.indices, matrix.indptr), matrix.shape)
            matrix = numbered[order]
            arrays[name] = np.ascontiguousarray(arrays[name][..., matrix.data])
        arrays[f"{name}_indptr"] = matrix.indptr.astype(np.int32)
        arrays[f"{name}_indices"] = matrix.indices.astype(np.int32)
    return Unsolved(mesh.name, options, arrays, laplacian, mass)


def _in_single_precision(name: str, arrays: dict[str, NDArray[np.float64]]) -> Arrays:
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


def _in_half_precision(values: NDArray[np.float32], precision: BasisPrecision) -> NDArray[Any]:
    if precision == "float16":
        return values.astype(np.float16)
    # The upper half of the bits, rounded to nearest, and to even where that is two.
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
