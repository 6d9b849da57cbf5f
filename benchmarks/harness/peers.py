"""Builds the peers of a case: compiled functions, backward passes, and checks of the requirements of a peer."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch

from diffnet.benchmarks.harness.registry import Run, Unavailable
from diffnet.ops.common.backend import HAS_TRITON

Function = Callable[..., Tensor]


def compiled(function: Function) -> Function:
    """The function under torch.compile, compiled in its first call for the shapes of that call."""

    ready: list[Function] = []

    def run(*arguments: Any) -> Tensor:
        if not ready:
            ready.append(torch.compile(function, dynamic=False))
        return ready[0](*arguments)

    return run


def first_made(make: Callable[[], Run]) -> Run:
    """A peer that is built in its first call, so that it holds memory only if it is measured."""
    made: list[Run] = []

    def run() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return run


def on_kernels(device: torch.device, run: Run) -> Run:
    """A peer that raises `Unavailable` if Triton kernels can't run on the device."""

    def checked() -> object:
        if not HAS_TRITON:
            raise Unavailable("triton isn't installed")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unavailable("kernels need a GPU, or TRITON_INTERPRET=1")
        return run()

    return checked


def where_implemented(run: Run) -> Run:
    """A peer that raises `Unavailable` if PyTorch has no implementation for its dtype or device."""

    def checked() -> object:
        try:
            return run()
        except RuntimeError as error:  # NotImplementedError is a RuntimeError
            if "not implemented" in str(error) or "to be Float" in str(error):
                raise Unavailable(str(error).splitlines()[0]) from error
            raise

    return checked


def backward_of(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Run:
    """A peer that computes the gradients of all leaves. Its first call builds the graph and keeps it."""
    kept: list[tuple[Tensor, Tensor]] = []

    def run() -> object:
        if not kept:
            # Compiled functions would otherwise free their buffers in the first backward.
            with functorch.patch(donated_buffer=False):
                out = forward()
                grad = torch.randn_like(out)
                torch.autograd.grad(out, leaves, grad, retain_graph=True)
            kept.append((out, grad))
        out, grad = kept[0]
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return run


def both_passes(
    device: torch.device,
    forwards: Mapping[str, Callable[[], Tensor]],
    leaves: Sequence[Tensor],
    kernels: Collection[str] = ("triton",),
) -> Iterator[tuple[str, dict[str, Run]]]:
    """The pass ("forward", then "backward") and its peers.

    leaves: the tensors whose gradients the backward pass computes
    kernels: names of the peers that run Triton kernels
    """
    for step in ("forward", "backward"):
        peers: dict[str, Run] = {}
        for name, forward in forwards.items():
            run = forward if step == "forward" else backward_of(forward, leaves)
            peers[name] = on_kernels(device, run) if name in kernels else run
        yield step, peers


def leaf(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal random numbers times `scale`, as a tensor that requires gradients."""
    return (scale * torch.randn(*shape, device=device)).to(dtype).requires_grad_()
