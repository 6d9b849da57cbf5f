"""Attention over neighbourhoods on a surface."""

from __future__ import annotations

from torch import Tensor, nn

from diffnet.ops import Backend, Pattern, sddmm, sparse_softmax, spmm


class MeshAttention(nn.Module):
    """Multi-head attention of each vertex to those that a pattern joins it with (Vaswani et al. 2017, section 3.2).

    Scores, softmax and sums are computed at the entries of the pattern only, for all heads at once.

    channels: C, divided among the heads
    heads: H
    dropout: probability that an attention weight is left out in training
    backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for kernels on a GPU (see `ops.backend`)
    """

    def __init__(self, channels: int, heads: int = 4, dropout: float = 0.0, backend: Backend = "auto") -> None:
        super().__init__()
        if heads < 1 or channels % heads != 0:
            raise ValueError(f"heads should divide the {channels} channels, got {heads}")
        self.heads = heads
        self.backend: Backend = backend
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, pattern: Pattern) -> Tensor:
        """x (V, C), pattern (V, V): row i holds whom vertex i attends to → (V, C)

        A vertex that attends to none gets the bias of the output alone.
        """
        if pattern.shape != (len(x), len(x)):
            raise ValueError(f"the pattern should have shape {(len(x), len(x))}, shape is {pattern.shape}")
        width = x.shape[-1] // self.heads
        # Views (H, V, C/H), which the products read as they lie.
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, width)).permute(1, 2, 0, 3)
        scores = sddmm(pattern, query, key, backend=self.backend)
        weights = sparse_softmax(pattern, scores, scale=width**-0.5, backend=self.backend)
        mixed = spmm(pattern, self.dropout(weights), value, backend=self.backend)
        out: Tensor = self.out(mixed.transpose(0, 1).flatten(1))
        return out
