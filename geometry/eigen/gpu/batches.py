"""Eigenbases of many Laplacians on a GPU, in batches.

The kernels for one mesh of 15,000 vertices are shorter than their launches. So all problems of a batch take each step
of the iteration together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from diffnet.geometry.eigen.by_component import component_by_component
from diffnet.geometry.eigen.checks import checked_pairs
from diffnet.geometry.eigen.cpu import pairs_on_cpu
from diffnet.geometry.eigen.gpu.shift_invert import BatchedShiftInvert
from diffnet.geometry.eigen.lanczos import KrylovSpace
from diffnet.geometry.eigen.problem import TOLERANCE, USUAL_SHIFT, Component, Pairs, Problem, checked_problem

Map: TypeAlias = Callable[..., Iterator[Any]]

MIN_VERTICES = 4096  # vertices; the CPU solves smaller components before a GPU has launched its kernels
MAX_TOGETHER = 64  # problems in a batch
BATCHES_AT_ONCE = 2  # batches; the cores work on one while the GPU works on the other


def eigenbases_on_gpu(problems: Sequence[Problem], k: int, device: torch.device, jobs: int) -> list[Pairs]:
    """See `eigenbases`. `jobs` threads do the work that is left to the CPU; a single problem needs only this thread."""
    problems = [checked_problem(*problem) for problem in problems]
    if len(problems) == 1:
        return _batch(problems, k, device, map)
    by_size = sorted(range(len(problems)), key=lambda i: -len(problems[i][1]))
    size = _batch_size(problems, k, device)
    batches = [by_size[i : i + size] for i in range(0, len(problems), size)]
    torch.linalg.cholesky(torch.eye(1, device=device))  # loads a library, which two threads can't do at once
    # Small matrices are solved in parallel, each by one thread.
    with (
        threadpool_limits(1),
        ThreadPoolExecutor(jobs) as helpers,
        ThreadPoolExecutor(BATCHES_AT_ONCE) as pool,
    ):
        solved = pool.map(lambda batch: _batch([problems[i] for i in batch], k, device, helpers.map), batches)
        found = {
            i: pairs for batch, own in zip(batches, solved, strict=True) for i, pairs in zip(batch, own, strict=True)
        }
    return [found[i] for i in range(len(problems))]


def _batch_size(problems: Sequence[Problem], k: int, device: torch.device) -> int:
    """A size that gives BATCHES_AT_ONCE batches, if they fit into memory.

    For each vertex, the iteration needs up to 8 k numbers and the factor about a thousand.
    """
    each = 8 * (8 * k + 1000) * max(len(mass) for _, mass in problems)
    fit = torch.cuda.mem_get_info(device)[0] // (BATCHES_AT_ONCE * each)
    return max(1, min(MAX_TOGETHER, fit, -(-len(problems) // BATCHES_AT_ONCE)))


def _batch(problems: Sequence[Problem], k: int, device: torch.device, on_cores: Map) -> list[Pairs]:
    """Solve for a batch. `on_cores` is `map`, or the `map` of a thread pool."""
    searches = [component_by_component(laplacian, mass, k) for laplacian, mass in problems]
    answers: dict[int, Pairs | None] = dict.fromkeys(range(len(searches)))
    found: dict[int, Pairs] = {}
    while answers:
        asked = on_cores(_go_on, [searches[i] for i in answers], answers.values())
        components: dict[int, Component] = {}
        for i, got in zip(answers, asked, strict=True):
            if isinstance(got, Component):
                components[i] = got
            else:
                found[i] = got
        with _stream(device) as stream:
            pairs = pairs_on_gpu([*components.values()], device, stream, on_cores)
        answers = dict(zip(components, pairs, strict=True))
    return [found[i] for i in range(len(searches))]


@contextmanager
def _stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A stream that no other thread uses in the meantime."""
    if device.type != "cuda":
        yield None
        return
    free = _free_streams(device)
    stream = free.get()
    try:
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


def _go_on(steps: Generator[Component, Pairs, Pairs], answer: Pairs | None) -> Component | Pairs:
    """Continue a search up to the next component that is large enough for the GPU, or up to its result."""
    try:
        component = steps.send(answer)  # type: ignore[arg-type]
        while component.is_small or len(component.mass) < MIN_VERTICES:
            component = steps.send(pairs_on_cpu(component))
        return component
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def pairs_on_gpu(
    components: Sequence[Component],
    device: torch.device,
    stream: torch.cuda.Stream | None,
    on_cores: Map,
) -> list[Pairs]:
    """`pairs_on_cpu` of each component, by the same steps on the GPU. Components that fail are solved on the CPU."""
    found: dict[int, Pairs] = {}

    def together(chosen: Sequence[int]) -> None:
        if not chosen:
            return
        own = [components[i] for i in chosen]
        operator = BatchedShiftInvert([c[:2] for c in own], [c.shift(USUAL_SHIFT) for c in own], device)
        if operator.failed:
            together([i for place, i in enumerate(chosen) if place not in operator.failed])
            return
        values, rows = KrylovSpace(operator, max(c.k for c in own), operator.block).converge(TOLERANCE)
        evals, rows, faults = checked_pairs(own, operator, values, rows, operator.block)

        def fetch(place: int) -> Pairs:
            k, size = own[place].k, len(own[place].mass)
            with torch.cuda.stream(stream):
                return evals[place, :k], rows[place, :k, :size].cpu().numpy().T

        right = [place for place, fault in enumerate(faults) if fault is None]
        found.update(zip([chosen[place] for place in right], on_cores(fetch, right), strict=True))

    with torch.cuda.stream(stream), suppress(ArithmeticError, np.linalg.LinAlgError):
        together(range(len(components)))
    return [found.get(i) or pairs_on_cpu(component) for i, component in enumerate(components)]
