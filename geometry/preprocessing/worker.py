"""Filling the cache with the operators of one mesh. Worker processes run these functions, without PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from diffnet.geometry.diagnosis import component_warning
from diffnet.geometry.eigen.problem import MIN_VERTICES
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.mesh.objects import NormalsRule
from diffnet.geometry.phases import phase
from diffnet.geometry.preprocessing.entry import find_operators, stored_arrays
from diffnet.geometry.preprocessing.flat import Flat, flat, tensor_arrays
from diffnet.geometry.preprocessing.options import Options, ScaleRule, chosen_scale

T = TypeVar("T")


class Known(NamedTuple):
    """The operators of a mesh, see `tensor_arrays`, and the warning of `precompute`, if there is one."""

    operators: Flat
    warning: str | None


class Unsolved(NamedTuple):
    """A mesh whose operators a GPU should compute, and the path of their cache entry, if there is a cache."""

    mesh: Mesh
    path: Path | None


@dataclass(frozen=True)
class CacheJob:
    """The options that decide the cache entry of each mesh, and the folder of the cache, if there is one.

    normalize: whether and how positions are normalized before the operators are computed; see `precompute`
    normals: see `precompute_all`
    """

    options: Options
    cache_dir: str | os.PathLike[str] | None
    normalize: bool | ScaleRule
    normals: NormalsRule | None = None

    def read(self, source: MeshLike) -> Mesh:
        """The mesh at the positions that operators are computed from. Raises MeshError for an unusable source."""
        with phase("read"):
            rule = chosen_scale(self.normalize, self.options.operators)
            return mesh_for_operators(source, self.cache_dir, normalize=rule, normals=self.normals)


def compute_entry(source: MeshLike, job: CacheJob, *, keep: bool, for_gpu: bool) -> Known | Unsolved | str | None:
    """Compute and store the operators of a mesh, unless the cache has them. Returns an error message for a bad mesh.

    keep: whether to return the operators, too
    for_gpu: whether a mesh that suits a GPU is returned if the cache doesn't have its operators
    """

    def compute() -> Known | Unsolved | None:
        mesh = job.read(source)
        if for_gpu and suits_gpu(mesh, job.options):
            path, arrays = (None, None) if job.cache_dir is None else find_operators(mesh, job.options, job.cache_dir)
            if arrays is None:
                return Unsolved(mesh, path)
        else:
            arrays = stored_arrays(mesh, job.options, job.cache_dir)
        if not keep:
            return None
        return Known(flat(tensor_arrays(arrays, mesh.faces)), component_warning(mesh, arrays, job.options))

    return _error_or_result(compute, source)


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
