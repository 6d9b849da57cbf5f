"""The pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from diffnet.geometry.processes import WorkerPool, WorkerTraceback


def test_results_errors_and_deaths() -> None:
    """One pool for all of these, since starting processes takes time. Each call fails or succeeds for itself."""
    before = set(multiprocessing.active_children())
    with WorkerPool(2, 1) as pool:
        assert set(multiprocessing.active_children()) <= before  # processes start with the first calls
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
    assert set(multiprocessing.active_children()) <= before


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

    before = set(multiprocessing.active_children())
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.perf_counter() - started < 60
    assert set(multiprocessing.active_children()) <= before
