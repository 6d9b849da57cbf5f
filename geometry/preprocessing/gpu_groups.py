"""Threads that let a GPU compute the operators of groups of meshes while worker processes do the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Semaphore
from typing import TypeAlias

import torch
from threadpoolctl import threadpool_limits

from diffnet.geometry.eigen.gpu.batches import BATCHES_AT_ONCE, batch_stream, load_library, vertex_bytes
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh
from diffnet.geometry.options import Options
from diffnet.geometry.preprocessing.group import Computed, compute_on
from diffnet.geometry.preprocessing.one import computed_alone
from diffnet.geometry.preprocessing.worker import GpuMesh

POSITIONS = 32  # consecutive meshes whose operators are computed together
MAX_WAITING = 4  # groups of meshes; with more, the worker processes wait
Waiting: TypeAlias = tuple[int, GpuMesh]  # the position of a mesh, and the mesh
Finished: TypeAlias = Callable[[int, GpuMesh, "Computed | str"], None]


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
    with (
        threadpool_limits(1),
        ThreadPoolExecutor(jobs) as helpers,
        ThreadPoolExecutor(BATCHES_AT_ONCE) as threads,
    ):

        def compute(meshes: Sequence[Waiting]) -> None:
            try:
                for part in _that_fit(meshes, options.k, device):
                    own = [gpu_mesh.mesh for _, gpu_mesh in part]
                    with batch_stream(device) as stream, torch.cuda.stream(stream):
                        results = compute_on(device, own, options, helpers.map, arrays=arrays)
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
