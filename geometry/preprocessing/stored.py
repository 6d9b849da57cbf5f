"""Operators of meshes that have cache entries, for `precompute_all`.

When a process reads the operators of a file again, it knows the entries, and neither parses nor hashes the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from diffnet.geometry.cache import has_entry
from diffnet.geometry.diagnosis import component_warning
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, load_parsed, parsed_entry, parsed_mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.phases import phase
from diffnet.geometry.preprocessing.assembly import fields_of
from diffnet.geometry.preprocessing.entry import operators_path, read_operators
from diffnet.geometry.preprocessing.known_entry import have_even_rows, operators_at
from diffnet.geometry.preprocessing.one import operators_from, operators_of
from diffnet.geometry.preprocessing.packing import unpacked
from diffnet.geometry.preprocessing.read_again import read_again
from diffnet.geometry.preprocessing.worker import CacheJob

Reader: TypeAlias = Callable[[torch.device], Operators]  # reads operators to a device

# The entries of operators that this process has read, and their numbers of vertices and of faces. They are float32,
# have even rows and symmetric patterns, and `precompute` doesn't warn of them.
_known: dict[tuple[Any, ...], tuple[Path, tuple[int, int]]] = {}  # by the entry of the parsed file and options


def stored_operators(source: MeshLike, job: CacheJob) -> Reader | None:
    """A function that reads the operators of a mesh, if the cache has an entry for it. Its content is not checked yet.

    If the entry can't be used, the function computes the operators.
    """
    if job.cache_dir is None:
        return None
    paths = (str, os.PathLike)  # `job.read` raises the error for a folder of another type
    path = Path(source) if isinstance(source, paths) and isinstance(job.cache_dir, paths) else None
    parsed = None if path is None else parsed_entry(path, job.cache_dir)
    if parsed is not None and (known := _known.get(_key(parsed, job))) is not None and has_entry(known[0]):
        return partial(_read_again, source, parsed, *known, job)
    try:
        if path is not None:
            with phase("read"):
                source, parsed = load_parsed(path, job.cache_dir)
        mesh = job.read(source)
    except MeshError:
        return None  # `compute_entry` reports the error
    entry = operators_path(mesh, job.options, job.cache_dir)
    return partial(_read_first, mesh, parsed, entry, job) if has_entry(entry) else None


def _key(parsed: Path, job: CacheJob) -> tuple[Any, ...]:
    return parsed, job.normalize, job.normals, *astuple(job.options)


def _read_first(mesh: Mesh, parsed: Path | None, path: Path, job: CacheJob, device: torch.device) -> Operators:
    options = job.options
    with phase("check"):
        entry = read_operators(path, len(mesh.verts), options)
    if entry is None:
        return operators_of(mesh, options, job.cache_dir, device)
    arrays = unpacked(entry, mesh.verts)
    operators = operators_from(mesh, arrays, options, torch.device("cpu"))
    patterns = operators.laplacian.pattern, operators.gradient.pattern
    if (
        parsed is not None
        and options.basis == "float32"
        and have_even_rows(operators)
        and all(pattern.transpose[0].stored_indices is pattern.stored_indices for pattern in patterns)
        and component_warning(mesh, arrays, options) is None
    ):
        _known[_key(parsed, job)] = path, (len(mesh.verts), len(mesh.faces))
    return operators.to(device, non_blocking=True)  # as in `operators_from`


def _read_again(
    source: MeshLike, parsed: Path, path: Path, counts: tuple[int, int], job: CacheJob, device: torch.device
) -> Operators:
    if device.type == "cpu":
        mesh = parsed_mesh(parsed, "")
        if mesh is not None and (found := operators_at(path, mesh.faces, counts[0], job.options)) is not None:
            return found
    else:
        entries = read_again({parsed: ("faces",), path: None}, counts)
        if entries is not None:
            return Operators(**fields_of(entries.to(device, non_blocking=True), even=True))
    return operators_of(job.read(source), job.options, job.cache_dir, device)
