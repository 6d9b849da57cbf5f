"""Making peers: what is compiled, what needs kernels, and what is measured of a backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

from diffnet.benchmarks.harness.registry import Unavailable
from diffnet.ops.common.backend import HAS_TRITON

Function = Callable[..., Tensor]


def compiled(function: Function) -> Function:
    """By torch.compile, for the shapes it is first called with."""

    ready: list[Function] = []

    def run(*arguments: Any) -> Tensor:
        if not ready:
            ready.append(torch.compile(function, dynamic=False))
        return ready[0](*arguments)

    return run


def forget_compiled() -> None:
    """Call this before making the peers of new sizes: torch.compile gives up on a function after so many of them."""
    torch._dynamo.reset()


def first_made(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """A peer that is made in its first call, so that what it holds is there only if it is measured."""
    made: list[Callable[[], object]] = []

    def run() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return run


def on_kernels(device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    """Unavailable where Triton's kernels can't run."""

    def checked() -> object:
        if not HAS_TRITON:
            raise Unavailable("triton isn't installed")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unavailable("kernels need a GPU, or TRITON_INTERPRET=1")
        return run()

    return checked


def backward_of(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    """The gradients of all leaves; the graph is made in the first call and kept."""
    kept: list[tuple[Tensor, Tensor]] = []

    def run() -> object:
        if not kept:
            # What is compiled would otherwise free its buffers in the first backward.
            with functorch.patch(donated_buffer=False):
                out = forward()
                grad = torch.randn_like(out)
                torch.autograd.grad(out, leaves, grad, retain_graph=True)
            kept.append((out, grad))
        out, grad = kept[0]
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return run


def leaf(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=device)).to(dtype).requires_grad_()
