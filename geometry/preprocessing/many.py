"""Operators for many meshes, on several cores and a GPU."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from diffnet.geometry.device import usable_device
from diffnet.geometry.errors import MeshError, refuses, some_reasons
from diffnet.geometry.mesh.mesh import Mesh, MeshLike, check_several, load_parsed, parsed_entry, stored_mesh
from diffnet.geometry.mesh.normalize import scale_rule
from diffnet.geometry.mesh.objects import NormalsRule, check_normals_rule, warn_of_gradients
from diffnet.geometry.operators import Operators
from diffnet.geometry.options import BasisPrecision, JoinRule, LaplacianKind, OperatorsKind, Options, Scale
from diffnet.geometry.preprocessing.group import POSITIONS, Computed, Waiting, gpu_groups, operators_from
from diffnet.geometry.preprocessing.one import operators_of
from diffnet.geometry.preprocessing.worker import (
    Answer,
    CacheJob,
    GpuMesh,
    compute_entry,
    entry_of,
    operators_path,
    source_name,
)
from diffnet.geometry.processes import WorkerPool, available_cores, phase, rank_count
from diffnet.geometry.store.assembly import fields_of, tensors_of
from diffnet.geometry.store.cache import has_entry, write_later
from diffnet.geometry.store.entry import all_arrays, read_operators
from diffnet.geometry.store.reading import PinnedEntries, has_even_rows, operators_at, read_again
from diffnet.geometry.store.transfer import MAX_PIECE

Result: TypeAlias = "Answer | Computed | Reader"
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
    normalize: bool | Scale = False,
    jobs: int | None = None,
    operators: OperatorsKind = "diffnet",
) -> list[Operators]:
    """`precompute` for each mesh, on several cores and a GPU.

    meshes: each is a mesh for `load_mesh`; arrays are tuples (verts, faces)
    k, laplacian, cache_dir, basis, join, normalize, operators: see `precompute`.
    normals: None, "file" or "geometry"; see `precompute`. `make_mesh` makes meshes with own normals, which count as
        those of the file.
    device: the device that the operators are on, and that computes those of large meshes; cores compute the others.
        A GPU takes up to 32 meshes of the list at once, and rounding depends on which these are. They share memory
        there, which is freed when none of their operators is used any more.
    jobs: number of worker processes; by default one for each core. They stay for a minute, for later calls.

    With several jobs, a script must call this under ``if __name__ == "__main__":``, because worker processes import the
    script; otherwise it raises WorkerError. Workers start fastest if the script imports PyTorch there, too.

    Raises MeshError if meshes can't be used. The others are computed first, and the cache keeps them. Raises
    OptionError for a bad option or a device that is not available.
    """
    check_several(meshes)
    warn_of_gradients(*(meshes if isinstance(meshes, (list, tuple)) else ()))  # others may read files
    options = Options(k, laplacian, basis, join, operators)
    scale_rule(normalize)  # checks it
    device = usable_device(device)
    check_normals_rule(normals)
    job = CacheJob(options, cache_dir, normalize, normals)

    texts: list[str] = []

    def load(_: tuple[int, ...], results: Sequence[Result]) -> list[Operators]:
        texts.extend(each.warning for each in results if isinstance(each, Answer) and each.warning is not None)
        return [_operators_of(each, device) for each in results]

    def fill(ready: Callable[..., Any]) -> dict[int, str]:
        small: dict[int, Answer] = {}  # loading many in a row takes a fraction of the time
        size = 0  # of these, in bytes

        def receive(position: int, result: Result) -> None:
            if not isinstance(result, Answer):
                ready((position,), [result])
                return
            nonlocal size
            small[position] = result
            size += result.nbytes
            if size >= MAX_PIECE:
                load_small()
                size = 0

        def load_small() -> None:
            ready(tuple(small), [*small.values()])
            small.clear()

        failed = OperatorRun(meshes, job, jobs, device, receive, keep=True).run()
        load_small()
        return failed

    failed, loaded = load_meanwhile(load, fill)
    for text in texts:
        warnings.warn(text, stacklevel=3)  # the caller of `precompute_all`, which is wrapped once
    if failed:
        raise MeshError(f"{len(failed)} of {len(meshes)} meshes can't be used: {some_reasons([*failed.values()])}")
    operators_at = {i: each for group, future in loaded.items() for i, each in zip(group, future.result(), strict=True)}
    return [operators_at[i] for i in range(len(meshes))]


def _operators_of(result: Result, device: torch.device) -> Operators:
    if isinstance(result, Computed):
        return result.operators
    if isinstance(result, Reader):
        return result.read(device)
    even = has_even_rows(result.arrays)
    if even and device.type != "cpu":
        return PinnedEntries.of(result.arrays).operators(device)
    # The CPU finds the index arrays of other rows, because it would wait for the GPU.
    return Operators(**fields_of(tensors_of(result.arrays), even=even)).to(device, non_blocking=True)


@dataclass
class OperatorRun:
    """A run over meshes, of `precompute_all` or `fill_cache` of `diffnet.data`: from workers and a GPU to one receiver.

    receive: gets the position of each mesh that is ready and, with `keep`, its operators, or their reader if the cache
        has them
    keep: pass operators on as soon as they are computed. Otherwise they are ready when the cache has them.
    positions: of the meshes; None for all. Several machines can share them, and worker processes compute these meshes
        also if jobs is 1.
    leave_large: pass on meshes that suit the device without operators; the receiver computes them
    """

    sources: Sequence[MeshLike]
    job: CacheJob
    jobs: int | None
    device: torch.device
    receive: Callable[[int, Any], Any]
    keep: bool
    advance: Callable[[], Any] = lambda: None
    positions: Iterable[int] | None = None
    leave_large: bool = False

    def __post_init__(self) -> None:
        self._shared = self.positions is not None  # with other calls
        self._waiting = iter(range(len(self.sources)) if self.positions is None else self.positions)
        self._jobs = min(self.jobs or available_cores(), len(self.sources))
        self._failed: dict[int, str] = {}
        self._writing: list[Future[None]] = []

    def run(self) -> dict[int, str]:
        """Fill the cache. Returns an error message for each mesh that can't be used, by position."""
        if self._jobs > 1 and not self._shared:
            self._look_for_entries()
        first = list(islice(self._waiting, self._jobs))
        self._waiting = chain(first, self._waiting)
        # Few meshes get several threads each. How many are left to shared positions is not known, and rounding depends
        # on the number of threads.
        workers = self._jobs if self._shared else len(first)
        if first and (self.leave_large or self.device.type == "cpu"):
            self._compute(self._waiting, self._finish, workers)
        elif first:
            self._compute_with_gpu(workers)
        return dict(sorted(self._failed.items()))

    def _finish(self, position: int, result: Result | str | None) -> None:
        if isinstance(result, str):
            self._failed[position] = result
        else:
            self.receive(position, result)
        self.advance()

    def _look_for_entries(self) -> None:
        """Finish the first meshes, up to those for which workers should look into the cache.

        Looking for an entry takes less time than starting processes. Near the first missing entry, workers look. They
        also read the files of meshes that are not in the cache, which takes more time.
        """
        if self.job.cache_dir is None:
            return
        with ThreadPoolExecutor(LOADERS) as threads:
            together = 1
            while positions := list(islice(self._waiting, together)):
                readers = threads.map(lambda i: stored_operators(self.sources[i], self.job), positions)
                missing = []
                for position, reader in zip(positions, readers, strict=True):
                    if reader is None:
                        missing.append(position)
                    else:
                        self._finish(position, reader)
                if missing:
                    self._waiting = chain(missing, self._waiting)
                    return
                together = LOOKED_AT_TOGETHER

    def _compute_with_gpu(self, workers: int) -> None:
        arrays = self.job.cache_dir is not None
        with gpu_groups(self.device, self.job.options, max(self._jobs, 1), self._store, arrays=arrays) as compute:
            ranks = rank_count() if self._shared else 1
            positions, add = in_blocks(self._waiting, compute, len(self.sources), ranks)

            def answer(position: int, result: Answer | GpuMesh | str | None) -> None:
                if isinstance(result, GpuMesh):
                    add(position, result)
                else:
                    add(position, None)
                    self._finish(position, result)

            self._compute(positions, answer, workers)
        for entry in self._writing:
            entry.result()

    def _store(self, position: int, gpu_mesh: GpuMesh, result: Computed | str) -> None:
        """Finish a mesh that a GPU has computed."""
        if self.keep or isinstance(result, str):
            self._finish(position, result)
        if isinstance(result, str) or gpu_mesh.path is None or result.arrays is None:
            return
        entry = partial(entry_of, gpu_mesh.mesh, result.arrays, self.job.options)
        if self.keep:
            write_later(gpu_mesh.path, entry)
        else:
            self._writing.append(write_later(gpu_mesh.path, entry, partial(self._finish, position, None)))

    def _compute(self, positions: Iterator[int], answer: Callable[[int, Any], None], workers: int) -> None:
        """Call answer(position, result) with the result of `compute_entry` for each position."""
        work = partial(compute_entry, job=self.job, keep=self.keep, for_gpu=self.device.type != "cpu")
        if self._jobs == 1 and not self._shared:
            for position in positions:
                answer(position, work(self.sources[position]))
            return
        lost = self._in_processes(work, positions, answer, workers)
        # A mesh that killed its process gets another try, with all cores and all memory for itself.
        for position in self._in_processes(work, iter(lost), answer, 1):
            name = source_name(self.sources[position])
            answer(position, f"{name}: preprocessing it killed its process (out of memory?)")

    def _in_processes(
        self,
        work: Callable[[MeshLike], Any],
        positions: Iterator[int],
        answer: Callable[[int, Any], None],
        workers: int,
    ) -> list[int]:
        """Call answer(position, work(source)). Returns the positions of meshes that killed their process."""
        lost: list[int] = []
        running: dict[Future[Any], int] = {}
        ended = SimpleQueue[Future[Any]]()
        with WorkerPool(workers, max(1, available_cores() // workers)) as pool:
            while True:
                # At most one call for each process, because results wait here while `answer` waits for a GPU.
                for position in islice(positions, workers - len(running)):
                    future = pool.submit(work, self.sources[position])
                    running[future] = position
                    future.add_done_callback(ended.put)
                if not running:
                    return lost
                future = ended.get()
                position = running.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    lost.append(position)
                else:
                    answer(position, result)


def in_blocks(
    waiting: Iterator[int], compute: Callable[[Sequence[Waiting]], None], count: int, ranks: int
) -> tuple[Iterator[int], Callable[[int, GpuMesh | None], None]]:
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
            consecutive = [first, *islice(waiting, together - 1)]
            number = len(missing)
            missing[number] = len(consecutive)
            block.update(dict.fromkeys(consecutive, number))
            yield from consecutive

    def add(position: int, gpu_mesh: GpuMesh | None) -> None:
        number = block.pop(position)
        missing[number] -= 1
        if gpu_mesh is not None:
            groups.setdefault(number, []).append((position, gpu_mesh))
        if missing[number] == 0 and number in groups:
            compute(sorted(groups.pop(number), key=lambda waiting: waiting[0]))

    return positions(), add


def load_meanwhile(
    load: Callable[..., T], fill: Callable[[Callable[..., Any]], dict[int, str]]
) -> tuple[dict[int, str], dict[Any, Future[T]]]:
    """Load meshes in threads while the rest is still being computed.

    fill: a call of `fill_cache` of `diffnet.data`, given its argument `ready`
    load: called in a thread with each position that is ready, and with what else `ready` gets

    Returns the result of `fill`, and the results of `load` by position.
    """
    loaded = dict[Any, Future[T]]()
    with ThreadPoolExecutor(min(LOADERS, available_cores())) as loader:

        def ready(position: Any, *result: Any) -> None:
            loaded[position] = loader.submit(load, position, *result)

        return fill(ready), loaded


# When this process reads a file again, it neither parses nor hashes it.
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
        mesh = stored_mesh(parsed, "")
        return None if mesh is None else operators_at(self.path, mesh.faces, len(mesh.verts), self.job.options)

    def _read_first(self, device: torch.device) -> Operators:
        options = self.job.options
        mesh = self.job.read(self.source) if self.mesh is None else self.mesh
        with phase("check"):
            entry = None if self.mesh is None else read_operators(self.path, len(mesh.verts), options)
        if entry is None:
            return operators_of(mesh, options, self.job.cache_dir, device)
        arrays = all_arrays(entry, mesh.verts)
        is_plain = options.basis == "float32" and has_even_rows(arrays) and not arrays["facts"][-2:].any()
        if self.parsed is not None and is_plain:
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
