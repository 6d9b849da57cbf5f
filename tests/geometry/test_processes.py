"""The pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from diffnet.geometry import processes
from diffnet.geometry.errors import WorkerError
from diffnet.geometry.processes import WorkerPool, WorkerTraceback, stop_workers

pytestmark = pytest.mark.usefixtures("one_thread")


def workers() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def process_of_a_call(threads: int = 1) -> int:
    with WorkerPool(1, threads) as pool:
        return pool.submit(os.getpid).result()


def test_results_errors_and_deaths() -> None:
    """One pool for all of these, since starting processes takes time. Each call fails or succeeds for itself."""
    stop_workers()
    with WorkerPool(2, 1) as pool:
        assert not workers()  # processes start with the first calls
        first = pool.submit(os.getpid).result()
        assert first != os.getpid()
        assert pool.submit(sum, range(5), 7).result() == 17
        assert len(pool.submit(bytes, 10**7).result()) == 10**7  # more than a pipe holds

        with pytest.raises(ZeroDivisionError) as e:
            pool.submit(divmod, 1, 0).result()
        assert isinstance(e.value.__cause__, WorkerTraceback)
        assert "Traceback" in str(e.value.__cause__)
        with pytest.raises(AttributeError):
            pool.submit(lambda: 0).result()  # can't be pickled
        with pytest.raises((TypeError, AttributeError)):
            pool.submit(eval, "(i for i in range(3))").result()  # the result can't be pickled

        dying, working = pool.submit(os._exit, 3), pool.submit(sum, [1, 2])
        with pytest.raises(BrokenProcessPool, match="killed"):
            dying.result()
        assert working.result() == 3
        assert [pool.submit(abs, -i).result() for i in range(5)] == list(range(5))
        dead = pool.submit(os._exit, 3)
    with pytest.raises(BrokenProcessPool, match="killed"):
        dead.result()
    assert 1 <= len(workers()) <= 2  # those that live wait for the next pool


def test_calls_that_fail_alike_have_errors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that several calls raise would collect the traceback of each."""

    def fail(worker: Any) -> None:
        raise WorkerError("worker processes don't start")

    # Private: no process of a test's own fails to start.
    monkeypatch.setattr(processes._Worker, "wait_until_ready", fail)
    with WorkerPool(1, 1) as pool:
        calls = [pool.submit(abs, -1) for _ in range(3)]
        errors = [call.exception() for call in calls]
    assert [str(error) for error in errors] == ["worker processes don't start"] * 3
    assert len({id(error) for error in errors}) == 3


def test_processes_stay_for_later_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_workers()
    first = process_of_a_call()
    threads = "max(x['num_threads'] for x in __import__('threadpoolctl').threadpool_info())"
    with WorkerPool(1, 2) as pool:
        assert pool.submit(os.getpid).result() == first
        assert pool.submit(eval, threads).result() == 2
    with WorkerPool(1, 1) as pool:
        assert pool.submit(eval, threads).result() == 1
    os.kill(first, signal.SIGKILL)
    while first in workers():
        time.sleep(0.01)
    second = process_of_a_call()  # a process that died in between fails no call
    assert second != first
    monkeypatch.chdir(tmp_path)
    with WorkerPool(1, 1) as pool:
        assert pool.submit(os.getcwd).result() == str(tmp_path)
        assert pool.submit(os.getpid).result() != second
    monkeypatch.setattr(processes, "KEPT_SECONDS", 0)
    third = process_of_a_call()
    assert process_of_a_call() != third
    stop_workers()
    assert not workers()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory of processes in /proc")
def test_a_process_that_keeps_much_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with WorkerPool(1, 1) as pool:
        first = pool.submit(keep_bytes, 1000).result()
        monkeypatch.setattr(processes, "MAX_GROWTH", 150 << 20)
        assert pool.submit(keep_bytes, 200 << 20).result() == first
        second = pool.submit(keep_bytes, 1000).result()
        assert second != first
        assert pool.submit(keep_bytes, 1000).result() == second
        assert {worker.process.pid for worker in pool._workers} == {second}  # private: those to end with the pool
    assert first not in workers()


def keep_bytes(count: int) -> int:
    """Keep memory for good, as a leak does. Returns the number of the process."""
    _leak.append(b"1" * count)
    return os.getpid()


_leak: list[bytes] = []


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = """
import os, signal
from diffnet.geometry.processes import WorkerPool

if __name__ == "__main__":
    with WorkerPool(1, 1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "script.py"]
    # This also waits for the end of the worker, which has the same standard output.
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path)
    assert ran.returncode == -signal.SIGKILL
    assert ran.stderr == ""
    assert int(ran.stdout) > 0


def test_a_forked_process_leaves_the_workers_to_its_parent() -> None:
    """As in a DataLoader with workers."""
    first = process_of_a_call()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=send_process_of_a_call, args=(theirs,))
    child.start()
    theirs.close()  # so that the end of the child would end the wait
    assert ours.poll(60)
    assert ours.recv() != first
    child.join()
    assert process_of_a_call() == first


def send_process_of_a_call(connection: Any) -> None:
    try:
        connection.send(process_of_a_call())
    except OSError as e:
        connection.send(e)  # Python's fork server serves the process that started it only


def test_an_interrupt_stops_running_calls() -> None:
    """Calls that wait with arguments of more than a pipe holds don't keep the pool from stopping."""

    def interrupted() -> None:
        with WorkerPool(1, 1) as pool:
            pool.submit(os.getpid).result()
            busy = pool.submit(time.sleep, 100)
            waiting = pool.submit(len, bytes(10**7))
            time.sleep(0.5)
            assert busy.running()
            assert not waiting.running()
            raise KeyboardInterrupt

    stop_workers()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.perf_counter() - started < 60
    assert not workers()
    assert process_of_a_call() in workers()


def test_a_warning_of_several_workers_is_given_once() -> None:
    with pytest.warns(UserWarning, match="^of a worker$") as found, WorkerPool(2, 1) as pool:
        wait([pool.submit(warnings.warn, "of a worker") for _ in range(6)])
    assert len(found) == 1
