"""Attention over neighborhoods on a surface."""

from __future__ import annotations

from torch import Tensor, nn

from diffnet.arguments import as_weights
from diffnet.ops import Backend, Pattern, sddmm, sparse_softmax, spmm
from diffnet.ops.common.checks import check_count, check_dropout, check_tensor
from diffnet.ops.sparse.pattern import check_is_pattern, check_square


class AttentionHeads(nn.Module):
    """Base class of multi-head attention: the layers before and after it, of C channels divided among H heads."""

    def __init__(self, channels: int, heads: int = 4, dropout: float = 0.0, backend: Backend = "auto") -> None:
        super().__init__()
        check_count("channels", channels, 1)
        check_count("heads", heads, 1)
        check_dropout(dropout)
        if channels % heads != 0:
            raise ValueError(f"heads should divide the {channels} channels, got {heads}")
        self.channels = channels
        self.heads = heads
        self.backend: Backend = backend
        self.query_key_value = nn.Linear(channels, 3 * channels)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(channels, channels)


class MeshAttention(AttentionHeads):
    """Multi-head attention of each vertex to the vertices in its row of a sparse pattern.

    Scores, softmax and sums are computed only at the entries of the pattern, for all heads at once.

    Source: Vaswani et al. 2017, section 3.2.

    Args:
        channels: C, divided among the heads.
        heads: H.
        dropout: probability that an attention weight is dropped in training.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    Raises ValueError if the heads don't divide the channels.
    """

    def forward(self, x: Tensor, pattern: Pattern, *, bias: Tensor | None = None) -> Tensor:
        """x (V, C), pattern (V, V) → (V, C)

        bias: (nnz,) for all heads or (H, nnz), added to the scores at the entries of the pattern, such as a function of
            the distance along the surface. Gradients reach it. See `ops.sparse_softmax`.

        Vertex i attends to the columns of row i. A vertex with an empty row gets the bias of the output layer.
        """
        check_is_pattern(pattern, hint="; write for example operators.gradient.pattern")
        check_tensor("x", x, ("V", self.channels), pattern.device)
        check_square("the pattern", pattern, x.shape[0], x.device)
        width = x.shape[-1] // self.heads
        # These are strided views (H, V, C/H). The products read them without a copy.
        x = as_weights(x, self.query_key_value)
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, width)).permute(1, 2, 0, 3)
        scores = sddmm(pattern, query, key, backend=self.backend)
        weights = sparse_softmax(pattern, scores, scale=width**-0.5, bias=bias, backend=self.backend)
        mixed = spmm(pattern, self.dropout(weights), value, backend=self.backend)
        return self.out(mixed.transpose(0, 1).flatten(1))
