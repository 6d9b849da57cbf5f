"""A linear layer whose weights are a sparse matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diffnet.ops import Backend, Pattern, spmm
from diffnet.ops.sparse.pattern import check_is_pattern


class PatternModule(nn.Module):
    """Base class of modules with a pattern, which moves along with their weight."""

    pattern: Any
    weight: nn.Parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], *arguments: Any, **options: Any) -> PatternModule:
        super()._apply(fn, *arguments, **options)  # type: ignore[no-untyped-call]
        self.pattern = self.pattern.to(self.weight.device)
        return self


class SparseLinear(PatternModule):
    """y = x Wᵀ + bias, where W has weights only at the entries of a pattern.

    Args:
        pattern: (out_features, in_features), such as `Pattern.random(out_features, in_features, density=0.1)`. It is
            part of the state dict, so a network with another pattern of as many entries loads.
        bias: whether to add a bias.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    The parameter `weight` is (nnz,). Its initial values are those of `nn.Linear` for the entries of each row.

    >>> layer = SparseLinear(Pattern.random(64, 32, density=0.1))
    >>> layer(torch.ones(5, 32)).shape
    torch.Size([5, 64])
    """

    def __init__(self, pattern: Pattern, bias: bool = True, backend: Backend = "auto") -> None:
        super().__init__()
        check_is_pattern(pattern, hint="; write for example Pattern.from_mask(mask)")
        self.pattern = pattern.with_row_order(None)[0].prepare()
        self.backend: Backend = backend
        bound = self.pattern.row_lengths.clamp(min=1).float().rsqrt()
        weight = (2 * torch.rand(self.pattern.nnz, device=pattern.device) - 1) * bound[self.pattern.row_indices]
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter((2 * torch.rand_like(bound) - 1) * bound) if bias else None

    @classmethod
    def from_dense(
        cls, linear: nn.Linear, *, density: float | None = None, mask: Tensor | None = None, backend: Backend = "auto"
    ) -> SparseLinear:
        """Keep some weights of a dense layer: those that are not 0, as after pruning, or others.

        density: keep this share of the weights, those of the largest absolute values
        mask: keep these weights, (out_features, in_features) bool

        >>> layer = SparseLinear.from_dense(torch.nn.Linear(32, 64), density=0.1)
        >>> layer.weight.shape
        torch.Size([205])
        """
        weight = linear.weight.detach()
        if density is not None and mask is not None:
            raise ValueError("from_dense takes density or mask, got both")
        if mask is None:
            mask = weight != 0 if density is None else _largest(weight, density)
        if mask.shape != weight.shape:
            raise ValueError(f"mask should have shape {tuple(weight.shape)}, shape is {tuple(mask.shape)}")
        layer = cls(Pattern.from_mask(mask), linear.bias is not None, backend)
        with torch.no_grad():
            layer.weight.data = weight[mask].clone()
            if layer.bias is not None:
                layer.bias.data = linear.bias.detach().clone()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in_features) → (…, out_features)"""
        rows, columns = self.pattern.shape
        if x.shape[-1] != columns:
            raise ValueError(f"the input should have {columns} features, shape is {tuple(x.shape)}")
        out = spmm(self.pattern, self.weight, x.reshape(-1, columns).T, backend=self.backend).T
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], rows)

    def get_extra_state(self) -> Tensor:
        """The pattern for the state dict, (out_features + 1 + nnz,): indptr, then indices."""
        return torch.cat([self.pattern.indptr, self.pattern.indices])

    def set_extra_state(self, state: Tensor) -> None:
        """Take the pattern of a state dict. Raises ValueError for a pattern of other sizes."""
        rows, columns = self.pattern.shape
        if len(state) != rows + 1 + self.pattern.nnz:
            raise ValueError(f"a pattern of {self.pattern.nnz} entries expected, got {len(state) - rows - 1}")
        state = state.to(self.pattern.indices)
        self.pattern = Pattern(state[: rows + 1], state[rows + 1 :], columns).prepare()

    def extra_repr(self) -> str:
        rows, columns = self.pattern.shape
        return f"{columns}, {rows}, nnz={self.pattern.nnz}, bias={self.bias is not None}"


def _largest(weight: Tensor, density: float) -> Tensor:
    """A mask of the share of weights with the largest absolute values."""
    if not 0 <= density <= 1:
        raise ValueError(f"density should be from 0 to 1, got {density}")
    places = weight.abs().flatten().topk(round(density * weight.numel())).indices
    return torch.zeros_like(weight, dtype=torch.bool).flatten().index_fill(0, places, True).reshape(weight.shape)
