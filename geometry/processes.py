"""Worker processes that share the cores of the machine.

`concurrent.futures.ProcessPoolExecutor` has no public way to stop running calls. Before Python 3.12 it also waits
forever for unread arguments of workers that were stopped (CPython issue 94777). The executor of loky stops them, but
each of its processes imports everything: 20 small meshes take 2.0 s on two cores, and 0.9 s with `WorkerPool`. If one
of its processes dies, all calls that wait fail, too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from diffnet.geometry.errors import WorkerError

T = TypeVar("T")


def available_cores() -> int:
    """The number of cores this process may use. The machine can have more."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerPool:
    """Processes that run functions, one call each at a time, as a context manager.

    jobs: number of processes. Each starts when a call first needs it.
    threads: number of threads that each process may use

    A process that dies fails only the call it works on, with BrokenProcessPool. Another process replaces it. An
    exception in the ``with`` block, such as Ctrl-C, stops all processes at once, since running calls may take minutes.

    Processes import the main script. A script must therefore use a pool under ``if __name__ == "__main__":``; otherwise
    calls raise WorkerError.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        self._threads = threads
        self._callers = ThreadPoolExecutor(jobs)  # each thread waits for one process
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)  # a process that is not started yet
        self._started: list[_Worker] = []
        self._starting = threading.Lock()
        self._stopped = False

    def __enter__(self) -> WorkerPool:
        return self

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """The result of function(*arguments), computed by a worker process. All of these must be picklable."""
        return self._callers.submit(self._call, function, arguments)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopped = True
            self._callers.shutdown(wait=False, cancel_futures=True)
            with self._starting:  # a process that is being started is in the list afterwards
                for worker in self._started:
                    worker.process.terminate()
        self._callers.shutdown()
        for worker in self._started:
            worker.close()

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        worker = self._idle.get()
        try:
            worker = worker or self._start()
            return worker.call(function, arguments)
        except BrokenProcessPool:
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def _start(self) -> _Worker:
        with self._starting:
            if self._stopped:
                raise CancelledError
            worker = _Worker(self._threads)
            self._started.append(worker)
        worker.wait_until_ready()
        return worker


class _Worker:
    """A worker process, as the parent process sees it."""

    def __init__(self, threads: int) -> None:
        context = _context()
        self._connection, theirs = context.Pipe()
        # daemon: the interpreter stops the process at exit, even if the pool's context was never left.
        self.process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        with _interrupts_blocked():
            self.process.start()
        theirs.close()  # so that this end notices when the process dies

    def wait_until_ready(self) -> None:
        """Raises WorkerError if the process dies first."""
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerError(
                "worker processes don't start: they import the main script, so a script must start them under "
                "`if __name__ == '__main__':`"
            ) from None

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        message = pickle.dumps((function, arguments))
        try:
            self._connection.send_bytes(message)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as e:
            raise BrokenProcessPool("a worker process was killed (out of memory?)") from e
        result, error, trace = pickle.loads(answer)
        if error is not None:
            raise error from WorkerTraceback(trace)
        return result

    def close(self) -> None:
        """Let the process end after its current call, and wait for that."""
        with suppress(OSError):  # it has ended already
            self._connection.send_bytes(b"")
        self._connection.close()
        self.process.join()


class WorkerTraceback(Exception):
    """The traceback of an exception in a worker process. It is the cause of the exception raised by `Future.result`."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _serve(connection: Connection, threads: int) -> None:
    """The main loop of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent stops this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    threadpool_limits(threads)
    connection.send_bytes(b"ready")
    while message := connection.recv_bytes():
        try:
            function, arguments = pickle.loads(message)
            answer = pickle.dumps((function(*arguments), None, ""))
        except BaseException as e:
            answer = pickle.dumps((None, _picklable(e), traceback.format_exc()))
        connection.send_bytes(answer)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _exit_with_parent() -> None:
    """End this process as soon as its parent is gone. A parent that is killed can't stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _context() -> Any:
    """The start method of worker processes.

    A fork of this process would inherit locked thread pools and couldn't use a GPU. A spawned process needs a second
    for its imports, and several that start together slow each other down. So one server process imports what workers
    need, and workers are forks of that server. It lives until this process ends. It doesn't import PyTorch, which would
    take seconds more.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffnet.geometry.preprocessing.worker"])
    return context


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes started in this context, the fork server among them, never receive Ctrl-C.

    The calling thread doesn't either. Another thread of this process still does.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The start of the tracker unblocks SIGINT, so it comes before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
