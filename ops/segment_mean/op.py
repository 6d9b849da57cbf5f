"""The weighted mean over each mesh of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffnet.ops.common.backend import Backend, use_kernels
from diffnet.ops.common.checks import check_ptr, check_tensor
from diffnet.ops.common.ragged import row_lengths
from diffnet.ops.spectral.op import project_operator


def segment_mean(
    x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None = None, backend: Backend = "auto"
) -> Tensor:
    """Return the weighted mean of x over each mesh. It is differentiable in x and the weights.

    Args:
        x: (V, C) floating point
        weights: (V,) floating point, at least 0
        ptr: (B+1,) int32 or int64, the extents of the meshes, ascending from 0 to V
        lengths: the rows of each mesh as Python integers; they save plain PyTorch a read-back of `ptr` if B > 1
        backend: see `ops.common.backend.use_kernels`

    Returns:
        (B, C) in the dtype of x. A mesh without weight gives zeros.

    Raises:
        TypeError: for arguments that are not tensors or have other dtypes.
        ValueError: for other shapes, devices or extents.

    >>> x = torch.tensor([[1.0], [3.0], [5.0]])
    >>> segment_mean(x, torch.ones(3), torch.tensor([0, 2, 3]))
    tensor([[2.],
            [5.]])
    """
    check_tensor("x", x, ("V", "C"))
    check_tensor("weights", weights, (x.shape[0],), x.device)
    ptr = check_ptr(ptr, x.shape[0], lengths, x.device)
    if use_kernels(backend, x, weights) and len(ptr) > 2:
        # The sums are projections onto the constant function.
        ones = torch.ones(x.shape[0], 1, device=x.device)
        total = project_operator(x.float(), ones, weights, ptr)[:, 0]
        weight = project_operator(weights.float()[:, None], ones, None, ptr)[:, 0, 0]
    else:
        total, weight = _plain_sums(x, weights, ptr, lengths)
    # `where` passes a gradient to both branches, so the division must be finite in both.
    mean: Tensor = total / torch.where(weight > 0, weight, 1.0)[:, None]
    return mean.to(x.dtype)


def _plain_sums(x: Tensor, weights: Tensor, ptr: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The sums over each mesh of weights · x, (B, C), and of the weights, (B,), in the dtype of x."""
    weights = weights.to(x.dtype)
    if len(ptr) <= 2:
        meshes = len(ptr) - 1
        return (weights @ x)[None][:meshes], weights.sum()[None][:meshes]
    sizes = row_lengths(ptr, lengths)
    pieces = list(zip(torch.split(weights, sizes), torch.split(x, sizes), strict=True))
    return torch.stack([w @ rows for w, rows in pieces]), torch.stack([w.sum() for w, _ in pieces])
