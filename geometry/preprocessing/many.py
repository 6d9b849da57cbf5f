"""Operators for many meshes, on several cores and a GPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from diffnet.geometry.argument_names import refuses
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import MeshLike, check_several
from diffnet.geometry.mesh.normalize import scale_rule
from diffnet.geometry.mesh.normals import NormalsRule, check_normals_rule
from diffnet.geometry.operators import Operators
from diffnet.geometry.preprocessing.device import usable_device
from diffnet.geometry.preprocessing.gpu_queue import gpu_solver
from diffnet.geometry.preprocessing.one import operators_of
from diffnet.geometry.preprocessing.options import (
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    Options,
    ScaleRule,
)
from diffnet.geometry.preprocessing.worker import (
    CacheJob,
    Unsolved,
    discretize_entry,
    fill_entry,
    has_entry,
    source_name,
)
from diffnet.geometry.processes import WorkerPool, available_cores

T = TypeVar("T")

LOADERS = 4  # threads; more would wait for Python's global lock
LOOKED_AT_TOGETHER = 32
MAX_REASONS = 5  # reasons listed in one error message


@refuses(
    verts_list="meshes, a list of (verts, faces)",
    faces_list="meshes, a list of (verts, faces)",
    k_eig="k",
    op_cache_dir="cache_dir",
)
def precompute_all(
    meshes: Sequence[MeshLike],
    k: int = 128,
    laplacian: LaplacianKind | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    basis: BasisPrecision = "float32",
    device: torch.device | str = "cpu",
    join: JoinRule = "auto",
    normals: NormalsRule | None = None,
    normalize: bool | ScaleRule = False,
    jobs: int | None = None,
    operators: OperatorsKind = "diffnet",
) -> list[Operators]:
    """`precompute` for each mesh, on several cores.

    meshes: each is a mesh for `load_mesh`; arrays are tuples (verts, faces)
    k, laplacian, cache_dir, basis, join, normalize, operators: see `precompute`. Without a cache, a temporary folder
        holds the entries until they are read.
    normals: None, "file" or "geometry"; see `precompute`. `make_mesh` makes meshes with own normals, which count as
        those of the file.
    device: the device that computes eigenbases. A GPU solves for all meshes that wait for it at once. Rounding depends
        on which meshes these are.
    jobs: number of worker processes; by default one for each core. They stay for a minute, for later calls.

    With several jobs, a script must call this under ``if __name__ == "__main__":``, because worker processes import the
    script; otherwise it raises WorkerError. Workers start fastest if the script imports PyTorch there, too.

    Raises MeshError if meshes can't be used. The others are computed first, and the cache keeps them. Raises
    OptionError for a bad option or a device that is not available.
    """
    check_several(meshes)
    options = Options(k, laplacian, basis, join, operators)
    scale_rule(normalize)  # checks it
    device = usable_device(device)
    check_normals_rule(normals)
    with TemporaryDirectory() if cache_dir is None else nullcontext(cache_dir) as folder:
        failed, loaded = load_meanwhile(
            lambda i: operators_of(
                CacheJob(options, folder, normalize, normals).read(meshes[i]), options, folder, device
            ),
            lambda ready: fill_cache(
                meshes, options, folder, jobs, device=device, ready=ready, normalize=normalize, normals=normals
            ),
        )
        if failed:
            reasons = "; ".join(list(failed.values())[:MAX_REASONS])
            more = "; …" if len(failed) > MAX_REASONS else ""
            raise MeshError(f"{len(failed)} of {len(meshes)} meshes can't be used: {reasons}{more}")
        return [loaded[i].result() for i in range(len(meshes))]


def fill_cache(
    sources: Sequence[MeshLike],
    options: Options,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    device: torch.device | str = "cpu",
    ready: Callable[[int], Any] = lambda position: None,
    *,
    normalize: bool | ScaleRule = False,
    normals: NormalsRule | None = None,
) -> dict[int, str]:
    """Store the operators of all these meshes in the cache, unless they are there.

    jobs: number of worker processes; by default one for each core
    advance: called once for each mesh, usable or not, when it is done
    device: the device that computes eigenbases; see `precompute_all`
    ready: called with the position of each mesh as soon as the cache has it
    normalize: compute the operators at normalized positions; see `precompute`
    normals: see `precompute_all`

    Returns an error message for each mesh that can't be used, by position. These don't hold up the others.

    Raises OSError if the cache folder can't be made. See `precompute_all` for calls from a script.
    """
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    jobs = min(jobs or available_cores(), len(sources))
    job = CacheJob(options, cache_dir, normalize, normals)
    failed: dict[int, str] = {}

    def done(position: int, error: str | None) -> None:
        if error is None:
            ready(position)
        else:
            failed[position] = error
        advance()

    if jobs <= 1:
        for i, source in enumerate(sources):
            done(i, fill_entry(source, job, device))
        return failed

    waiting = _without_entry(sources, job, done)
    if torch.device(device).type == "cpu" or not waiting:
        _in_processes(partial(fill_entry, job=job), sources, waiting, jobs, done)
        return dict(sorted(failed.items()))

    with gpu_solver(torch.device(device), options, jobs, done) as solve_later:

        def discretized(position: int, result: Unsolved | str | None) -> None:
            if isinstance(result, tuple):
                solve_later(position, *result)
            else:
                done(position, result)

        _in_processes(partial(discretize_entry, job=job), sources, waiting, jobs, discretized)
    return dict(sorted(failed.items()))


def _without_entry(sources: Sequence[MeshLike], job: CacheJob, done: Callable[[int, str | None], None]) -> deque[int]:
    """The positions of the meshes for which workers should look into the cache. Calls done for the others.

    Looking for an entry takes less time than starting processes. Near the first missing entry, workers look. They also
    read the files of meshes that are not in the cache, which takes more time.
    """
    waiting = deque(range(len(sources)))
    with ThreadPoolExecutor(LOADERS) as threads:
        together = 1
        while waiting:
            looked_at = [waiting.popleft() for _ in range(min(together, len(waiting)))]
            found = list(threads.map(lambda i: has_entry(sources[i], job), looked_at))
            missing = []
            for position, has in zip(looked_at, found, strict=True):
                if has:
                    done(position, None)
                else:
                    missing.append(position)
            if missing:
                return deque([*missing, *waiting])
            together = LOOKED_AT_TOGETHER
    return waiting


def load_meanwhile(
    load: Callable[[int], T], fill: Callable[[Callable[[int], Any]], dict[int, str]]
) -> tuple[dict[int, str], dict[int, Future[T]]]:
    """Load meshes in threads while the rest is still being computed.

    fill: a call of `fill_cache`, given its argument `ready`
    load: called in a thread with each position that is ready

    Returns the result of `fill`, and the results of `load` by position.
    """
    loaded = dict[int, Future[T]]()
    with ThreadPoolExecutor(min(LOADERS, available_cores())) as loader:

        def ready(position: int) -> None:
            loaded[position] = loader.submit(load, position)

        return fill(ready), loaded


def _in_processes(
    work: Callable[[MeshLike], T | str],
    sources: Sequence[MeshLike],
    waiting: deque[int],
    jobs: int,
    done: Callable[[int, T | str], None],
) -> None:
    """Call done(position, work(source)) for each waiting position. Worker processes do the work."""
    jobs = min(jobs, len(waiting))
    if jobs == 0:
        return
    lost: list[int] = []
    running: dict[Future[T | str], int] = {}
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        while waiting or running:
            # At most one call for each process, because results wait here while `done` waits for a GPU.
            while waiting and len(running) < jobs:
                position = waiting.popleft()
                running[pool.submit(work, sources[position])] = position
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                position = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    lost.append(position)
                else:
                    done(position, result)
    if not lost:
        return
    # A mesh that killed its process gets another try, with all cores and all memory for itself.
    with WorkerPool(1, available_cores()) as pool:
        for position in lost:
            try:
                result = pool.submit(work, sources[position]).result()
            except BrokenProcessPool:
                result = f"{source_name(sources[position])}: preprocessing it killed its process (out of memory?)"
            done(position, result)
