"""Operators of one mesh as arrays, from the cache or computed. Worker processes run this without PyTorch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.diagnosis import component_warning
from diffnet.geometry.eigen.problem import MIN_VERTICES
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike
from diffnet.geometry.mesh.normalize import mesh_for_operators
from diffnet.geometry.mesh.objects import NormalsRule
from diffnet.geometry.options import Options, Scale, chosen_scale
from diffnet.geometry.preprocessing.recipe import computed_arrays
from diffnet.geometry.processes import phase
from diffnet.geometry.store.cache import cache_key, entry_path, write_entry
from diffnet.geometry.store.codec import Arrays, aligned_memory, parsed, safetensors_of
from diffnet.geometry.store.entry import all_arrays, read_operators, small_entry, tensor_arrays, with_facts

if TYPE_CHECKING:
    import torch


class Answer:
    """The operators of a mesh, and the warning of `precompute`, if there is one.

    Pickle writes all arrays as one buffer. Arrays that it makes begin anywhere, and `aligned` would copy each of them.
    """

    def __init__(self, content: Arrays | bytes, warning: str | None) -> None:
        self._content, self.warning = content, warning

    def __reduce__(self) -> tuple[Any, ...]:
        return Answer, (safetensors_of(self.arrays, {}), self.warning)

    @property
    def nbytes(self) -> int:
        content = self._content
        return len(content) if isinstance(content, bytes) else sum(each.nbytes for each in content.values())

    @cached_property
    def arrays(self) -> Arrays:
        """See `tensor_arrays`."""
        if not isinstance(self._content, bytes):
            return self._content
        memory = aligned_memory(len(self._content))
        memory[:] = self._content
        return parsed(memory)[0]


class GpuMesh(NamedTuple):
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
    normalize: bool | Scale
    normals: NormalsRule | None = None

    def read(self, source: MeshLike) -> Mesh:
        """The mesh at the positions that operators are computed from. Raises MeshError for an unusable source."""
        with phase("read"):
            rule = chosen_scale(self.normalize, self.options.operators)
            return mesh_for_operators(source, self.cache_dir, normalize=rule, normals=self.normals)


def compute_entry(source: MeshLike, job: CacheJob, *, keep: bool, for_gpu: bool) -> Answer | GpuMesh | str | None:
    """Compute and store the operators of a mesh, unless the cache has them. Returns an error message for a bad mesh.

    keep: whether to return the operators, too
    for_gpu: whether a mesh that suits a GPU is returned if the cache doesn't have its operators
    """
    try:
        mesh = job.read(source)
        if for_gpu and suits_gpu(mesh, job.options):
            path, arrays = find_operators(mesh, job.options, job.cache_dir)
            if arrays is None:
                mesh.turned_faces  # noqa: B018  the mesh remembers them, so this process finds them and not the caller
                return GpuMesh(mesh, path)
        else:
            arrays = stored_arrays(mesh, job.options, job.cache_dir)
        if not keep:
            return None
        warning = component_warning(mesh, arrays, job.options)
        return Answer(tensor_arrays(with_facts(arrays, warning is not None), mesh.faces), warning)
    except MeshError as e:
        return str(e)
    except MemoryError:
        return f"{source_name(source)}: preprocessing it takes more memory than there is"


def stored_arrays(
    mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str] | None, device: torch.device | str = "cpu"
) -> Arrays:
    """All arrays of the operators of a mesh. If the cache doesn't have them, they are computed and written.

    Raises the errors of `computed_arrays`.
    """
    path, arrays = find_operators(mesh, options, cache_dir)
    if arrays is None:
        arrays = computed_arrays(mesh, options, device)
        if path is not None:
            with phase("write"):
                write_entry(path, entry_of(mesh, arrays, options))
    return arrays


def find_operators(
    mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str] | None
) -> tuple[Path | None, Arrays | None]:
    """The file of the entry of a mesh, and all arrays of its operators; None as in `read_operators`."""
    if cache_dir is None:
        return None, None
    with phase("check"):
        path = operators_path(mesh, options, cache_dir)
        entry = read_operators(path, len(mesh.verts), options)
        return path, None if entry is None else all_arrays(entry, mesh.verts)


def entry_of(mesh: Mesh, arrays: Arrays, options: Options) -> Arrays:
    """The content of the entry that holds these arrays of the operators of a mesh."""
    entry = with_facts(arrays, component_warning(mesh, arrays, options) is not None)
    # Restoring arrays takes more time than reading them, so this is for users who want small entries.
    return entry if options.basis == "float32" else small_entry(entry, mesh.verts)


def operators_path(mesh: Mesh, options: Options, cache_dir: str | os.PathLike[str]) -> Path:
    """The file of the entry of a mesh, see `mesh_for_operators`. The file need not exist."""
    content: Arrays = {"verts": mesh.verts.astype(np.float32), "faces": mesh.faces.astype(np.int32)}
    if mesh.normals is not None:
        content["normals"] = mesh.normals.astype(np.float32)
    # Earlier versions never turned a face.
    more = {} if mesh.is_point_cloud or options.operators == "original" else {"turned_faces": True}
    return entry_path(cache_dir, cache_key(content, **asdict(options), **more), "operators")


def entry_name(mesh: Mesh, options: Options) -> tuple[str, NDArray[np.float64]]:
    """The name of the entry that `precompute` writes for a mesh, and the positions (V, 3) that it is computed from.

    mesh: at normalized positions
    """
    used = mesh_for_operators(mesh)
    return operators_path(used, options, "").name.partition(".")[0], used.verts


def suits_gpu(mesh: Mesh, options: Options) -> bool:
    """Whether a GPU computes the operators of a mesh faster than a core of the CPU, and can do so."""
    can = options.operators == "diffnet" and not mesh.is_point_cloud and mesh.normals is None
    return can and len(mesh.verts) >= MIN_VERTICES


def source_name(source: MeshLike) -> str:
    """A name for messages."""
    if isinstance(source, Mesh):
        return source.name
    return str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
