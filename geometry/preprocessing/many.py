"""Operators for many meshes, on several cores and a GPU."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffnet.geometry.cache import Arrays, write_later
from diffnet.geometry.errors import MeshError, refuses, some_reasons
from diffnet.geometry.mesh.mesh import MeshLike, check_several
from diffnet.geometry.mesh.normalize import scale_rule
from diffnet.geometry.mesh.objects import NormalsRule, check_normals_rule
from diffnet.geometry.operators import Operators
from diffnet.geometry.phases import add_phases, with_phases
from diffnet.geometry.preprocessing.assembly import fields_of, tensors_of
from diffnet.geometry.preprocessing.device import usable_device
from diffnet.geometry.preprocessing.entry import entry_of
from diffnet.geometry.preprocessing.flat import Flat
from diffnet.geometry.preprocessing.gpu_groups import POSITIONS, Waiting, gpu_groups
from diffnet.geometry.preprocessing.group import Computed
from diffnet.geometry.preprocessing.known_entry import show_even_rows
from diffnet.geometry.preprocessing.options import (
    BasisPrecision,
    JoinRule,
    LaplacianKind,
    OperatorsKind,
    Options,
    ScaleRule,
)
from diffnet.geometry.preprocessing.stored import Reader, stored_operators
from diffnet.geometry.preprocessing.worker import (
    CacheJob,
    Known,
    Unsolved,
    compute_entry,
    source_name,
)
from diffnet.geometry.processes import WorkerPool, available_cores, rank_count
from diffnet.geometry.transfer import MAX_PIECE, TensorsAt, to_gpu

T = TypeVar("T")

FEW_POSITIONS = 8  # the smallest block where several ranks share the meshes; a GPU solves small blocks less efficiently
LOADERS = 4  # threads; more would wait for Python's global lock
LOOKED_AT_TOGETHER = 32


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
    """`precompute` for each mesh, on several cores and a GPU.

    meshes: each is a mesh for `load_mesh`; arrays are tuples (verts, faces)
    k, laplacian, cache_dir, basis, join, normalize, operators: see `precompute`.
    normals: None, "file" or "geometry"; see `precompute`. `make_mesh` makes meshes with own normals, which count as
        those of the file.
    device: the device that the operators are on, and that computes those of large meshes; the cores compute the others.
        A GPU takes up to 32 meshes of the list at once, and rounding depends on which these are. Meshes that it gets
        together share memory there, which is freed when none of their operators is used any more.
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
    job = CacheJob(options, cache_dir, normalize, normals)

    def load(positions: tuple[int, ...], found: Sequence[Flat] | Computed | Reader) -> list[Operators]:
        if isinstance(found, Computed):
            return [found.operators]
        if callable(found):
            return [found(device)]
        return _operators_of_flat(found, device)

    def fill(ready: Callable[..., Any]) -> dict[int, str]:
        group: dict[int, Flat] = {}  # a GPU gets small meshes together

        def load_group() -> None:
            ready(tuple(group), [*group.values()])
            group.clear()

        def add(position: int, found: Known | Computed | Reader) -> None:
            if not isinstance(found, Known):
                ready((position,), found)
                return
            if found.warning is not None:
                texts.append(found.warning)
            group[position] = found.operators
            if sum(each.buffer.nbytes for each in group.values()) >= MAX_PIECE:
                load_group()

        failed = _fill(meshes, job, jobs, device, add, keep=True)
        if group:
            load_group()
        return failed

    texts: list[str] = []
    failed, loaded = load_meanwhile(load, fill)
    for text in texts:
        warnings.warn(text, stacklevel=3)  # the caller of `precompute_all`, which is wrapped once
    if failed:
        raise MeshError(f"{len(failed)} of {len(meshes)} meshes can't be used: {some_reasons([*failed.values()])}")
    result = {i: each for group, found in loaded.items() for i, each in zip(group, found.result(), strict=True)}
    return [result[i] for i in range(len(meshes))]


