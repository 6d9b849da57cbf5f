"""Copies of the process of a test. They have what the test has replaced, and need not import PyTorch again."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver

import torch


def ends_of_copies(work: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> list[int | None]:
    """Call work(*own) in one process for each of `arguments`, at the same time.

    They see no GPU, because CUDA does not work in copies.

    Returns the exit codes: 1 after an exception, and −9 for a process that is killed.
    """
    context = multiprocessing.get_context("fork")
    copies = [context.Process(target=_in_copy, args=(work, own)) for own in arguments]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*use of fork")
        for copy in copies:
            copy.start()
    for copy in copies:
        copy.join(120)
        copy.kill()
        copy.join()
    return [copy.exitcode for copy in copies]


def forget(package: str) -> None:
    """Let the next import of a package load it again. In a copy, because objects of both would not fit together."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]


def _in_copy(work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    # The server that forks workers belongs to the process that was copied. There is no public way to start another one.
    forkserver._forkserver.__init__()  # type: ignore[misc]
    work(*arguments)
