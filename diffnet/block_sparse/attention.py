"""Attention between blocks of a sequence, such as patches of vertices ordered along a surface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diffnet.mesh_attention import AttentionHeads
from diffnet.ops import Backend, BlockPattern, block_attention, block_matmul, block_softmax
from diffnet.ops.common.checks import check_count


class BlockSparseAttention(AttentionHeads):
    """Multi-head attention computed only at the blocks of a layout.

    Without a bias and without dropout, scores are never stored (see `ops.block_attention`).
    `geometry.patches` orders the vertices of meshes along the surface and gives the layout.

    Source: Child et al. 2019, section 5.

    Args:
        channels: C, divided among the heads.
        heads: H.
        dropout: probability that an attention weight is dropped in training.
        length: length of the sequences, for a learned bias by relative position. None for no bias.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    Raises ValueError if the heads don't divide the channels.
    """

    def __init__(
        self, channels: int, heads: int = 4, dropout: float = 0.0, length: int | None = None, backend: Backend = "auto"
    ) -> None:
        super().__init__(channels, heads, dropout, backend)
        if length is not None:
            check_count("length", length, 1)
        self.relative_bias = None if length is None else nn.Parameter(torch.zeros(heads, 2 * length - 1))

    def forward(
        self,
        x: Tensor,
        pattern: BlockPattern,
        *,
        bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """x (…, N, C), pattern (1 or H, N, N) → (…, N, C)

        bias: floating point, added to the scores: dense (N, N) or (H or 1, N, N), or values of the pattern, see
            `ops.block_softmax`. Values of a pattern of one head are shared by all heads. For values of each head, pass
            `pattern.expand_heads(H)`. Gradients reach it.
        key_padding_mask: (…, N) bool, True at the keys that exist
        attention_mask: bool, True where row i may attend to column j: dense (N, N) or (H or 1, N, N), or values of the
            pattern

        Place i attends to the columns of row i. A place that attends to nothing gets the bias of the output layer.
        """
        length, channels = x.shape[-2:]
        if pattern.shape not in ((1, length, length), (self.heads, length, length)):
            raise ValueError(
                f"the pattern should have shape {(self.heads, length, length)} or {(1, length, length)}, "
                f"shape is {pattern.shape}"
            )
        if pattern.heads < self.heads:
            if attention_mask is not None and attention_mask.shape == pattern.values_shape:
                attention_mask = attention_mask.repeat(self.heads, 1, 1)
            if bias is not None and bias.shape[-3:] == pattern.values_shape:
                bias = torch.cat([bias] * self.heads, dim=-3)
            pattern = pattern.expand_heads(self.heads)
        width = channels // self.heads
        projected = self.query_key_value(x).unflatten(-1, (3, self.heads, width))
        query, key, value = projected.movedim(-3, 0).transpose(-2, -3)  # each (…, H, N, C/H)
        masks = {"key_padding_mask": key_padding_mask, "attention_mask": attention_mask}
        extras: dict[str, Any] = {"bias": bias, "backend": self.backend, **masks}
        if self.relative_bias is None and not (self.training and self.dropout.p > 0):
            mixed = block_attention(pattern, query, key, value, **extras)
        else:
            scores = block_matmul(pattern, query, key, "sdd", transpose_b=True, backend=self.backend)
            extras |= {"scale": width**-0.5, "relative_bias": self.relative_bias}
            weights = block_softmax(pattern, scores, **extras)
            mixed = block_matmul(pattern, self.dropout(weights), value, "dsd", backend=self.backend)
        return self.out(mixed.transpose(-2, -3).flatten(-2))
