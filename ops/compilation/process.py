"""Compilation of kernels in a process of its own, while this process does something else."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile

import torch

from diffnet.ops.common.launcher import PATIENCE, announce_compilation
from diffnet.ops.compilation.launches import Launch
from diffnet.ops.compilation.worker import Job

_LOG = logging.getLogger("diffnet")
# Fewer missing kernels start no process, because the first step compiles them in several threads, in about 0.3 s each
# on an H200. The process imports PyTorch and Triton first. If all meshes are preprocessed already, training waits for
# it for more than 3 s.
FEWEST = 12
# A group of its own keeps Ctrl-C in a terminal away from the process, and all of it can be stopped together. In a
# session of its own, `nice` would mean nothing on systems that share processors among sessions. The job is read before
# the imports, so this process doesn't wait for them. With the paths of this process, it finds the same packages.
_COMMAND = """
import os, sys
os.setpgid(0, 0)
os.nice(5)
job = sys.stdin.buffer.read(int(sys.argv[1]))
sys.path[:] = sys.argv[2:]
from diffnet.ops.compilation.worker import main
main(job)
"""


@contextmanager
def compiled_meanwhile(launches: Iterable[Launch], capability: int) -> Iterator[None]:
    """Compile the kernels of launches into Triton's cache while the block runs. The end of the block waits for them.

    Threads of this process would slow down the block, because Python's global lock lets one thread run at a time. The
    other process has a lower priority and uses no GPU. An exception in the block stops it, and it ends if this process
    is killed. If it fails, a warning says why, and kernels are compiled when they are launched.

    An empty file in Triton's cache stands for each kernel of an earlier block. The process gets the launches of other
    kernels. It isn't started if these are fewer than `FEWEST`, and on other systems than Linux with CUDA.

    capability: the compute capability of the GPU, 90 for 9.0
    """
    missing = _missing(launches, capability)
    process = _start(list(missing.values()), capability) if len(missing) >= FEWEST else None
    try:
        yield
        if process is None or process.wait():
            _remember(missing)  # without a process, the first launches are about to compile them
    finally:
        if process is not None:
            process.stop()


def _missing(launches: Iterable[Launch], capability: int) -> dict[Path, Launch]:
    """The launches of kernels without a stamp, by the stamp that stands for the kernel."""
    if sys.platform != "linux" or torch.version.hip is not None:
        return {}
    from triton import __version__, knobs

    missing = {}
    for launch in launches:
        name = sha256(f"{__version__} {capability} {launch.variant}".encode()).hexdigest()[:32]
        stamp = Path(knobs.cache.dir) / f"diffnet-{name}"
        if not stamp.exists():
            missing[stamp] = launch
    return missing


def _remember(stamps: Iterable[Path]) -> None:
    try:
        for stamp in stamps:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.touch()
    except OSError as error:
        _LOG.warning("later runs may look for the same GPU kernels again, because a file can't be written: %s", error)


def _start(launches: list[Launch], capability: int) -> _Process | None:
    try:
        return _Process(Job(launches, capability))
    except OSError as error:
        _warn(str(error))
        return None


def _warn(reason: str) -> None:
    _LOG.warning("GPU kernels are compiled before the first step, because no other process can do it: %s", reason)


class _Process:
    """The process that compiles. Raises OSError if it can't be started."""

    def __init__(self, job: Job) -> None:
        pickled = pickle.dumps(job)
        self._output = TemporaryFile()  # noqa: SIM115 - `stop` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, str(len(pickled)), *sys.path],
            stdin=subprocess.PIPE,  # it stays open as long as this process lives
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        with suppress(BrokenPipeError):  # it has failed, and `wait` says why
            self._input.write(pickled)
            self._input.flush()

    def wait(self) -> bool:
        """Wait until it ends, and return whether it has compiled everything.

        To take over would compile kernels again that it is about to finish.
        """
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            announce_compilation()
            self._process.wait()
        if self._process.returncode != 0:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").split("\n")
            _warn(next((line for line in reversed(lines) if line), f"it ended with {self._process.returncode}"))
        return self._process.returncode == 0

    def stop(self) -> None:
        if self._process.poll() != 0:
            with suppress(ProcessLookupError):  # it has no group yet, or none of it is left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        with suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
