"""Implicit diffusion in plain PyTorch: the matrix M + t_c L, and an iteration of conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.precision import without_autocast
from diffnet.ops.sparse.csr import CsrArrays
from diffnet.ops.sparse.reference import csr_tensor, in_row_order


class System(NamedTuple):
    """The matrices M + t_c L of all channels c.

    csr, values: the Laplacian L (V, V) with values (nnz,)
    diagonal: (V,) of L
    mass: (V,) of M. Vertices with mass 0 take no part.
    time: (C,)
    ptr: (B+1,) int
    """

    csr: CsrArrays
    values: Tensor
    diagonal: Tensor
    mass: Tensor
    time: Tensor
    ptr: Tensor


def laplacian_product(system: System) -> Callable[[Tensor], Tensor]:
    """Return the function u (V, C) → L u."""
    csr, size = system.csr, len(system.mass)
    laplacian = csr_tensor(csr.indptr, csr.indices, system.values, (size, size))

    def multiply(u: Tensor) -> Tensor:
        with without_autocast(u):
            return in_row_order(csr, (laplacian @ u)[None])[0]

    return multiply


def inner_products(x: Tensor, y: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the inner products of x and y (V, C) for each mesh and channel, (B, C)."""
    if len(lengths) <= 1:
        return (x * y).sum(0, keepdim=True)
    return torch.stack([part.sum(0) for part in (x * y).split_with_sizes(lengths)])


def at_vertices(numbers: Tensor, rows: int, extents: Tensor) -> Tensor:
    """Repeat numbers (B, C) for each vertex, (V, C). For one mesh they are left (1, C), which broadcasts."""
    if len(extents) <= 1:
        return numbers
    return torch.repeat_interleave(numbers, extents, dim=0, output_size=rows)


def iterate(
    apply: Callable[[Tensor], Tensor],
    inverse_diagonal: Tensor,
    lengths: Sequence[int],
    extents: Tensor,
    u: Tensor,
    r: Tensor,
    p: Tensor,
    bound: Tensor,
    remaining: Tensor,
) -> Tensor:
    """Do one iteration (Saad 2003, algorithm 9.1), and return the next `remaining`.

    lengths, extents: the rows of each mesh, as Python integers and (B,)
    u, r, p: (V, C) the solution, the residual and the direction. They are updated in place.
    bound: (B, C). A mesh and channel whose inner product is at most this has stopped.
    remaining: (B, C) the inner products of r with the preconditioned r
    """
    running = remaining > bound
    q = apply(p)
    alpha = at_vertices(torch.where(running, remaining / inner_products(p, q, lengths), 0), len(p), extents)
    u.addcmul_(p, alpha)
    r.addcmul_(q, alpha, value=-1)
    z = inverse_diagonal * r
    after = torch.where(running, inner_products(r, z, lengths), remaining)
    torch.addcmul(z, p, at_vertices(torch.where(running, after / remaining, 0), len(p), extents), out=p)
    return after
