"""Diffusion by one implicit Euler step, (M + t L) u = M x, without an eigenbasis."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_finite, check_ptr, check_tensor, nonnegative
from diffnet.ops.common.compiler import is_batched
from diffnet.ops.common.dispatch import differentiable, empty_like
from diffnet.ops.common.precision import sum_dtype
from diffnet.ops.common.ragged import row_lengths
from diffnet.ops.implicit import reference
from diffnet.ops.implicit.reference import System, at_vertices, inner_products, iterate
from diffnet.ops.sparse.csr import CsrArrays, row_of_each
from diffnet.ops.sparse.op import SparseMatrix, check_is_matrix, diagonal, sddmm_operator, spmm_operator
from diffnet.ops.sparse.pattern import check_square, csr_arrays


def implicit_diffusion(
    x: Tensor,
    time: Tensor,
    laplacian: SparseMatrix,
    mass: Tensor,
    ptr: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
    check_every: int = 8,
    backend: Backend = "auto",
) -> Tensor:
    """Diffuse each channel for its own time by one implicit Euler step, (M + t_c L) u_c = M x_c.

    The error of u is about √κ times the tolerance. The condition number κ is about 1 + t λ, where λ ~ 1/(edge length)²
    is the largest eigenvalue. The number of iterations grows as √κ.

    Vertices without mass take no part, as in `geometry.eigenbasis`: they keep their x and pass nothing on.

    Differentiable any number of times in x, time, mass and the values of the Laplacian; the gradient of the values
    assumes that the Laplacian is symmetric. The backward pass is one more solve with the same matrix (the implicit
    function theorem), whatever the number of iterations. There are no forward-mode derivatives. Low precision is
    computed in float32.

    A mesh with a value in x that is NaN, infinite or too large to be squared is NaN in this channel, at all vertices
    with mass. Other meshes and channels are not affected. On a GPU, a negative or NaN time gives NaN in its channel,
    and a NaN mass gives NaN in its mesh, because values there are checked in debug mode only (`DIFFNET_DEBUG=1`).

    Args:
        x: (V, C) floating point
        time: (C,) floating point, finite and at least 0
        laplacian: (V, V), one set of values, symmetric positive semi-definite and block-diagonal over the meshes
        mass: (V,) floating point, finite
        ptr: (B+1,) int32 or int64; mesh b owns the rows ptr[b]:ptr[b+1]
        lengths: the number of rows of each mesh. Without it, `ptr` is read back, which waits for a GPU.
        tolerance, max_iterations, check_every: see `conjugate_gradients`, which warns if the iterations don't suffice
        backend: see `use_kernels`

    Returns:
        (V, C) in the dtype of x

    Raises:
        TypeError: if an argument is no tensor or has a wrong dtype.
        ValueError: if shapes or devices don't match; nothing is broadcast. On the CPU and in debug mode also for a time
            that is negative or not finite, and for a mass that is not finite.

    >>> import torch
    >>> edge = SparseMatrix.from_torch(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).to_sparse_csr())
    >>> x, time = torch.tensor([[3.0], [0.0]]), torch.tensor([1.0])
    >>> implicit_diffusion(x, time, edge, torch.ones(2), torch.tensor([0, 2]))
    tensor([[2.],
            [1.]])
    """
    _refuse_transforms(x, time, mass, laplacian)
    check_tensor("x", x, ("V", "C"))
    (rows, channels), device = x.shape, x.device
    check_tensor("time", time, (channels,), device)
    check_tensor("mass", mass, (rows,), device)
    check_is_matrix("laplacian", laplacian)
    pattern = laplacian.pattern
    check_square("laplacian", pattern, rows, device)
    check_tensor("the values of the laplacian", laplacian.values, (pattern.nnz,), device)
    ptr = check_ptr(ptr, rows, lengths, device)
    time = nonnegative("time", time)
    check_finite("mass", mass)
    dtype = sum_dtype(x, laplacian.values)
    features, mass = x.to(dtype), mass.to(dtype)
    live = ~(mass[:, None] <= 0)  # also where the mass is NaN, so that it shows in the result
    values = laplacian.values.to(dtype)
    triton = use_kernels(backend, values, features)
    solution: Tensor = _operator(
        list(csr_arrays(pattern, triton)),
        ptr,
        diagonal(pattern, values.detach()),
        values,
        torch.where(live[:, 0], mass, 0),
        time.to(dtype),
        torch.where(live, mass[:, None] * features, 0),
        row_lengths(ptr, lengths),
        tolerance,
        max_iterations,
        check_every,
        triton,
    )
    return torch.where(live, solution, features).to(x.dtype)


def _refuse_transforms(*arguments: Any) -> None:
    """Raise RuntimeError under a transform, and in forward mode."""
    if torch.compiler.is_compiling():
        return
    tensors = [a.values if isinstance(a, SparseMatrix) else a for a in arguments]
    if forward_ad._current_level >= 0 or is_batched(*(t for t in tensors if isinstance(t, Tensor))):
        raise RuntimeError(
            "implicit_diffusion has no forward-mode derivatives and doesn't work under vmap and other transforms of "
            "torch.func, which batched gradients use, too; torch.autograd.grad differentiates it any number of times, "
            "one gradient at a time"
        )


def conjugate_gradients(
    structure: Sequence[Tensor],
    ptr: Tensor,
    diagonal: Tensor,
    values: Tensor,
    mass: Tensor,
    time: Tensor,
    b: Tensor,
    lengths: Sequence[int],
    tolerance: float,
    max_iterations: int,
    check_every: int,
    triton: bool,
) -> Tensor:
    """Solve (M + t_c L) u_c = b_c on the vertices with mass, preconditioned by the diagonal (Saad 2003, alg. 9.1).

    Every mesh and channel stops by itself, so its result doesn't depend on the rest of the batch.

    b: (V, C) float32 or float64
    tolerance: for the residual relative to b, both in the norm of the inverse diagonal
    check_every: how many iterations to do between two checks of whether all have stopped. On a GPU, a check reads the
        result of the check before, so up to 2 · check_every iterations are too many, which change nothing. With 0,
        nothing is read back and there is no warning, as capturing in a CUDA graph requires.

    Returns u (V, C), 0 without mass. If the inner products of a mesh and channel overflow or are NaN, u is NaN there.
    Warns with the residual if max_iterations didn't suffice.
    """
    system = System(CsrArrays(*structure), values, diagonal, mass, time, ptr)
    if triton:
        from diffnet.ops.implicit import kernels

        multiply = kernels.laplacian_product(system)
    else:
        multiply = reference.laplacian_product(system)
    mass, diagonal, extents = mass[:, None], diagonal[:, None], torch.diff(ptr)

    def apply(u: Tensor) -> Tensor:
        return torch.addcmul(mass * u, multiply(u), time)

    # Both are 0 at vertices without mass, so these take no part. L is positive semi-definite only up to rounding.
    b = (b * (mass > 0)).contiguous()  # kernels read it row by row
    inverse_diagonal = torch.where(mass > 0, 1 / (mass + time * diagonal.clamp(min=0)), 0)
    u = b * torch.where(mass > 0, 1 / mass, 0)  # the solution for t = 0
    r = b - apply(u)
    p = inverse_diagonal * r
    remaining = inner_products(r, p, lengths)
    bound = tolerance**2 * inner_products(b, inverse_diagonal * b, lengths)
    if triton:
        step = kernels.iteration(system, u, r, p, bound)
    else:
        step = functools.partial(iterate, apply, inverse_diagonal, lengths, extents, u, r, p, bound)
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
                stacklevel=1,
            )
    lost = torch.where((remaining + bound).isfinite(), 0.0, torch.nan).to(u.dtype)
    return u.add_(at_vertices(lost, len(u), extents))


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    structure, *tensors, _, lengths, tolerance, max_iterations, check_every, triton = inputs
    ctx.settings = lengths, tolerance, max_iterations, check_every, triton
    ctx.save_for_backward(*structure, *tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *structure, ptr, diagonal, values, mass, time, u = ctx.saved_tensors
    *_, triton = ctx.settings
    need_values, need_mass, need_time, need_b = ctx.needs_input_grad[3:7]
    w = _operator(structure, ptr, diagonal, values, mass, time, grad, *ctx.settings)
    if torch.is_grad_enabled():  # the derivative will be differentiated
        return [None] * len(structure), None, None, *_plain_gradients(structure, values, time, u, w), w, *[None] * 5
    # Only derivatives of the operators below need the transpose. Nothing is differentiated here, so any arrays will do.
    arrays = [*structure, *structure, ptr.new_empty(0)]
    grad_values = grad_mass = grad_time = None
    if need_values:
        grad_values = -sddmm_operator(arrays, (w * time)[None], u[None], triton)[0]
    if need_mass:
        grad_mass = -(w * u).sum(1)
    if need_time:
        grad_time = -(w * spmm_operator(arrays, values[None], u[None], False, False, triton)[0]).sum(0)
    return [None] * len(structure), None, None, grad_values, grad_mass, grad_time, w if need_b else None, *[None] * 5


def _plain_gradients(
    structure: Sequence[Tensor], values: Tensor, time: Tensor, u: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the values, the mass and the time in plain PyTorch, which has derivatives of any order."""
    csr = CsrArrays(*structure)
    rows = row_of_each(csr.indptr, csr.indices, csr.row_order)
    of_rows, of_columns = F.embedding(rows, w), F.embedding(csr.indices, u)  # their backward adds up in a fixed order
    pairs = of_rows * of_columns
    return -pairs @ time, -(w * u).sum(1), -(values[:, None] * pairs).sum(0)


_operator = differentiable("diffnet::implicit_solve", conjugate_gradients, empty_like(6), _save, _backward)
