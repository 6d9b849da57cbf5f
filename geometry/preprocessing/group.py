"""Operators of groups of meshes that a GPU computes while worker processes do the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Semaphore
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from diffnet.geometry.diagnosis import component_warning
from diffnet.geometry.eigen.gpu.batches import (
    BATCHES_AT_ONCE,
    batch_stream,
    load_library,
    packed_eigenbases,
    vertex_bytes,
)
from diffnet.geometry.eigen.gpu.lanczos import Map
from diffnet.geometry.errors import ConvergenceError, MeshError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.operators import Operators
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing.packed import Discretized, discretize_on, entry_arrays
from diffnet.geometry.preprocessing.recipe import computed_arrays, with_pairs
from diffnet.geometry.preprocessing.worker import GpuMesh
from diffnet.geometry.processes import phase
from diffnet.geometry.store.assembly import assembled_fields
from diffnet.geometry.store.codec import Arrays
from diffnet.geometry.store.transfer import to_host
from diffnet.ops.common.memo import remember

MAX_SINGLE = float(np.finfo(np.float32).max)
POSITIONS = 32  # consecutive meshes whose operators are computed together
MAX_WAITING = 4  # groups of meshes; with more, the worker processes wait
Waiting: TypeAlias = tuple[int, GpuMesh]  # the position of a mesh, and the mesh
Finished: TypeAlias = Callable[[int, GpuMesh, "Computed | str"], None]


class Computed(NamedTuple):
    """The operators of a mesh, on the device, and the arrays of its cache entry, or None if they weren't asked for."""

    operators: Operators
    arrays: Arrays | None


def compute_on(
    device: torch.device, meshes: Sequence[Mesh], options: Options, on_cores: Map, *, arrays: bool
) -> list[Computed | None]:
    """The operators of each mesh, or None for a mesh that is left to the CPU, such as one that can't be used.

    meshes: see `mesh_for_operators`
    arrays: whether to return the arrays of cache entries, too

    The operators are views of tensors of the whole group. All meshes are left to the CPU if the device has too little
    memory for the group, or if one of them can't be solved for.
    """
    results: list[Computed | None] = [None] * len(meshes)
    try:
        with phase("assemble"):
            discretized = discretize_on(device, meshes, options)
        if discretized is not None:
            computed = _solve(discretized, [meshes[i] for i in discretized.places], options, on_cores, arrays)
            for position, result in zip(discretized.places, computed, strict=True):
                results[position] = result
    except (ConvergenceError, torch.OutOfMemoryError):
        pass  # the meshes that have no result yet are computed alone, which may take longer and less memory
    return results


def _solve(
    discretized: Discretized, meshes: Sequence[Mesh], options: Options, on_cores: Map, arrays: bool
) -> list[Computed | None]:
    _, operators, problem = discretized
    lengths = problem.lengths
    with phase("solve"):
        evals, evecs = packed_eigenbases(problem, options.k, on_cores)
    halves = options.basis != "float32"
    evecs = evecs.float()
    entries = entry_arrays(operators) if arrays or halves else None
    vectors = np.split(to_host({"evecs": evecs})["evecs"], np.cumsum(lengths)[:-1]) if entries else []
    values = torch.from_numpy(np.stack(evals).astype(np.float32)).to(operators.device)
    # The lengths need not be read from the GPU.
    counts = {"_lengths": lengths, "_face_lengths": tuple(len(mesh.faces) for mesh in meshes)}
    operators = remember(replace(operators, evals=values, evecs=evecs), **counts)
    for matrix in (operators.laplacian, operators.gradient):
        matrix.pattern.prepare()  # for all parts at once
    parts = operators.split()

    def result(i: int) -> Computed | None:
        if options.k > 0 and not 0 < evals[i][-1] < MAX_SINGLE:
            return None  # the CPU path warns of meshes that have only components, and refuses those that are tiny
        if entries is None:
            return Computed(parts[i], None)
        try:
            whole = with_pairs(meshes[i].name, entries[i], (evals[i], vectors[i]), options.basis)
        except MeshError:
            return None
        if halves:
            return Computed(Operators(**assembled_fields(whole, meshes[i].faces)).to(operators.device), whole)
        return Computed(parts[i], whole)

    return [result(i) for i in range(len(meshes))]


def computed_alone(mesh: Mesh, options: Options, device: torch.device) -> Computed:
    """The operators of a mesh that `compute_on` has left: the CPU computes all of them but the eigenbasis."""
    arrays = computed_arrays(mesh, options, device)
    return Computed(operators_from(mesh, arrays, options, device), arrays)


def operators_from(mesh: Mesh, arrays: Arrays, options: Options, device: torch.device) -> Operators:
    """Operators from all their arrays, and the warning of `precompute`."""
    warning = component_warning(mesh, arrays, options)
    if warning is not None:
        warnings.warn(warning, stacklevel=5)  # the caller of `precompute`, which is wrapped once
    # Work on this stream follows the copy, and the arrays have left their memory when the call returns.
    return Operators(**assembled_fields(arrays, mesh.faces)).to(device, non_blocking=True)


@contextmanager
def gpu_groups(
    device: torch.device, options: Options, jobs: int, finished: Finished, *, arrays: bool
) -> Iterator[Callable[[Sequence[Waiting]], None]]:
    """A function that queues a group of meshes.

    Threads compute their operators and call finished(position, mesh, operators or error message) for each mesh. All
    calls are made when the context ends. The context then raises the first error that isn't one of a mesh.

    jobs: number of threads for the work that is left to the CPU
    arrays: see `compute_on`
    """
    room = Semaphore(MAX_WAITING)
    running: list[Future[None]] = []
    if device.type == "cuda":
        load_library(device)
    with threadpool_limits(1), ThreadPoolExecutor(jobs) as helpers, ThreadPoolExecutor(BATCHES_AT_ONCE) as threads:

        def compute(meshes: Sequence[Waiting]) -> None:
            try:
                for part in _that_fit(meshes, options.k, device):
                    group = [gpu_mesh.mesh for _, gpu_mesh in part]
                    with batch_stream(device) as stream, torch.cuda.stream(stream):
                        results = compute_on(device, group, options, helpers.map, arrays=arrays)
                        if stream is not None:
                            stream.synchronize()
                    for (position, gpu_mesh), result in zip(part, results, strict=True):
                        finished(position, gpu_mesh, result or _alone(gpu_mesh.mesh, options, device))
            finally:
                room.release()

        def submit(meshes: Sequence[Waiting]) -> None:
            room.acquire()
            running.append(threads.submit(compute, meshes))

        try:
            yield submit
        except BaseException:  # such as Ctrl-C
            for group in running:
                group.cancel()
            raise
    for group in running:
        group.result()


def _that_fit(meshes: Sequence[Waiting], k: int, device: torch.device) -> Iterator[Sequence[Waiting]]:
    """Divide meshes into groups that fit into a quarter of the memory of the device, with at least one mesh each."""
    if device.type != "cuda":
        yield meshes
        return
    room = torch.cuda.get_device_properties(device).total_memory // (4 * vertex_bytes(k))
    group: list[Waiting] = []
    size = 0
    for waiting in meshes:
        vertices = len(waiting[1].mesh.verts)
        if group and size + vertices > room:
            yield group
            group, size = [], 0
        group.append(waiting)
        size += vertices
    if group:
        yield group


def _alone(mesh: Mesh, options: Options, device: torch.device) -> Computed | str:
    try:
        return computed_alone(mesh, options, device)
    except MeshError as e:
        return str(e)
