"""Eigenbases of many Laplacians on a GPU, in batches.

The kernels for one mesh of 15,000 vertices are shorter than their launches. So all problems of a batch take each step
of the iteration together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from diffnet.geometry.eigen.by_component import Pick, select_pairs, warn_of_rounding
from diffnet.geometry.eigen.checks import PAIRS_CHECKED, checked_pairs, deviation_fault, rounding_fault
from diffnet.geometry.eigen.cpu import pairs_on_cpu
from diffnet.geometry.eigen.gpu.lanczos import (
    BatchedShiftInvert,
    Map,
    PackedProblem,
    connected_components,
    largest_pairs,
    packed,
)
from diffnet.geometry.eigen.problem import (
    MIN_VERTICES,
    TOLERANCE,
    USUAL_SHIFT,
    Array,
    Component,
    Pairs,
    Problem,
    checked_problem,
    expected_shift,
    is_small,
)
from diffnet.geometry.store.transfer import to_host

Indices: TypeAlias = NDArray[np.int64]
B = TypeVar("B")
R = TypeVar("R")

MAX_TOGETHER = 64  # problems in a batch
BATCHES_AT_ONCE = 2  # batches; the cores work on one while the GPU works on the other


class Solution(NamedTuple):
    """Pairs of a component: values (k,), vectors (V, k), and the fault that rounding causes, if any."""

    values: Array
    vectors: Tensor
    fault: str | None


def eigenbases_on_gpu(problems: Sequence[Problem], k: int, device: torch.device, jobs: int) -> list[Pairs]:
    """See `eigenbases`. `jobs` threads do the work that is left to the CPU; a single problem needs only this thread."""
    problems = [checked_problem(*problem) for problem in problems]
    lengths = [len(mass) for _, mass in problems]

    def solved(numbers: Sequence[int], on_cores: Map) -> list[Pairs]:
        evals, evecs = packed_eigenbases(packed([problems[i] for i in numbers], device), k, on_cores)
        ends = np.cumsum([lengths[i] for i in numbers])[:-1]
        return list(zip(evals, np.split(to_host({"evecs": evecs})["evecs"], ends), strict=True))

    by_size = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    together = _batch_size(lengths, k, device) if len(lengths) > 1 else 1
    batches = [by_size[i : i + together] for i in range(0, len(lengths), together)]
    results = in_batches(solved, batches, device, jobs)
    pairs = dict(zip(chain.from_iterable(batches), chain.from_iterable(results), strict=True))
    return [pairs[i] for i in range(len(problems))]


def in_batches(solve: Callable[[B, Map], R], batches: Sequence[B], device: torch.device, jobs: int) -> list[R]:
    """solve(batch, on_cores) for each batch, BATCHES_AT_ONCE of them at the same time, each on a stream of its own.

    jobs: number of threads of `on_cores`, for the work that is left to the CPU. A single batch uses only this thread.
    """

    def on_stream(batch: B, on_cores: Map) -> R:
        with batch_stream(device) as stream, torch.cuda.stream(stream):
            return solve(batch, on_cores)

    if len(batches) == 1:
        return [on_stream(batches[0], map)]
    load_library(device)
    # Small matrices are solved in parallel, each by one thread.
    with threadpool_limits(1), ThreadPoolExecutor(jobs) as helpers, ThreadPoolExecutor(BATCHES_AT_ONCE) as pool:
        return list(pool.map(lambda batch: on_stream(batch, helpers.map), batches))


def _batch_size(lengths: Sequence[int], k: int, device: torch.device) -> int:
    """A size that gives BATCHES_AT_ONCE batches, if they fit into memory."""
    together = min(MAX_TOGETHER, -(-len(lengths) // BATCHES_AT_ONCE))
    if device.type != "cuda":
        return together
    fit = torch.cuda.mem_get_info(device)[0] // (BATCHES_AT_ONCE * vertex_bytes(k) * max(lengths))
    return max(1, min(together, fit))


def vertex_bytes(k: int) -> int:
    """The memory for each vertex: the iteration needs up to 8 k numbers and the factor about a thousand."""
    return 8 * (8 * k + 1000)


def load_library(device: torch.device) -> None:
    """Let PyTorch load a library of linear algebra, which two threads can't do at once."""
    torch.linalg.cholesky(torch.eye(1, device=device))


