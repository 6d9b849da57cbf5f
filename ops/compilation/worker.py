"""The process that compiles kernels into Triton's cache. `process.py` starts it.

It uses no GPU, and it ends when its standard input is closed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from diffnet.ops.compilation.launches import Launch

# The largest kernel takes a quarter of the time of all together, so more processes gain nothing. Threads would wait for
# Python's global lock.
MAX_PROCESSES = 8


class Job(NamedTuple):
    """The kernels to compile.

    capability: the compute capability of the GPU, 90 for 9.0
    """

    launches: list[Launch]
    capability: int


class AbsentGPU:
    """The part of a driver of Triton that compilation needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def main(pickled: bytes) -> None:
    from triton.runtime import driver

    threading.Thread(target=_end_with_parent, daemon=True).start()
    job: Job = pickle.loads(pickled)
    driver.set_active(AbsentGPU(job.capability))
    # Triton hashes its own files for the first kernel, for a second. Forked processes then know the result.
    job.launches[0].compile()
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        compiled = [pool.submit(launch.compile) for launch in job.launches[1:]]
        for future in compiled:
            future.result()


def _end_with_parent() -> None:
    """End this process and its own processes as soon as the parent closes its end of the pipe, or is gone."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
