"""Operators for many meshes, on several cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from diffnet.geometry import (
    BASIS_PRECISIONS,
    LAPLACIANS,
    BasisPrecision,
    LaplacianKind,
    Mesh,
    MeshError,
    MeshLike,
    Operators,
    hks,
    is_cached,
    load_mesh,
    normalize_positions,
    precompute,
    wks,
)
from diffnet.geometry.workers import (
    available_cores,
    check_that_processes_start,
    interrupts_blocked,
    worker_pool,
)

T = TypeVar("T")

FeatureKind: TypeAlias = Literal["hks", "log-hks", "xyz", "wks"]
FEATURE_CHANNELS: dict[FeatureKind, int] = {"hks": 16, "log-hks": 16, "xyz": 3, "wks": 16}


@dataclass(frozen=True)
class Preprocessing:
    """Everything that decides what a network sees of a mesh; a checkpoint carries it.

    k: eigenpairs, 0 only for xyz features; laplacian, basis: see `precompute`; features: inputs of the network at the
        vertices
    """

    k: int = 128
    laplacian: LaplacianKind = "robust"
    features: FeatureKind = "hks"
    basis: BasisPrecision = "float32"

    def __post_init__(self) -> None:
        fewest = 0 if self.features == "xyz" else 1  # descriptors are made of eigenpairs
        if self.k < fewest:
            raise ValueError(f"k should be at least {fewest}, got {self.k}")
        for name, known in (
            ("laplacian", LAPLACIANS),
            ("features", get_args(FeatureKind)),
            ("basis", BASIS_PRECISIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} should be one of {', '.join(known)}, got {getattr(self, name)!r}")


def prepare(
    source: MeshLike,
    options: Preprocessing,
    cache_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Mesh, Operators]:
    """A mesh at normalised positions and its operators. Raises MeshError for one that can't be used.

    device: what computes the eigenbasis, see `precompute`; the result is on the CPU
    """
    mesh = _normalized(source, cache_dir)
    return mesh, precompute(mesh, options.k, options.laplacian, cache_dir, basis=options.basis, device=device)


def _normalized(source: MeshLike, cache_dir: str | os.PathLike[str] | None) -> Mesh:
    mesh = load_mesh(source, cache_dir)
    return replace(mesh, verts=normalize_positions(mesh.verts))


def input_features(mesh: Mesh, operators: Operators, kind: FeatureKind) -> Tensor:
    """The network's inputs (V, FEATURE_CHANNELS[kind]), float32.

    "hks" and "wks" are the descriptors as they are, "xyz" the positions. "log-hks" is log(hks) / 3: small components
    and tips have heat kernels a thousand times those of the bulk, and a network sees more in their logarithm.
    """
    if kind == "xyz":
        return torch.from_numpy(mesh.verts).float()
    if kind == "wks":
        return wks(operators, FEATURE_CHANNELS[kind])
    descriptor = hks(operators, FEATURE_CHANNELS[kind])
    return descriptor if kind == "hks" else descriptor.clamp(min=1e-6).log() / 3


def load_meanwhile(
    load: Callable[[int], T], fill: Callable[[Callable[[int], Any]], dict[int, str]]
) -> tuple[dict[int, str], dict[int, Future[T]]]:
    """What `fill(ready)` returns, and load(i) for each position i that it called `ready` with: a thread reads what is
    there while the rest is computed."""
    loaded = dict[int, Future[T]]()
    with ThreadPoolExecutor(1) as loader:

        def ready(position: int) -> None:
            loaded[position] = loader.submit(load, position)

        return fill(ready), loaded


def fill_cache(
    sources: Sequence[MeshLike],
    options: Preprocessing,
    cache_dir: str | os.PathLike[str],
    jobs: int | None = None,
    advance: Callable[[], Any] = lambda: None,
    device: torch.device | str = "cpu",
    ready: Callable[[int], Any] = lambda position: None,
) -> dict[int, str]:
    """Make sure that the cache has the operators of all these meshes, `jobs` at a time (all cores by default).

    advance: called once for each mesh that is done with
    device: what computes eigenbases, see `precompute`. Each of the jobs uses it, so that their factorisations, on the
        CPU, overlap with what the others do on a GPU.
    ready: called with the position of each mesh that the cache has now

    Returns what is wrong with those that can't be used, by their position; the others are not held up by them. Raises
    OSError where there can be no such folder. With several jobs, a script has to call this under
    `if __name__ == "__main__":`, since the processes import it; RuntimeError where it doesn't.
    """
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    jobs = min(jobs or available_cores(), len(sources))
    failed: dict[int, str] = {}

    def done(position: int, error: str | None) -> None:
        if error is None:
            ready(position)
        else:
            failed[position] = error
        advance()

    if jobs <= 1:
        for i, source in enumerate(sources):
            done(i, _fill(source, options, cache_dir, device))
        return failed

    def submit(pool: ProcessPoolExecutor, position: int) -> Future[str | None]:
        with interrupts_blocked():
            return pool.submit(_fill, sources[position], options, cache_dir, device)

    # Looking takes less than starting processes; from the first mesh that isn't there on, they look for themselves.
    waiting = deque(range(len(sources)))
    while waiting and _is_filled(sources[waiting[0]], options, cache_dir):
        done(waiting.popleft(), None)
    jobs = min(jobs, len(waiting))
    lost: list[int] = []
    while waiting:
        with worker_pool(jobs, max(1, available_cores() // jobs)) as pool:
            under_way = _work_off(pool, jobs, waiting, submit, done)
        if under_way:
            check_that_processes_start()
        lost += under_way
    # One of these killed its process, so each gets a pool of its own.
    for i in lost:
        with worker_pool(1, available_cores()) as pool:
            try:
                error = submit(pool, i).result()
            except BrokenProcessPool:
                error = f"{_name(sources[i])}: preprocessing it killed its process (out of memory?)"
        done(i, error)
    return dict(sorted(failed.items()))


def _work_off(
    pool: ProcessPoolExecutor,
    jobs: int,
    waiting: deque[int],
    submit: Callable[[ProcessPoolExecutor, int], Future[str | None]],
    done: Callable[[int, str | None], None],
) -> list[int]:
    """Work until nothing is waiting, or until a process dies; returns what was under way then.

    A process that dies takes the whole pool with it, so no more is handed out than is worked on.
    """
    running: dict[Future[str | None], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running[submit(pool, waiting[0])] = waiting[0]
                waiting.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                done(running[future], future.result())
                del running[future]
    except BrokenProcessPool:
        pass
    return list(running.values())


def _name(source: MeshLike) -> str:
    if isinstance(source, Mesh):
        return source.name
    return str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__


def _fill(
    source: MeshLike, options: Preprocessing, cache_dir: str | os.PathLike[str], device: torch.device | str
) -> str | None:
    try:
        prepare(source, options, cache_dir, device)
    except MeshError as e:
        return str(e)
    except MemoryError:
        return f"{_name(source)}: preprocessing it takes more memory than there is"
    return None


def _is_filled(source: MeshLike, options: Preprocessing, cache_dir: str | os.PathLike[str]) -> bool:
    try:
        mesh = _normalized(source, cache_dir)
        return is_cached(mesh, options.k, options.laplacian, cache_dir, basis=options.basis)
    except MeshError:
        return False  # whoever fills the cache says what is wrong
