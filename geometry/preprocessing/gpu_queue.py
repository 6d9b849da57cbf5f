"""Eigenbases of meshes that processes have come with, by a thread that keeps a GPU busy meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import TypeAlias

import torch

from diffnet.geometry import MeshError, eigenbases, eigenbasis
from diffnet.geometry.cache import write_entry
from diffnet.geometry.eigen.problem import Pairs, Problem
from diffnet.geometry.preprocessing.entry import Unsolved

FEWEST_TOGETHER = 16  # meshes; one alone takes a GPU hardly less time
MOST_WAITING = 128  # a few megabytes each, until the processes have to wait
Waiting: TypeAlias = tuple[int, Path, Unsolved]


@contextmanager
def gpu_solver(
    device: torch.device, jobs: int, done: Callable[[int, str | None], None]
) -> Iterator[Callable[[int, Path, Unsolved], None]]:
    """A function that takes a mesh's position, the path of its cache entry, and what the entry lacks eigenpairs of.

    Entries are written as they are solved, and done(position, error) is called for each, from other threads; all are by
    the end of the context, which raises what kept the thread from that.
    """
    waiting: Queue[Waiting | None] = Queue(MOST_WAITING)
    with ThreadPoolExecutor(1) as thread:
        solving = thread.submit(_solve_all, waiting, device, jobs, done)
        try:
            yield lambda *unsolved: waiting.put(unsolved)
        finally:
            waiting.put(None)
            solving.result()


def _solve_all(
    waiting: Queue[Waiting | None], device: torch.device, jobs: int, done: Callable[[int, str | None], None]
) -> None:
    error: BaseException | None = None
    try:
        torch.zeros(1, device=device)  # it takes a GPU a second to start, which the processes take, too
    except RuntimeError as e:
        error = e
    going_on = True
    with ThreadPoolExecutor(jobs) as writers:
        while going_on:
            came = [waiting.get()]
            while came[-1] is not None and (len(came) < FEWEST_TOGETHER or not waiting.empty()):
                came.append(waiting.get())
            batch = [mesh for mesh in came if mesh is not None]
            going_on = len(batch) == len(came)
            if batch and error is None:  # otherwise the queue is only emptied, so that nobody waits for room in it
                try:
                    _solve(batch, device, jobs, writers, done)
                except BaseException as e:
                    error = e
    if error is not None:
        raise error


def _solve(
    batch: list[Waiting],
    device: torch.device,
    jobs: int,
    writers: ThreadPoolExecutor,
    done: Callable[[int, str | None], None],
) -> None:
    problems, k = [(mesh.laplacian, mesh.mass) for _, _, mesh in batch], batch[0][2].options.k
    found: Sequence[Pairs | RuntimeError]
    try:
        found = eigenbases(problems, k, device, jobs)
    except RuntimeError:  # of one of them, or too little memory for several
        found = [_alone(problem, k, device) for problem in problems]

    def write(mesh: Waiting, pairs: Pairs | RuntimeError) -> None:
        position, path, unsolved = mesh
        if isinstance(pairs, RuntimeError):
            done(position, f"{unsolved.name}: {pairs}")
            return
        try:
            write_entry(path, unsolved.solved(*pairs))
        except MeshError as e:
            done(position, str(e))
        else:
            done(position, None)

    for _ in writers.map(write, batch, found):
        pass


def _alone(problem: Problem, k: int, device: torch.device) -> Pairs | RuntimeError:
    try:
        return eigenbasis(*problem, k, device)
    except RuntimeError as e:
        return e
