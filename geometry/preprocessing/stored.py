"""Operators of meshes that have cache entries, for `precompute_all`.

When a process reads the operators of a file again, it knows the entries, and neither parses nor hashes the file.
"""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_parsed, parsed_entry, parsed_mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.phases import phase
from diffnet.geometry.preprocessing.one import operators_from, operators_of
from diffnet.geometry.preprocessing.worker import CacheJob, operators_path
from diffnet.geometry.store.cache import has_entry
from diffnet.geometry.store.entry import read_operators
from diffnet.geometry.store.halves import all_arrays
from diffnet.geometry.store.reading import has_even_rows, operators_at, read_again

# The entries of operators that this process has read, if they are float32 and the mesh tells no more.
_paths: dict[tuple[Any, ...], Path] = {}  # by the entry of the parsed file and options


class Reader(NamedTuple):
    """Reads the operators of a mesh from their entry, which is not checked yet.

    path: of the entry
    parsed: of the entry of the parsed file, or None for another mesh
    mesh: see `mesh_for_operators`; None if `_paths` has the entry, so that the mesh need not be read
    """

    source: MeshLike
    job: CacheJob
    path: Path
    parsed: Path | None
    mesh: Mesh | None

    def read(self, device: torch.device) -> Operators:
        """The operators on a device. They are computed if the entry can't be used."""
        operators = None
        if self.mesh is None and self.parsed is not None:
            operators = self._read_again(self.parsed, device)
        return self._read_first(device) if operators is None else operators

    def _read_again(self, parsed: Path, device: torch.device) -> Operators | None:
        if device.type != "cpu":
            entries = read_again([parsed, self.path])
            return None if entries is None else entries.operators(device)
        mesh = parsed_mesh(parsed, "")
        return None if mesh is None else operators_at(self.path, mesh.faces, len(mesh.verts), self.job.options)

    def _read_first(self, device: torch.device) -> Operators:
        options = self.job.options
        mesh = self.job.read(self.source) if self.mesh is None else self.mesh
        with phase("check"):
            entry = None if self.mesh is None else read_operators(self.path, len(mesh.verts), options)
        if entry is None:
            return operators_of(mesh, options, self.job.cache_dir, device)
        arrays = all_arrays(entry, mesh.verts)
        if (
            self.parsed is not None
            and options.basis == "float32"
            and has_even_rows(arrays)
            and not arrays["facts"][2:].any()
        ):
            _paths[_key(self.parsed, self.job)] = self.path
        return operators_from(mesh, arrays, options, device)


def stored_operators(source: MeshLike, job: CacheJob) -> Reader | None:
    """The reader of the operators of a mesh, if the cache has an entry for it."""
    if job.cache_dir is None:
        return None
    paths = (str, os.PathLike)  # `job.read` raises the error for a folder of another type
    path = Path(source) if isinstance(source, paths) and isinstance(job.cache_dir, paths) else None
    parsed = None if path is None else parsed_entry(path, job.cache_dir)
    if parsed is not None and (entry := _paths.get(_key(parsed, job))) is not None and has_entry(entry):
        return Reader(source, job, entry, parsed, None)
    content = source
    try:
        if path is not None:
            with phase("read"):
                content, parsed = load_parsed(path, job.cache_dir)
        mesh = job.read(content)
    except MeshError:
        return None  # `compute_entry` reports the error
    entry = operators_path(mesh, job.options, job.cache_dir)
    return Reader(source, job, entry, parsed, mesh) if has_entry(entry) else None


def _key(parsed: Path, job: CacheJob) -> tuple[Any, ...]:
    return parsed, job.normalize, job.normals, *astuple(job.options)
