"""Worker processes that share the cores of the machine, and the seconds of the phases of preprocessing in all of them.

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
import sys
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar

from threadpoolctl import threadpool_limits

from diffnet.geometry.errors import WorkerError

T = TypeVar("T")
Phase: TypeAlias = Literal["read", "check", "assemble", "solve", "write"]

NAME = "diffnet worker"  # of all worker processes
IDLE_SECONDS = 60  # a process that waits keeps 50 MB after meshes of 15,000 vertices, and 5 MB after small ones
# How much a process may grow after its first call, which imports modules. cholespy 2.2 never frees 32 bytes for each
# vertex of a mesh, and the allocator keeps memory after large meshes.
MAX_GROWTH = 256 << 20  # bytes
LOAD = Path("/proc/loadavg")
# How often a thread of OpenMP looks whether its work has come, before it sleeps. A quiet machine loses no time: pauses
# between parallel work are shorter. With the default of GNU's library, 300,000, each wait for a thread that has lost
# its core to another process takes as long as the other process may keep it, and an epoch 90 times as long.
SPINS = 30_000
PROTOCOL = 5  # of pickle. It copies an array once; the default of Python 3.11 copies it twice.
_idle: list[_Worker] = []  # the processes that wait for the next pool
_keeping = threading.Lock()
_seconds: defaultdict[str, float] = defaultdict(float)
_adding = threading.Lock()
_texts: set[str] = set()  # of the warnings that this process has given once


def warn_once(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, unless this process has warned with this text. Python forgets what it has shown when a filter changes."""
    if text not in _texts:
        _texts.add(text)
        warnings.warn(text, category, stacklevel=3)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Add the seconds of the block to a phase.

    read: meshes from their files; check: entries of the cache; assemble: everything but the eigenbasis; solve: the
    eigenbasis; write: entries of the cache
    """
    started = time.perf_counter()
    try:
        yield
    finally:
        add_phases({name: time.perf_counter() - started})


def add_phases(seconds: Mapping[str, float]) -> None:
    """Add what another process has measured."""
    with _adding:
        for name, more in seconds.items():
            _seconds[name] += more


def take_phases() -> dict[str, float]:
    """The seconds of each phase since the last call."""
    with _adding:
        seconds = dict(_seconds)
        _seconds.clear()
    return seconds


def available_cores() -> int:
    """The number of cores this process may use. The machine can have more.

    Processes that torchrun starts on one machine share the cores of that machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rank, ranks = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if rank.isdecimal() and ranks.isdecimal() and int(ranks) > 0:
        return max(1, len(range(int(rank), cores, int(ranks))))
    return cores


def choose_waiting() -> None:
    """Choose how threads of OpenMP wait for each other, unless the user has. Call this before PyTorch loads them.

    They sleep at once if other processes want the cores now, because a thread that waits for another one would keep a
    core from it. Else they look for SPINS rounds first. Results have the same bits.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}.isdisjoint(os.environ):
        return
    if _processes_beside() > (os.cpu_count() or 1) - available_cores():
        os.environ["OMP_WAIT_POLICY"] = "passive"
    else:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def _processes_beside() -> int:
    """The number of others that want a core at each of five moments. 0 on systems that don't tell."""
    counts = []
    with suppress(OSError):
        for _ in range(5):
            running, _, _ = LOAD.read_text().split()[3].partition("/")
            counts.append(int(running) - 1)  # this process is one of them
            time.sleep(0.002)
    return min(counts, default=0)


def rank_count() -> int:
    """The number of processes that torchrun has started, on all machines."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else 1


class WorkerPool:
    """Processes that run functions, one call each at a time, as a context manager.

    jobs: number of processes. Each starts when a call first needs it.
    threads: number of threads that each process may use

    Afterwards, processes wait IDLE_SECONDS for the next pool. A pool starts others if the current folder or the search
    path of modules has changed.

    A process that dies fails only the call it works on, with BrokenProcessPool. Another process replaces it. One that
    has grown by more than MAX_GROWTH since its first call ends, and is replaced, too (where there is /proc). An
    exception in the ``with`` block, such as Ctrl-C, stops all processes at once, since running calls may take minutes.

    Processes import the main script. A script must therefore use a pool under ``if __name__ == "__main__":``; otherwise
    calls raise WorkerError.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        self._threads = threads
        self._callers = ThreadPoolExecutor(jobs)  # each thread waits for one process
        self._idle: SimpleQueue[_Worker | None] = SimpleQueue()
        for _ in range(jobs):
            self._idle.put(None)  # a process that is not there yet
        self._workers: list[_Worker] = []
        self._starting = threading.Lock()
        self._stopped = False
        self._failure = ""  # of the first process that did not start

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
                for worker in self._workers:
                    worker.process.terminate()
        self._callers.shutdown()
        for worker in self._workers:
            if error is None and worker.is_sound:
                worker.keep()
            else:
                worker.close()

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        worker = self._idle.get()
        try:
            worker = worker or self._take()
            result = worker.call(self._threads, function, arguments)
            if worker.growth > MAX_GROWTH:
                with self._starting:
                    self._workers.remove(worker)
                worker.close()
                worker = None
            return result
        except BrokenProcessPool:
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def _take(self) -> _Worker:
        with self._starting:
            if self._stopped:
                raise CancelledError
            if self._failure:  # others would fail, too
                raise WorkerError(self._failure)
            worker = _idle_worker() or _Worker()
            self._workers.append(worker)
        try:
            worker.wait_until_ready()
        except WorkerError as e:
            self._failure = str(e)
            raise
        return worker


