"""Filling the cache with the operators of one mesh. Worker processes run these functions, without PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from diffnet.geometry.eigen.problem import MIN_VERTICES
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.mesh.normals import NormalsRule
from diffnet.geometry.phases import phase
from diffnet.geometry.preprocessing.entry import find_operators, operators_path, stored_arrays
from diffnet.geometry.preprocessing.options import Options, ScaleRule

T = TypeVar("T")
Unsolved: TypeAlias = "tuple[Path, Mesh]"  # the path of an entry, and the mesh that it is computed from


@dataclass(frozen=True)
class CacheJob:
    """The options that decide the cache entry of each mesh, and the folder of the cache.

    normalize: whether and how positions are normalized before the operators are computed; see `precompute`
    normals: see `precompute_all`
    """

    options: Options
    cache_dir: str | os.PathLike[str]
    normalize: bool | ScaleRule
    normals: NormalsRule | None = None

    def read(self, source: MeshLike) -> Mesh:
        """The mesh at the positions that operators are computed from. Raises MeshError for an unusable source."""
        with phase("read"):
            return mesh_for_operators(source, self.cache_dir, normalize=self.normalize, normals=self.normals)


def has_entry(source: MeshLike, job: CacheJob) -> bool:
    """Whether the cache has an entry for this mesh. The content of the entry isn't checked."""
    try:
        return operators_path(job.read(source), job.options, job.cache_dir).is_file()
    except MeshError:
        return False  # `fill_entry` reports the error


def fill_entry(source: MeshLike, job: CacheJob) -> str | None:
    """Compute and store the operators of a mesh unless the cache has them. Returns an error message or None."""

    def fill() -> None:
        stored_arrays(job.read(source), job.options, job.cache_dir)

    return _error_or_result(fill, source)


def fill_unless_for_gpu(source: MeshLike, job: CacheJob) -> Unsolved | str | None:
    """As `fill_entry`, but a mesh that suits a GPU is returned if the cache doesn't have its operators."""

    def fill() -> Unsolved | None:
        mesh = job.read(source)
        if not suits_gpu(mesh, job.options):
            stored_arrays(mesh, job.options, job.cache_dir)
            return None
        path, arrays = find_operators(mesh, job.options, job.cache_dir)
        return (path, mesh) if arrays is None else None

    return _error_or_result(fill, source)


def suits_gpu(mesh: Mesh, options: Options) -> bool:
    """Whether a GPU computes the operators of a mesh faster than a core of the CPU, and can do so."""
    can = options.operators == "diffnet" and not mesh.is_point_cloud and mesh.normals is None
    return can and len(mesh.verts) >= MIN_VERTICES


def source_name(source: MeshLike) -> str:
    """A name for messages."""
    if isinstance(source, Mesh):
        return source.name
    return str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__


def _error_or_result(work: Callable[[], T], source: MeshLike) -> T | str:
    try:
        return work()
    except MeshError as e:
        return str(e)
    except MemoryError:
        return f"{source_name(source)}: preprocessing it takes more memory than there is"