def _operators_of_flat(found: Sequence[Flat], device: torch.device) -> list[Operators]:
    """Operators from the buffers of several meshes, on a device. A GPU gets them as one buffer."""
    arrays = [each.arrays() for each in found]
    if device.type == "cpu":
        return [Operators(**fields_of(tensors_of(own))) for own in arrays]
    buffers = to_gpu([torch.from_numpy(each.buffer) for each in found], device, non_blocking=True)

    def moved(each: Flat, own: Arrays, buffer: Tensor) -> Operators:
        if show_even_rows(own):
            return Operators(**fields_of(TensorsAt(buffer, each.places), even=True))
        # The CPU finds the index arrays of uneven rows, because it would wait for the GPU.
        return Operators(**fields_of(tensors_of(own))).to(device, non_blocking=True)

    return [moved(*each) for each in zip(found, arrays, buffers, strict=True)]


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
    positions: Iterable[int] | None = None,
) -> dict[int, str]:
    """Store the operators of all these meshes in the cache, unless they are there.

    jobs: number of worker processes; by default one for each core
    advance: called once for each mesh, usable or not, when it is done
    device: the device that computes the operators of large meshes; see `precompute_all`
    ready: called with the position of each mesh as soon as the cache has it
    normalize: compute the operators at normalized positions; see `precompute`
    normals: see `precompute_all`
    positions: those of the meshes that this call should store, instead of all. They are taken when a process or a GPU
        can start on them, so several machines can share a source of positions. Worker processes compute the meshes
        also if jobs is 1.

    Returns an error message for each mesh that can't be used, by position. These don't hold up the others.

    Raises OSError if the cache folder can't be made. See `precompute_all` for calls from a script.
    """
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    job = CacheJob(options, cache_dir, normalize, normals)
    on = torch.device(device)
    return _fill(sources, job, jobs, on, lambda i, found: ready(i), keep=False, advance=advance, positions=positions)


def _fill(
    sources: Sequence[MeshLike],
    job: CacheJob,
    jobs: int | None,
    device: torch.device,
    ready: Callable[[int, Any], Any],
    *,
    keep: bool,
    advance: Callable[[], Any] = lambda: None,
    positions: Iterable[int] | None = None,
) -> dict[int, str]:
    """See `fill_cache`.

    ready: called with the position of each mesh and, with `keep`, with its operators, or the mesh if the cache has them
    keep: pass operators on as soon as they are computed. Otherwise they are ready when the cache has them.
    """
    jobs = min(jobs or available_cores(), len(sources))
    failed: dict[int, str] = {}

    def done(position: int, result: Known | Computed | Reader | str | None) -> None:
        if isinstance(result, str):
            failed[position] = result
        else:
            ready(position, result)
        advance()

    waiting = iter(range(len(sources)) if positions is None else positions)
    in_workers = jobs > 1 or positions is not None
    if jobs > 1 and positions is None:
        waiting = _without_entry(sources, job, waiting, done)
    first = list(islice(waiting, jobs))
    if not first:
        return dict(sorted(failed.items()))
    waiting = chain(first, waiting)
    # Few meshes get several threads each. How many are left to given positions is not known, and rounding depends on
    # the number of threads.
    workers = len(first) if positions is None else jobs
    on_gpu = device.type != "cpu"
    work: Callable[[MeshLike], Any] = partial(compute_entry, job=job, keep=keep, for_gpu=on_gpu)
    on_cores = partial(_in_processes, jobs=workers) if in_workers else _in_this_process
    if not on_gpu:
        on_cores(work, sources, waiting, done)
        return dict(sorted(failed.items()))

    writing: list[Future[None]] = []

    def finished(position: int, unsolved: Unsolved, found: Computed | str) -> None:
        if isinstance(found, str):
            done(position, found)
            return
        mesh, path = unsolved
        if keep:
            done(position, found)
        if path is not None and found.arrays is not None:
            entry = partial(entry_of, mesh, found.arrays, job.options)
            if keep:
                write_later(path, entry)
            else:
                writing.append(write_later(path, entry, partial(done, position, None)))

    with gpu_groups(device, job.options, max(jobs, 1), finished, arrays=job.cache_dir is not None) as compute:
        waiting, add = in_blocks(waiting, compute, len(sources), 1 if positions is None else rank_count())

        def looked_at(position: int, result: Known | Unsolved | str | None) -> None:
            if isinstance(result, Unsolved):
                add(position, result)
            else:
                add(position, None)
                done(position, result)

        on_cores(work, sources, waiting, looked_at)
    for entry in writing:
        entry.result()
    return dict(sorted(failed.items()))