@contextmanager
def batch_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A stream that no other thread uses in the meantime. It waits for the work of the current stream."""
    if device.type != "cuda":
        yield None
        return
    free = _free_streams(device)
    stream = free.get()
    try:
        stream.wait_stream(torch.cuda.current_stream(device))
        yield stream
    finally:
        free.put(stream)


@functools.cache
def _free_streams(device: torch.device) -> SimpleQueue[torch.cuda.Stream]:
    """A fixed set of streams. PyTorch never frees the memory for matrix products of a stream, so none is made anew."""
    free: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
    for _ in range(BATCHES_AT_ONCE):
        free.put(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return free


def packed_eigenbases(problem: PackedProblem, k: int, on_cores: Map) -> tuple[list[Array], Tensor]:
    """`eigenbasis` of several meshes: eigenvalues (k,) of each, and eigenvectors (V, k) on the device, float64."""
    evecs = problem.mass.new_zeros(len(problem.mass), k)
    live = (problem.mass > 0).nonzero()[:, 0]
    mesh = np.repeat(np.arange(len(problem.lengths)), problem.lengths)
    if len(live) < len(problem.mass):
        mesh = mesh[live.cpu().numpy()]
        problem = problem.restricted(live, tuple(np.bincount(mesh, minlength=len(problem.lengths)).tolist()))
    parts = _Parts(problem, mesh)
    searches = {
        i: select_pairs(parts.area[extent], parts.size[extent], min(k, length))
        for i, (extent, length) in enumerate(zip(parts.of_mesh, problem.lengths, strict=True))
    }
    results: dict[int, Solution] = {}
    picks: dict[int, list[Pick]] = {}
    answers: dict[int, dict[int, Array] | None] = dict.fromkeys(searches)
    while answers:
        requests: dict[int, dict[int, int]] = {}
        for i, answer in answers.items():
            try:
                requests[i] = searches[i].send(answer)  # type: ignore[arg-type]
            except StopIteration as end:
                picks[i] = end.value
        first = {i: parts.of_mesh[i].start for i in requests}
        results |= _solve(
            parts, {first[i] + c: n for i, request in requests.items() for c, n in request.items()}, on_cores
        )
        answers = {i: {c: results[first[i] + c].values for c in request} for i, request in requests.items()}
    evals = []
    for i, extent in enumerate(parts.of_mesh):
        evals.append(_write_vectors(evecs, live, parts, extent, picks[i], results))
        faults = [results[c].fault for c in range(extent.start, extent.stop) if c in results]
        warn_of_rounding(evals[-1], extent.stop - extent.start, [fault for fault in faults if fault is not None])
    parts.write_constants(evecs, live)
    return evals, evecs


class _Parts:
    """The connected components of packed meshes, in the order of their first vertices.

    Attributes:
        area, size: (components,), the sum of the masses and the number of vertices
        of_mesh: the range of components of each mesh
    """

    def __init__(self, problem: PackedProblem, mesh: Indices) -> None:
        self.problem = problem
        label = connected_components(problem)
        roots = label == torch.arange(len(label), device=label.device)
        component = (roots.cumsum(0) - 1)[label]
        self._order = component.argsort(stable=True)
        self.component = component.cpu().numpy()
        self.area = np.bincount(self.component, problem.mass.cpu().numpy()).astype(np.float64)
        self.size = np.bincount(self.component)
        self._start = np.cumsum(self.size) - self.size
        counts = np.bincount(mesh[roots.cpu().numpy()], minlength=len(problem.lengths))
        stops = np.cumsum(counts).tolist()
        self.of_mesh = [range(stop - count, stop) for stop, count in zip(stops, counts.tolist(), strict=True)]

    def vertices(self, components: Sequence[int]) -> Tensor:
        """The vertices of some components, one after another."""
        slices = [self._order[self._start[c] : self._start[c] + self.size[c]] for c in components]
        return torch.cat(slices) if slices else self._order[:0]

    def problem_of(self, components: Sequence[int]) -> PackedProblem:
        return self.problem.restricted(self.vertices(components), tuple(int(self.size[c]) for c in components))

    def write_constants(self, evecs: Tensor, rows: Tensor) -> None:
        """The first columns of a mesh are the constants of its components, the largest first."""
        rank = np.empty(len(self.area), np.int64)
        for extent in self.of_mesh:
            rank[extent.start + np.argsort(-self.area[extent], kind="stable")] = np.arange(len(extent))
        column = rank[self.component]
        present = np.flatnonzero(column < evecs.shape[1])
        value = 1 / np.sqrt(self.area[self.component[present]])
        at, column, value = (torch.from_numpy(a).to(evecs.device) for a in (present, column[present], value))
        evecs[rows[at], column] = value


class _Searched:
    """A component on the device, as `checked_pairs` takes it. Its Laplacian is copied to the host only when needed."""

    def __init__(self, parts: _Parts, component: int, k: int) -> None:
        self._parts, self.number, self.k = parts, component, k

    @functools.cached_property
    def laplacian(self) -> scipy.sparse.csr_matrix:
        return self._parts.problem_of([self.number]).on_host()

    @functools.cached_property
    def mass(self) -> Array:
        return self._parts.problem_of([self.number]).mass.cpu().numpy()

    def shift(self, unit: float) -> float:
        return expected_shift(unit, self.k, float(self._parts.area[self.number]))


def _solve(parts: _Parts, wanted: dict[int, int], on_cores: Map) -> dict[int, Solution]:
    """Some pairs of components, without the constants."""
    large = [c for c, k in wanted.items() if parts.size[c] >= MIN_VERTICES and not is_small(int(parts.size[c]), k)]
    small = [c for c in wanted if c not in set(large)]
    on_cpu = _solve_on_cores(small, parts, wanted, on_cores)  # at work while the device works
    results = _solve_on_device([_Searched(parts, c, wanted[c]) for c in large], parts, on_cores)
    failed = [c for c in large if c not in results]
    return results | dict(on_cpu) | dict(_solve_on_cores(failed, parts, wanted, on_cores))


def _solve_on_cores(
    numbers: Sequence[int], parts: _Parts, wanted: Mapping[int, int], on_cores: Map
) -> Iterator[tuple[int, Solution]]:
    if not numbers:
        return iter(())
    problem, ends = parts.problem_of(numbers), np.cumsum(parts.size[numbers])
    matrix, mass = problem.on_host(), problem.mass.cpu().numpy()
    vertices = [slice(end - parts.size[c], end) for c, end in zip(numbers, ends, strict=True)]
    components = [
        Component(matrix[place, place], mass[place], wanted[c]) for c, place in zip(numbers, vertices, strict=True)
    ]

    def solved(c: int, component: Component) -> tuple[int, Solution]:
        values, vectors = pairs_on_cpu(component)
        fault = rounding_fault(component.laplacian, values, vectors)
        return c, Solution(values, torch.from_numpy(np.ascontiguousarray(vectors)), fault)

    return on_cores(solved, numbers, components)


def _solve_on_device(searched: Sequence[_Searched], parts: _Parts, on_cores: Map) -> dict[int, Solution]:
    """The pairs of those components whose result passes the checks."""
    if not searched:
        return {}
    problem = parts.problem_of([s.number for s in searched])
    operator = BatchedShiftInvert(problem, [s.shift(USUAL_SHIFT) for s in searched])
    if operator.failed:
        rest = [s for i, s in enumerate(searched) if i not in operator.failed]
        return _solve_on_device(rest, parts, on_cores)
    values, rows = largest_pairs(operator, max(s.k for s in searched), TOLERANCE, on_cores)
    try:
        evals, rows, faults = checked_pairs(searched, operator, values, rows, operator.block)
    except np.linalg.LinAlgError:
        return {}
    checked = rows[:, :PAIRS_CHECKED]
    quotients = operator.to_host((checked * operator.apply_inverse(checked)).sum(-1)) - operator.shift[:, None]
    rows /= operator.root
    rows *= torch.where(-rows.amin(-1) > rows.amax(-1), -1.0, 1.0)[..., None]  # as on the CPU
    results = {}
    for i, s in enumerate(searched):
        if faults[i] is None:
            numbers = evals[i, : s.k]
            fault = deviation_fault(numbers, quotients[i, : s.k])
            results[s.number] = Solution(numbers, rows[i, : s.k, : operator.sizes[i]].mT, fault)
    return results


def _write_vectors(
    evecs: Tensor, rows: Tensor, parts: _Parts, extent: range, picks: Sequence[Pick], results: Mapping[int, Solution]
) -> Array:
    """Write the nonconstant eigenvectors of a mesh to its rows of evecs. Returns its eigenvalues (k,).

    rows: the row of each vertex of the parts
    """
    k, count = evecs.shape[1], len(extent)
    evals = np.zeros(k)
    evals[count : count + len(picks)] = [pick.value for pick in picks]
    evals[count + len(picks) :] = evals[: count + len(picks)].max(initial=0)
    columns: dict[int, list[int]] = {}
    for at, pick in enumerate(picks):
        columns.setdefault(extent.start + pick.component, []).append(count + at)
    for c, places in columns.items():
        vertex_rows = rows[parts.vertices([c])]
        evecs[vertex_rows[:, None], torch.tensor(places).to(evecs.device)] = (
            results[c].vectors[:, : len(places)].to(evecs.device)
        )
    return evals