def stop_workers() -> None:
    """End all processes that wait for the next pool."""
    while worker := _idle_worker():
        worker.close()


def _idle_worker() -> _Worker | None:
    """A process that waits, unless there is none that can be used."""
    while True:
        with _keeping:
            if not _idle:
                return None
            worker = _idle.pop()
        if worker.is_usable():
            return worker
        worker.close()


def _forget_workers() -> None:
    """In a forked process: leave the parent's workers to the parent."""
    global _keeping
    _keeping = threading.Lock()  # another thread may have held it
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


class _Worker:
    """A worker process, as the parent process sees it."""

    def __init__(self) -> None:
        self._imports_from = os.getcwd(), tuple(sys.path)
        self._ready = False
        self._idle_since = 0.0
        self._first_bytes: int | None = None  # that the process held after its first call
        self.growth = 0  # bytes
        self.is_sound = True
        context = _context()
        self._connection, theirs = context.Pipe()
        # daemon: the interpreter stops the process at exit.
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True, name=NAME)
        try:
            with _interrupts_blocked():
                self.process.start()
        except RuntimeError:
            if multiprocessing.current_process().name == NAME:
                os._exit(1)  # a worker that imports a script without the guard; its parent raises WorkerError
            raise
        theirs.close()  # so that this end notices when the process dies

    def keep(self) -> None:
        """Let the process wait for the next pool."""
        self._idle_since = time.monotonic()
        with _keeping:
            _idle.append(self)

    def is_usable(self) -> bool:
        """Whether the process runs, and would import the same modules as one that starts now."""
        here = os.getcwd(), tuple(sys.path)
        waiting = time.monotonic() - self._idle_since < IDLE_SECONDS
        return waiting and self._imports_from == here and self.process.is_alive()

    def wait_until_ready(self) -> None:
        """Raises WorkerError if the process dies first."""
        if self._ready:
            return
        try:
            self._connection.recv_bytes()
            self._ready = True
        except (EOFError, OSError):
            self.is_sound = False
            raise WorkerError(
                "worker processes don't start: they import the main script, which must be a file and start them under "
                "`if __name__ == '__main__':`"
            ) from None

    def call(self, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        message = pickle.dumps((threads, function, arguments), PROTOCOL)
        try:
            self._connection.send_bytes(message)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as e:
            self.is_sound = False
            raise BrokenProcessPool("a worker process was killed (out of memory?)") from e
        result, error, trace, held, texts, seconds = pickle.loads(answer)
        add_phases(seconds)
        for text, category in texts:
            warn_once(text, category)
        if self._first_bytes is None:
            self._first_bytes = held
        self.growth = held - self._first_bytes
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


def _serve(connection: Connection) -> None:
    """The main loop of a worker process. It ends if no call comes for longer than the parent keeps the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent stops this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    connection.send_bytes(b"ready")
    limit = None
    while message := _next_message(connection):
        with warnings.catch_warnings(record=True) as caught:  # the parent gives those of all processes
            warnings.simplefilter("always")
            try:
                threads, function, arguments = pickle.loads(message)
                if threads != limit:
                    threadpool_limits(threads)
                    limit = threads
                answer = _answer(function(*arguments), None, "", caught)
            except BaseException as e:
                answer = _answer(None, _picklable(e), traceback.format_exc(), caught)
        connection.send_bytes(answer)


def _answer(result: Any, error: BaseException | None, trace: str, caught: list[warnings.WarningMessage]) -> bytes:
    texts = [(str(each.message), each.category) for each in caught]
    return pickle.dumps((result, error, trace, _process_bytes(), texts, take_phases()), PROTOCOL)


def _process_bytes() -> int:
    """The memory that this process doesn't share, in bytes. 0 where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def _next_message(connection: Connection) -> bytes:
    """The next call, or nothing if this process should end."""
    try:
        return connection.recv_bytes() if connection.poll(IDLE_SECONDS + 60) else b""
    except (EOFError, OSError):  # the parent is gone
        return b""


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
