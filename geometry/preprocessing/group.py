"""Operators of a group of meshes, computed together on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from diffnet.geometry.eigen.gpu.batches import packed_eigenbases
from diffnet.geometry.eigen.gpu.lanczos import Map
from diffnet.geometry.eigen.gpu.packed import PackedProblem
from diffnet.geometry.errors import ConvergenceError, MeshError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.options import Options
from diffnet.geometry.phases import phase
from diffnet.geometry.preprocessing.on_device import PackedDiscretization, discretize_on, entry_arrays
from diffnet.geometry.preprocessing.recipe import with_pairs
from diffnet.geometry.store.assembly import assembled_fields
from diffnet.geometry.store.codec import Arrays
from diffnet.geometry.store.transfer import to_host

MAX_SINGLE = float(np.finfo(np.float32).max)


class Computed(NamedTuple):
    """The operators of a mesh, on the device, and the arrays of its cache entry, or None if they weren't asked for."""

    operators: Operators
    arrays: Arrays | None


def compute_on(
    device: torch.device, meshes: Sequence[Mesh], options: Options, on_cores: Map, *, arrays: bool
) -> list[Computed | None]:
    """The operators of each mesh, or None for a mesh that is left to the CPU, such as one that can't be used.

    meshes: see `mesh_for_operators`
    on_cores: `map`, or the `map` of a thread pool, for the work that is left to the CPU
    arrays: whether to return the arrays of cache entries, too

    The operators are views of tensors of the whole group. All meshes are left to the CPU if the device has too little
    memory for the group, or if one of them can't be solved for.
    """
    results: list[Computed | None] = [None] * len(meshes)
    try:
        with phase("assemble"):
            packed, served = discretize_on(device, meshes, options)
        if packed is not None:
            computed = _solve(packed, [meshes[i] for i in served], options, on_cores, arrays)
            for position, result in zip(served, computed, strict=True):
                results[position] = result
    except (ConvergenceError, torch.OutOfMemoryError):
        pass  # the meshes that have no result yet are computed alone, which may take longer and less memory
    return results


def _solve(
    packed: PackedDiscretization, meshes: Sequence[Mesh], options: Options, on_cores: Map, arrays: bool
) -> list[Computed | None]:
    operators, laplacian, lengths = packed.operators, packed.laplacian, tuple(len(mesh.verts) for mesh in meshes)
    rows = torch.arange(len(packed.mass), device=operators.device).repeat_interleave(laplacian.indptr.diff())
    problem = PackedProblem(lengths, rows, laplacian.indices, laplacian.values, packed.mass, packed.positions)
    with phase("solve"):
        evals, evecs = packed_eigenbases(problem, options.k, on_cores)
    halves = options.basis != "float32"
    evecs = evecs.float()
    entries = entry_arrays(packed) if arrays or halves else None
    vectors = np.split(to_host({"evecs": evecs})["evecs"], np.cumsum(lengths)[:-1]) if entries else []
    values = torch.from_numpy(np.stack(evals).astype(np.float32)).to(operators.device)
    operators = replace(operators, evals=values, evecs=evecs)
    for matrix in (operators.laplacian, operators.gradient):
        matrix.pattern.prepare()  # for all parts at once
    parts = operators.with_lengths(lengths, [len(mesh.faces) for mesh in meshes]).split()

    def result(i: int) -> Computed | None:
        if options.k > 0 and not 0 < evals[i][-1] < MAX_SINGLE:
            return None  # the CPU path warns of meshes that have only components, and refuses those that are tiny
        if entries is None:
            return Computed(parts[i], None)
        try:
            own = with_pairs(meshes[i].name, entries[i], (evals[i], vectors[i]), options.basis)
        except MeshError:
            return None
        if halves:
            return Computed(Operators(**assembled_fields(own, meshes[i].faces)).to(operators.device), own)
        return Computed(parts[i], own)

    return [result(i) for i in range(len(meshes))]
