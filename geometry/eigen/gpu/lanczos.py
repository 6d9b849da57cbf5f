"""Block Lanczos iteration for several operators at once, on a device.

It differs from `KrylovSpace` in that each block is orthogonalized against the whole basis, so no step depends on
numbers that the CPU would have to read. The CPU queues all steps at once, and works on small matrices only at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from diffnet.geometry.eigen.gpu.shift_invert import CHUNK, BatchedShiftInvert
from diffnet.geometry.eigen.problem import Array, Pairs
from diffnet.ops.common.backend import HAS_TRITON
from diffnet.ops.functional_maps import reference

Map: TypeAlias = Callable[..., Iterator[Any]]


def largest_pairs(operator: BatchedShiftInvert, wanted: int, tolerance: float, on_cores: Map) -> tuple[Array, Tensor]:
    """The largest eigenpairs of each operator that are orthogonal to the constant.

    wanted: number of pairs
    tolerance: the largest residual, relative to the value
    on_cores: `map`, or the `map` of a thread pool

    Returns values (components, wanted), descending, and orthonormal rows (components, wanted, size). The values of
    operators whose pairs haven't converged are not a number.
    """
    block, count = operator.block, len(operator.sizes)
    enough = wanted * 5 // 2 + 14 * block  # usually; there is room for a quarter more
    rank = min(operator.sizes) - 1
    capacity = max(min(enough * 5 // 4 + 4 * block, rank - block), wanted + 2 * block) // block * block
    basis = torch.empty(count * operator.size, 1 + capacity + block, dtype=torch.float64, device=operator.device)
    basis[:, :1] = operator.constant.view(-1, 1)
    first = operator.apply(operator.start(block)).mT.reshape(-1, block)
    for _ in range(2):  # twice, because of rounding errors
        first, _ = _orthogonalized(count, basis[:, :1], first)
    basis[:, 1 : 1 + block], _ = _orthonormalized(count, first)
    projected: Array = np.zeros((count, capacity + block, capacity + block))
    found: dict[int, Pairs] = {}
    size = 0
    missing = wanted
    while missing and size < capacity:
        target = size + missing // 2 if size else enough - block  # the last pairs converge quickly
        steps = []
        start = size
        while size < min(target + block, capacity):
            steps.append(_extend(operator, basis, size))
            size += block
        on_host = (torch.stack(tensors).cpu().numpy() for tensors in zip(*steps, strict=True))
        for at, (own, coupling) in enumerate(zip(*on_host, strict=True)):
            lo = start + at * block
            projected[:, lo : lo + block, lo : lo + block] = own
            projected[:, lo + block : lo + 2 * block, lo : lo + block] = coupling
        left = [i for i in range(count) if i not in found and np.isfinite(projected[i]).all()]
        missing = 0
        for i, (values, coordinates) in zip(
            left, on_cores(_ritz, (projected[i, :size, :size] for i in left)), strict=True
        ):
            values, coordinates = values[:wanted], coordinates[:, :wanted]
            last = projected[i, size : size + block, size - block : size] @ coordinates[-block:]
            done = int((np.linalg.norm(last, axis=0) <= tolerance * values).sum())
            missing = max(missing, wanted - done)
            if done == wanted:
                found[i] = values, coordinates
    values, together = np.full((count, wanted), np.nan), np.zeros((count, size, wanted))
    for i, (own, coordinates) in found.items():
        values[i], together[i, : len(coordinates)] = own, coordinates
    space = basis.view(count, operator.size, -1)[:, :, 1 : 1 + size]
    rows = operator.from_host(together).mT @ space.mT
    for i in set(range(count)) - found.keys():
        rows[i] = torch.eye(wanted, operator.size)  # orthonormal, as the others
    return values, rows


def _extend(operator: BatchedShiftInvert, basis: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Apply the operators to the block at `size`, and write the part that is orthogonal to the basis after it.

    Returns the operators on the block, and the coupling of the next block to it, (components, block, block) each.
    """
    block, count = operator.block, len(operator.sizes)
    lo, hi = 1 + size, 1 + size + block
    result = operator.factor.solve(basis[:, lo:hi])
    # The result has large parts along the last two blocks, and small ones along the others. After large parts are
    # removed, rounding leaves some, so these are removed twice.
    result, own = _orthogonalized(count, basis[:, max(lo - block, 1) : hi], result)
    result, rest = _orthogonalized(count, basis[:, :hi], result)
    basis[:, hi : hi + block], coupling = _orthonormalized(count, result)
    return own[:, -block:] + rest[:, -block:], coupling


def _orthogonalized(count: int, known: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Columns without their part in the space of known orthonormal ones, and the coordinates of this part."""
    overlap = _products(count, known, columns)
    columns = torch.baddbmm(_split(columns, count), _split(known, count), overlap, alpha=-1).flatten(0, 1)
    return columns, overlap


def _orthonormalized(count: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of columns = Q R, by Cholesky QR, repeated once for accuracy. Not a number where that fails."""
    upper = torch.eye(columns.shape[1], dtype=columns.dtype, device=columns.device).expand(count, -1, -1)
    for _ in range(2):
        gram = _products(count, columns, columns)
        inverse = _kernels(columns).inverse_factors(gram)
        columns = (_split(columns, count) @ inverse.mT).flatten(0, 1)
        upper = inverse @ gram @ upper
    return columns, upper


def _kernels(columns: Tensor) -> ModuleType:
    if HAS_TRITON and columns.is_cuda:
        from diffnet.ops.functional_maps import kernels

        return kernels
    return reference


def _products(count: int, one: Tensor, other: Tensor) -> Tensor:
    """The scalar products (components, one, other) of columns, added up in a fixed order."""
    chunks = len(one) // CHUNK
    sums = _split(one, chunks).mT @ _split(other, chunks)
    return sums.view(count, -1, *sums.shape[1:]).sum(1)


def _split(columns: Tensor, parts: int) -> Tensor:
    """Columns (n, c) as (parts, n / parts, c), without a copy."""
    return columns.view(parts, -1, columns.shape[1])


def _ritz(projected: Array) -> Pairs:
    """Eigenvalues, descending, and eigenvectors of a matrix, of which the lower half is read."""
    values, coordinates = np.linalg.eigh(projected)
    return values[::-1], coordinates[:, ::-1]
