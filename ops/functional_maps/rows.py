"""One positive definite system for each row of many functional maps, solved by a batched Cholesky factorization.

docs/functional_maps.md derives the algorithm and the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffnet.ops.common.backend import use_definition
from diffnet.ops.common.dispatch import differentiable, empty_like

BLOCK = 32
# Bytes of factors that are held at once. The matrix products of a chunk should keep all cores busy.
MAX_FACTOR_BYTES = {"cuda": 2**30, "cpu": 2**24}


def solve_rows(gram: Tensor, penalty: Tensor, right: Tensor, triton: bool = False) -> Tensor:
    """Solve (G_p + diag(d_pi)) x_pi = r_pi for all rows i of all pairs p.

    A few matrices are factored at a time, and nothing but the arguments and the result is kept for the backward pass,
    which factors them again. It is differentiable any number of times in all arguments. Entries of G count as
    independent of each other, so G should be a function such as A Aᵀ that stays symmetric.

    gram: (P, K, K) float32 or float64, the symmetric matrices G_p
    penalty, right: (P, R, K), the rows d_pi and r_pi
    triton: whether a kernel computes the factors of the blocks on the diagonal

    Returns (P, R, K). A row whose matrix is not positive definite is NaN.
    """
    if not triton and use_definition("auto"):  # transforms need plain operations
        return torch.linalg.solve_ex(gram[:, None] + torch.diag_embed(penalty), right[..., None]).result[..., 0]
    return _operator(gram, penalty, right, triton)


def _forward(gram: Tensor, penalty: Tensor, right: Tensor, triton: bool) -> Tensor:
    if triton:
        from diffnet.ops.functional_maps.kernels import inverse_factors
    else:
        from diffnet.ops.functional_maps.reference import inverse_factors
    pairs, rows, k = right.shape
    out = torch.empty_like(right, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    flat, diagonals, rights = out.view(-1, k), penalty.reshape(-1, k), right.reshape(-1, k)
    pair = torch.arange(pairs, device=right.device).repeat_interleave(rows)
    limit = MAX_FACTOR_BYTES["cuda" if right.is_cuda else "cpu"] // (right.element_size() * k * (k + 1))
    step = max(1, limit)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        flat[part] = _solve_chunk(gram, pair[part], diagonals[part], rights[part], inverse_factors)
    return out


def _solve_chunk(
    gram: Tensor, pair: Tensor, diagonals: Tensor, rights: Tensor, inverse_factors: Callable[[Tensor], Tensor]
) -> Tensor:
    """Solve N systems. pair: (N,) the matrix of each; diagonals, rights: (N, K). Returns (N, K).

    The factor L of G + diag(d) is computed in columns of BLOCK ("left-looking"). The right-hand side is one more row of
    the matrix, and so of L, where it becomes L⁻¹ r. Triangles on the diagonal are inverted, so that the rest of the
    work is matrix products.
    """
    n, k = rights.shape
    factor = rights.new_empty(n, k + 1, k)
    inverses = []
    blocks = [slice(start, min(start + BLOCK, k)) for start in range(0, k, BLOCK)]
    for block in blocks:
        low, high = block.start, block.stop
        size = high - low
        panel = rights.new_empty(n, k + 1 - low, size)
        torch.index_select(gram[:, low:, block], 0, pair, out=panel[:, :-1])
        panel[:, -1] = rights[:, block]
        panel[:, :size].diagonal(dim1=1, dim2=2).add_(diagonals[:, block])
        if low > 0:
            panel.baddbmm_(factor[:, low:, :low], factor[:, block, :low].mT, alpha=-1)
        inverses.append(inverse_factors(panel))
        factor[:, high:, block] = panel[:, size:] @ inverses[-1].mT
    x = factor[:, k, :]
    for block, inverse in zip(reversed(blocks), reversed(inverses), strict=True):
        rest = x[:, block, None]
        if block.stop < k:
            rest = rest - factor[:, block.stop : k, block].mT @ x[:, block.stop :, None]
        x[:, block] = (inverse.mT @ rest)[:, :, 0]
    return x


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    gram, penalty, _, ctx.triton = inputs
    ctx.save_for_backward(gram, penalty, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gram, penalty, x = ctx.saved_tensors
    adjoint = solve_rows(gram, penalty, grad, ctx.triton)
    need_gram, need_penalty, need_right, _ = ctx.needs_input_grad
    return (
        -(adjoint.mT @ x) if need_gram else None,
        -adjoint * x if need_penalty else None,
        adjoint if need_right else None,
        None,
    )


_operator = differentiable("diffnet::solve_rows", _forward, empty_like(2), _save, _backward)