def in_blocks(
    waiting: Iterator[int], compute: Callable[[Sequence[Waiting]], None], count: int, ranks: int
) -> tuple[Iterator[int], Callable[[int, Unsolved | None], None]]:
    """The positions, and a function that gets each of them once, with what a GPU needs to compute it, if anything.

    It calls `compute` with the meshes of each POSITIONS consecutive positions, so groups don't depend on the load.

    count: that of all positions
    ranks: how many processes share the positions. The last blocks of several are smaller, so that all end together.
    """
    block: dict[int, int] = {}
    missing = Counter[int]()
    groups: dict[int, list[Waiting]] = {}

    def positions() -> Iterator[int]:
        for first in waiting:
            together = POSITIONS
            if ranks > 1:
                together = min(POSITIONS, max((count - first) // (2 * ranks), FEW_POSITIONS))
            taken = [first, *islice(waiting, together - 1)]
            number = len(missing)
            missing[number] = len(taken)
            block.update(dict.fromkeys(taken, number))
            yield from taken

    def add(position: int, unsolved: Unsolved | None) -> None:
        own = block.pop(position)
        missing[own] -= 1
        if unsolved is not None:
            groups.setdefault(own, []).append((position, unsolved))
        if missing[own] == 0 and own in groups:
            compute(sorted(groups.pop(own), key=lambda waiting: waiting[0]))

    return positions(), add


def _without_entry(
    sources: Sequence[MeshLike], job: CacheJob, waiting: Iterator[int], done: Callable[[int, Reader], None]
) -> Iterator[int]:
    """The positions of the meshes for which workers should look into the cache. Calls done for the others.

    Looking for an entry takes less time than starting processes. Near the first missing entry, workers look. They also
    read the files of meshes that are not in the cache, which takes more time.
    """
    if job.cache_dir is None:
        return waiting
    with ThreadPoolExecutor(LOADERS) as threads:
        together = 1
        while looked_at := list(islice(waiting, together)):
            missing = []
            found = threads.map(lambda i: stored_operators(sources[i], job), looked_at)
            for position, reader in zip(looked_at, found, strict=True):
                if reader is None:
                    missing.append(position)
                else:
                    done(position, reader)
            if missing:
                return chain(missing, waiting)
            together = LOOKED_AT_TOGETHER
    return waiting


def load_meanwhile(
    load: Callable[..., T], fill: Callable[[Callable[..., Any]], dict[int, str]]
) -> tuple[dict[int, str], dict[Any, Future[T]]]:
    """Load meshes in threads while the rest is still being computed.

    fill: a call of `fill_cache`, given its argument `ready`
    load: called in a thread with each position that is ready, or several in a tuple, and with what else `ready` gets

    Returns the result of `fill`, and the results of `load` by position.
    """
    loaded = dict[Any, Future[T]]()
    with ThreadPoolExecutor(min(LOADERS, available_cores())) as loader:

        def ready(position: int | tuple[int, ...], *found: Any) -> None:
            loaded[position] = loader.submit(load, position, *found)

        return fill(ready), loaded


def _in_this_process(
    work: Callable[[MeshLike], T | str],
    sources: Sequence[MeshLike],
    waiting: Iterator[int],
    done: Callable[[int, T | str], None],
) -> None:
    """Call done(position, work(source)) for each waiting position."""
    for position in waiting:
        done(position, work(sources[position]))


def _in_processes(
    work: Callable[[MeshLike], T | str],
    sources: Sequence[MeshLike],
    waiting: Iterator[int],
    done: Callable[[int, T | str], None],
    jobs: int,
) -> None:
    """Call done(position, work(source)) for each waiting position. Worker processes do the work."""
    lost: list[int] = []
    running: dict[Future[tuple[T | str, dict[str, float]]], int] = {}
    ended = SimpleQueue[Future[tuple[T | str, dict[str, float]]]]()
    with WorkerPool(jobs, max(1, available_cores() // jobs)) as pool:
        while True:
            # At most one call for each process, because results wait here while `done` waits for a GPU.
            for position in islice(waiting, jobs - len(running)):
                future = pool.submit(with_phases, work, sources[position])
                running[future] = position
                future.add_done_callback(ended.put)
            if not running:
                break
            future = ended.get()
            position = running.pop(future)
            try:
                result = _taken(future)
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
                result = _taken(pool.submit(with_phases, work, sources[position]))
            except BrokenProcessPool:
                result = f"{source_name(sources[position])}: preprocessing it killed its process (out of memory?)"
            done(position, result)


def _taken(call: Future[tuple[T, dict[str, float]]]) -> T:
    """The result of a call of `with_phases`. Its seconds count as those of this process."""
    result, seconds = call.result()
    add_phases(seconds)
    return result
