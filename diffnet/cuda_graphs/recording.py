"""First runs of modules on buffers, which are recorded afterwards."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import NotCounted
from diffnet.cuda_graphs.replica import check_reads_only
from diffnet.ops.common.cuda_graph import NotCapturable


def check_output(out: Any, rows: int) -> None:
    """Raise NotCapturable if the output of a network is not one tensor with this many rows."""
    if not isinstance(out, Tensor) or out.ndim == 0 or len(out) != rows:
        raise NotCapturable("its output is not one tensor with a row for each of the vertices, or of its `outputs_at`")


def with_gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[int]:
    """Run the backward pass and return the numbers of the inputs that get a gradient.

    Raises NotCapturable if a graph would lack a gradient, see `check_reads_only`.
    """
    check_reads_only(out, inputs)
    needed = [i for i, x in enumerate(inputs) if x.requires_grad] if out.requires_grad else []
    if not needed:
        return []
    seed = None if out.ndim == 0 else torch.zeros_like(out)  # with one, PyTorch imports SymPy for 2 s
    grads = torch.autograd.grad(out, [inputs[i] for i in needed], seed, allow_unused=True)
    return [i for i, grad in zip(needed, grads, strict=True) if grad is not None]


@contextmanager
def trial() -> Iterator[None]:
    """Turn errors of a first run on buffers into NotCapturable. Without graphs, the network runs or raises its own."""
    try:
        yield
    except (NotCounted, NotCapturable, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotCapturable(f"it can't run on buffers ({type(error).__name__}: {error})") from error


@contextmanager
def preserved(modules: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the buffers of modules and the random generators after the block."""
    buffers = list(modules.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        with forked_random_numbers(device):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


@contextmanager
def forked_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random generators of PyTorch, Python and NumPy after the block."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that old code uses
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


def host_random_states() -> Hashable:
    """The states of the random generators of Python and NumPy."""
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    return random.getstate(), np.asarray(keys).tobytes(), position


def generator_of(device: torch.device) -> torch.Generator:
    """The random generator of a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
