"""Preconditioned conjugate gradients for many systems at once, on packed ragged batches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from diffnet.ops.implicit.reference import at_vertices, inner_products, iterate, mesh_extents

Iteration: TypeAlias = Callable[[Tensor], Tensor]


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    b: Tensor,
    start: Tensor,
    inverse_diagonal: Tensor,
    ptr: Tensor,
    lengths: Sequence[int],
    *,
    tolerance: float,
    max_iterations: int,
    check_every: int,
    iteration: Callable[[Tensor, Tensor, Tensor, Tensor], Iteration] | None = None,
) -> Tensor:
    """Solve A u = b for each mesh and each of C channels, preconditioned by the diagonal of A (Saad 2003, alg. 9.1).

    Every mesh and channel stops by itself, so its result doesn't depend on the rest of the batch.

    Args:
        apply: u (V, C) → A u. For each channel, A is symmetric, positive definite and block-diagonal over the meshes.
        b: (V, C) float32 or float64
        start: (V, C), where the iterations start
        inverse_diagonal: (V, C). Where it is 0, u keeps the value of `start`. If that is 0 too, the row and the column
            take no part.
        ptr: (B+1,) int; mesh i owns the rows ptr[i]:ptr[i+1]
        lengths: the number of rows of each mesh
        tolerance: for the residual relative to b, both in the norm of the inverse diagonal
        max_iterations: the most iterations to do
        check_every: how many iterations to do between two checks of whether all have stopped. On a GPU, a check reads
            the result of the check before, so the GPU always has work queued. It may then do up to 2 · check_every
            iterations too many, which change nothing. With 0, nothing is read back: all max_iterations are done and
            there is no warning, as capturing them in a CUDA graph requires.
        iteration: another implementation of `reference.iterate`. It takes u, r, p and bound, and returns the function
            that does an iteration.

    Returns:
        u (V, C). If the inner products of a mesh and channel overflow or are NaN, there is no solution, and u is NaN.

    Warns:
        UserWarning: with the residual, if max_iterations didn't suffice. The last u is returned.
    """
    meshes = mesh_extents(ptr, lengths)
    u = start.clone()
    r = b - apply(u)
    p = inverse_diagonal * r
    remaining = inner_products(r, p, meshes)
    bound = tolerance**2 * inner_products(b, inverse_diagonal * b, meshes)
    if iteration is None:
        step: Iteration = functools.partial(iterate, apply, inverse_diagonal, meshes, u, r, p, bound)
    else:
        step = iteration(u, r, p, bound)
    flags = _DelayedFlags()
    for done in range(max_iterations):
        if check_every > 0 and done % check_every == 0 and flags.all_stopped(remaining > bound):
            break
        remaining = step(remaining)
    else:
        if check_every > 0 and (remaining > bound).any():
            share = torch.where(bound > 0, remaining / bound, 0).nan_to_num(0).max().sqrt().item() * tolerance
            warnings.warn(
                f"conjugate gradients stopped after {max_iterations} iterations at a relative residual of {share:.2g}, "
                f"above the tolerance of {tolerance:.2g}",
                stacklevel=2,
            )
    lost = torch.where((remaining + bound).isfinite(), 0.0, torch.nan).to(u.dtype)
    return u.add_(at_vertices(lost, len(u), meshes))


class _DelayedFlags:
    """Reads flags back from a GPU one check late, so that neither side waits for the other."""

    def __init__(self) -> None:
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None

    def all_stopped(self, running: Tensor) -> bool:
        """Return whether all have stopped: now on the CPU, at the check before on a GPU."""
        if not running.is_cuda:
            return not running.any()
        before = self.pending
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(running.any(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(running.device))  # the current device may be another one
        self.pending = flag, event
        if before is None:
            return False
        before[1].synchronize()
        return not before[0].item()
