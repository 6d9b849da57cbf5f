"""Multi-head attention over a sparse pattern, with the weights and masks of `nn.MultiheadAttention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffnet.ops import Backend, BlockPattern, Pattern, block_matmul, block_softmax, sddmm, sparse_softmax, spmm
from diffnet.ops.block_sparse.attention import block_attention
from diffnet.ops.common.checks import check_count, check_dropout


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
    ) -> Tensor:
        """query (B, L, E), key and value (B, S, E), pattern (L, S) → (B, L, E)

        The masks are those of `nn.MultiheadAttention`, in which True leaves out:

        key_padding_mask: (B, S) bool, True at keys to ignore
        attn_mask: bool, True where row i may not attend to column j, or floating point, added to the scores: (L, S),
            (B · H, L, S), or values at the entries of a `Pattern`, (nnz,), (H, nnz) or (B, H, nnz). Gradients reach it.

        A place that attends to nothing gets the bias of the output layer, and no NaN. Attention weights are not
        returned. Raises TypeError for another pattern, ValueError for shapes that don't fit.
        """
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
        heads, width = self.num_heads, self.embed_dim // self.num_heads
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        q, k, v = (x.reshape(*x.shape[:2], heads, width).transpose(1, 2) for x in projected)  # (B, H, …, E/H)
        if attn_mask is not None and attn_mask.shape == (batch * heads, length, keys):
            attn_mask = attn_mask.reshape(batch, heads, length, keys)
        if isinstance(pattern, BlockPattern):
            mixed = self._at_blocks(pattern, q, k, v, key_padding_mask, attn_mask)
        else:
            mixed = self._at_entries(pattern, q, k, v, key_padding_mask, attn_mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _at_entries(
        self, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        scores = sddmm(pattern, q, k, backend=self.backend)  # (B, H, nnz)
        visible, bias = None, None
        if mask is not None:
            if mask.shape[-2:] == pattern.shape:
                mask = mask[..., pattern.row_indices, pattern.column_indices]
            if mask.dtype == torch.bool:
                visible = ~mask
            else:
                bias = mask
        if padding is not None:
            existing = ~padding[:, None, pattern.column_indices]
            visible = existing if visible is None else existing & visible
        scale = q.shape[-1] ** -0.5
        weights = sparse_softmax(pattern, scores, scale=scale, bias=bias, mask=visible, backend=self.backend)
        return spmm(pattern, F.dropout(weights, self.dropout, self.training), v, backend=self.backend)

    def _at_blocks(
        self, pattern: BlockPattern, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor:
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
        if not (self.training and self.dropout > 0):
            return block_attention(pattern, q, k, v, backend=self.backend, **extras)
        scores = block_matmul(pattern, q, k, "sdd", transpose_b=True, backend=self.backend)
        weights = block_softmax(pattern, scores, scale=q.shape[-1] ** -0.5, backend=self.backend, **extras)
        return block_matmul(pattern, F.dropout(weights, self.dropout), v, "dsd", backend=self.backend)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
