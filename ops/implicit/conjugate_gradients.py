"""Preconditioned conjugate gradients for many systems at once, on packed ragged batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

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

    apply: u (V, C) → A u, where channel c of A is symmetric, positive definite and block-diagonal over the meshes
    b, start, inverse_diagonal: (V, C) float32 or float64. Where the inverse diagonal is 0, u stays what it was in
        `start`, and if that is 0 the row and the column take no part.
    ptr: (B+1,) int, and lengths: mesh b owns the rows ptr[b]:ptr[b+1], which are lengths[b]
    tolerance: of the residual against b, both in the norm of the inverse diagonal. Every mesh and channel stops by
        itself, so that none depends on what it is packed or solved together with.
    check_every: iterations between two looks at whether all have stopped. A look reads what the look before found, so
        a GPU always has work queued, and it may do 2 · check_every iterations too many, which change nothing.
        With 0 nothing is ever read back: all max_iterations are done and no warning is given, as capturing them in a
        CUDA graph requires.
    iteration: makes of u, r, p (V, C) and the bound (B, C) another way to do an iteration: in place, and of the inner
        products of r with the preconditioned r (B, C) → the next ones

    Warns, naming the residual, where max_iterations weren't enough; what they have reached is returned.
    """
    sizes = list(lengths)
    extents = torch.diff(ptr) if len(sizes) > 1 else None

    def dots(x: Tensor, y: Tensor) -> Tensor:
        """(B, C) the inner products of each mesh and channel."""
        if extents is None:
            return (x * y).sum(0, keepdim=True)
        return torch.stack([part.sum(0) for part in torch.split(x * y, sizes)])

    def spread(x: Tensor) -> Tensor:
        """(B, C) → at every vertex of the mesh, as broadcasting sees it."""
        return x if extents is None else torch.repeat_interleave(x, extents, dim=0, output_size=len(b))

    def plain(remaining: Tensor) -> Tensor:
        running = remaining > bound
        q = apply(p)
        alpha = spread(torch.where(running, remaining / dots(p, q), 0))
        u.addcmul_(p, alpha)
        r.addcmul_(q, alpha, value=-1)
        z = inverse_diagonal * r
        after = torch.where(running, dots(r, z), remaining)
        torch.addcmul(z, p, spread(torch.where(running, after / remaining, 0)), out=p)
        return after

    u = start.clone()
    r = b - apply(u)
    p = inverse_diagonal * r
    remaining = dots(r, p)
    bound = tolerance**2 * dots(b, inverse_diagonal * b)
    step = iteration(u, r, p, bound) if iteration else plain
    looks = _Looks()
    for done in range(max_iterations):
        if check_every > 0 and done % check_every == 0 and looks.all_stopped(remaining > bound):
            return u
        remaining = step(remaining)
    if check_every > 0 and (remaining > bound).any():
        share = torch.where(bound > 0, remaining / bound, 0).max().sqrt().item() * tolerance
        warnings.warn(
            f"conjugate gradients stopped after {max_iterations} iterations at a relative residual of {share:.2g}, "
            f"above the tolerance of {tolerance:.2g}",
            stacklevel=2,
        )
    return u


class _Looks:
    """Reads flags back from a GPU one look late, so that neither waits for the other."""

    def __init__(self) -> None:
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None

    def all_stopped(self, running: Tensor) -> bool:
        """Whether none was running, now on the CPU, or at the look before on a GPU."""
        if not running.is_cuda:
            return not running.any()
        before = self.pending
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(running.any(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.pending = flag, event
        if before is None:
            return False
        before[1].synchronize()
        return not before[0].item()
