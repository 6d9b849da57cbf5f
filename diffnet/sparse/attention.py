"""Multi-head attention over a sparse pattern, with the weights and masks of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.ops import (
    Backend,
    BlockPattern,
    Pattern,
    SparseMatrix,
    block_matmul,
    block_softmax,
    sddmm,
    sparse_softmax,
    spmm,
)
from diffnet.ops.block_sparse.attention import block_attention
from diffnet.ops.common.checks import check_count, check_dropout


class _Inputs(NamedTuple):
    """The arguments of `SparseMultiheadAttention.forward`. With heads, q is (B, H, L, E/H), k and v (B, H, S, E/H)."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    need_weights: bool


class SparseMultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` with `batch_first=True`, computed only at the entries or blocks of a pattern.

    It has the same parameters, so `load_state_dict(attention.state_dict())` takes the weights of the dense module. With
    a pattern of all entries, the outputs are equal.

    Args:
        embed_dim: E, the channels, divided among the heads.
        num_heads: H.
        dropout: probability that an attention weight is dropped in training.
        bias: whether the projections have biases.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    Raises ValueError if the heads don't divide the channels.

    >>> attention = SparseMultiheadAttention(16, 4)
    >>> x = torch.randn(2, 100, 16)
    >>> attention(x, x, x, Pattern.window(100, before=8)).shape
    torch.Size([2, 100, 16])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, backend: Backend = "auto"
    ) -> None:
        super().__init__()
        check_count("embed_dim", embed_dim, 1)
        check_count("num_heads", num_heads, 1)
        check_dropout(dropout)
        if embed_dim % num_heads != 0:
            raise ValueError(f"num_heads should divide embed_dim, {embed_dim}, got {num_heads}")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.backend: Backend = backend
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        nn.init.xavier_uniform_(self.in_proj_weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | BlockPattern,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """query (B, L, E), key and value (B, S, E), pattern (L, S) → (B, L, E); or without B, and without it in masks

        The masks are those of `nn.MultiheadAttention`, in which True leaves out and numbers are added to the scores:

        key_padding_mask: (B, S) bool, True at keys to ignore, or floating point
        attn_mask: bool, True where row i may not attend to column j, or floating point: (L, S), (B · H, L, S), or
            values at the entries of a `Pattern`, (nnz,), (H, nnz) or (B, H, nnz). Gradients reach it. A mask of two
            dimensions that fits both (L, S) and (H, nnz) is refused.
        need_weights: return the output and the dense attention weights, (B, L, S), the mean over the heads, or
            (B, H, L, S) with `average_attn_weights=False`
        is_causal: leave out the columns j > i, too

        A place that attends to nothing gets the bias of the output layer, and no NaN. Raises TypeError for another
        pattern, ValueError for shapes that don't fit.
        """
        if query.ndim == 2:
            padding = None if key_padding_mask is None else key_padding_mask[None]
            more: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
            batch = query[None], key[None], value[None], pattern
            result = self.forward(*batch, key_padding_mask=padding, attn_mask=attn_mask, is_causal=is_causal, **more)
            return tuple(x[0] for x in result) if need_weights else result[0]
        inputs = _Inputs(query, key, value, key_padding_mask, attn_mask, is_causal, need_weights)
        self._check(pattern, inputs)
        inputs = self._of_heads(inputs)
        at = (
            self._at_blocks(pattern, inputs) if isinstance(pattern, BlockPattern) else self._at_entries(pattern, inputs)
        )
        mixed, weights = at
        out = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is None:
            return out
        return out, weights.mean(-3) if average_attn_weights else weights

    def _check(self, pattern: Pattern | BlockPattern, inputs: _Inputs) -> None:
        """Raise what `forward` says for another pattern and for shapes that don't fit."""
        query, key, value, key_padding_mask, attn_mask, *_ = inputs
        if not isinstance(pattern, (Pattern, BlockPattern)):
            kind = type(pattern).__name__
            raise TypeError(f"pattern should be a Pattern or a BlockPattern, got {kind}; Pattern.from_mask converts")
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim != 3 or x.shape[-1] != self.embed_dim:
                shape = tuple(x.shape)
                raise ValueError(f"{name} should have shape (batch, length, {self.embed_dim}), shape is {shape}")
        batch, (length, keys) = query.shape[0], (query.shape[1], key.shape[1])
        if pattern.shape[-2:] != (length, keys):
            raise ValueError(f"the pattern should have shape {(length, keys)}, shape is {pattern.shape[-2:]}")
        if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
            shape = tuple(key_padding_mask.shape)
            raise ValueError(f"key_padding_mask should have shape {(batch, keys)}, shape is {shape}")
        nnz = pattern.nnz if isinstance(pattern, Pattern) else None
        if attn_mask is not None and attn_mask.shape[-2:] != (length, keys) and attn_mask.shape[-1:] != (nnz,):
            entries = "" if nnz is None else f" or (…, {nnz})"
            shape = tuple(attn_mask.shape)
            raise ValueError(f"attn_mask should have shape (…, {length}, {keys}){entries}, shape is {shape}")

    def _of_heads(self, inputs: _Inputs) -> _Inputs:
        """The projected inputs of all heads."""
        query, key, value, padding, mask, *more = inputs
        batch, heads, width = len(query), self.num_heads, self.embed_dim // self.num_heads
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (x.reshape(*x.shape[:2], heads, width).transpose(1, 2) for x in projected)
        if mask is not None and mask.shape == (batch * heads, query.shape[1], key.shape[1]):
            mask = mask.reshape(batch, heads, *mask.shape[1:])
        return _Inputs(q, k, v, padding, mask, *more)

    def _at_entries(self, pattern: Pattern, inputs: _Inputs) -> tuple[Tensor, Tensor | None]:
        """The values of all heads, (B, H, L, E/H), and the dense weights (B, H, L, S) if they are needed."""
        q, k, v, padding, mask, is_causal, need_weights = inputs
        is_dense = mask is not None and _is_dense(mask, pattern, q.shape[:2])
        scores = sddmm(pattern, q, k, backend=self.backend)  # (B, H, nnz)
        rows, columns = pattern.row_indices, pattern.column_indices
        if mask is not None and is_dense:
            mask = mask[..., rows, columns]
        padding = None if padding is None else padding[:, None, columns]
        visible: Tensor | None = None
        bias: Tensor | None = None
        for part in (mask, padding, columns > rows if is_causal else None):
            if part is not None and part.dtype == torch.bool:
                visible = ~part if visible is None else visible & ~part
            elif part is not None:
                bias = part if bias is None else bias + part
        scale = q.shape[-1] ** -0.5
        weights = sparse_softmax(pattern, scores, scale=scale, bias=bias, mask=visible, backend=self.backend)
        weights = F.dropout(weights, self.dropout, self.training)
        mixed = spmm(pattern, weights, v, backend=self.backend)
        return mixed, SparseMatrix(pattern, weights).to_dense() if need_weights else None

    def _at_blocks(self, pattern: BlockPattern, inputs: _Inputs) -> tuple[Tensor, Tensor | None]:
        """The same at the blocks of a pattern."""
        q, k, v, padding, mask, is_causal, need_weights = inputs
        if is_causal:
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            mask = _joined(mask, later)
        if padding is not None and padding.dtype != torch.bool:
            mask, padding = _joined(padding[:, None, None, :].expand(-1, 1, q.shape[2], -1), mask), None
        if mask is not None and mask.ndim == 4 and mask.dtype == torch.bool:  # masks of each sample are biases
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf)
        if pattern.heads < self.num_heads:
            pattern = pattern.expand_heads(self.num_heads)
        is_bool = mask is not None and mask.dtype == torch.bool
        extras = {
            "key_padding_mask": None if padding is None else ~padding,
            "attention_mask": ~mask if mask is not None and is_bool else None,
            "bias": None if is_bool else mask,
        }
        if not (need_weights or (self.training and self.dropout > 0)):
            return block_attention(pattern, q, k, v, backend=self.backend, **extras), None
        scores = block_matmul(pattern, q, k, "sdd", transpose_b=True, backend=self.backend)
        weights = block_softmax(pattern, scores, scale=q.shape[-1] ** -0.5, backend=self.backend, **extras)
        weights = F.dropout(weights, self.dropout, self.training)
        mixed = block_matmul(pattern, weights, v, "dsd", backend=self.backend)
        return mixed, pattern.to_dense(weights) if need_weights else None

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"


def _is_dense(mask: Tensor, pattern: Pattern, sets: Sequence[int]) -> bool:
    """Whether a mask holds values at all places (L, S) of a pattern, not only at its entries, (…, nnz).

    sets: the batch B and the heads H

    Raises ValueError if it may hold either.
    """
    (batch, heads), nnz = sets, pattern.nnz
    fits_places = mask.shape[-2:] == pattern.shape
    fits_entries = mask.shape in ((nnz,), (heads, nnz), (batch, heads, nnz))
    if fits_places and fits_entries and mask.ndim == 2 and heads > 1:  # of one row, both are the same
        raise ValueError(
            f"attn_mask of shape {tuple(mask.shape)} fits both (L, S) and (H, nnz); expand it to (B · H, L, S), "
            f"{(batch * heads, *pattern.shape)}, or to (B, H, nnz), {(batch, heads, nnz)}"
        )
    return fits_places and not fits_entries


def _joined(mask: Tensor | None, other: Tensor | None) -> Tensor:
    """Both masks in one. Of two bool ones it is bool. Numbers are added, and where a bool one is True, it is −∞."""
    if mask is None or other is None:
        return mask if other is None else other  # type: ignore[return-value]
    if mask.dtype == other.dtype == torch.bool:
        return mask | other
    if mask.dtype == torch.bool:
        mask, other = other, mask
    return torch.where(other, -torch.inf, mask) if other.dtype == torch.bool else mask + other
