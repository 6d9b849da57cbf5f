"""Processes that work beside this one, on all cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from threadpoolctl import threadpool_limits

from diffnet.geometry.errors import WorkerError


def available_cores() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def worker_pool(jobs: int, threads: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that share the cores: each may use so many threads.

    They start at the first calls of `submit`, which should stand under `interrupts_blocked`. A script has to ask for
    them under `if __name__ == "__main__":`, since they import it.
    """
    pool = ProcessPoolExecutor(jobs, _context(), initializer=_start_worker, initargs=(threads,))
    others = multiprocessing.active_children()
    try:
        yield pool
    except BaseException:
        # Ctrl-C, for one: what is under way would take minutes, and nobody wants it any more.
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        _give_up_queue(pool)
        raise
    finally:
        if pool._broken:  # type: ignore[attr-defined]
            _give_up_queue(pool)
        pool.shutdown(cancel_futures=True)


def _give_up_queue(pool: ProcessPoolExecutor) -> None:
    """Python before 3.12 waits for what processes that are gone had still to read (CPython issue 94777).

    Some versions give it up by themselves, in a thread that comes first, since both at once would be an error there.
    """
    manager: Any = pool._executor_manager_thread
    if sys.version_info < (3, 12) and manager is not None:
        manager.join(timeout=1)
        pool._call_queue._reader.close()  # type: ignore[attr-defined]


def check_that_processes_start() -> None:
    """Raises WorkerError where they don't, as in a script that asks for them outside of its `__main__` part."""
    try:
        with worker_pool(1, 1) as pool, interrupts_blocked():
            pool.submit(os.getpid).result()
    except BrokenProcessPool as e:
        raise WorkerError(
            "no process starts beside this one: a script that starts some has to do so under "
            "`if __name__ == '__main__':`, since they import it"
        ) from e


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started here never see Ctrl-C, which a terminal sends to all: stopping them is up to this process.

    It comes late here, too: interrupted while it starts a process, this one would not know whom to stop.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    late: list[int] = []
    # Only the main thread may set a handler, and is the one that runs it, whichever thread a signal meets.
    deferred = handler is not None and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if deferred:
        signal.signal(signal.SIGINT, lambda number, frame: late.append(number))
    try:
        yield
    finally:
        if deferred:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if late:
            signal.raise_signal(signal.SIGINT)


def _context() -> multiprocessing.context.BaseContext:
    """How processes start: not as forks of this one, which inherit locked thread pools and can't use a GPU.

    Imports take a process a second, and several at once get in each other's way. So one that does nothing else imports,
    and the others are forks of that one; it is there until this process ends. It doesn't load PyTorch, which would take
    seconds more.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffnet.geometry.preprocessing.worker"])
    return context


def _start_worker(threads: int) -> None:
    threadpool_limits(threads)
    # A parent that is killed outright can't stop its workers, and they would wait for work for good.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
