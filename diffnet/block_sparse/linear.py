"""A linear layer whose weights are a block-sparse matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffnet.ops import Backend, BlockPattern, Pattern, block_matmul
from diffnet.sparse.linear import PatternModule


class BlockSparseModule(PatternModule):
    """Base class of modules with a block-sparse matrix of weights and a bias for each of its rows."""

    def __init__(self, pattern: BlockPattern, bias: bool, backend: Backend) -> None:
        super().__init__()
        pattern.blocks.prepare()
        self.pattern = pattern
        self.backend: Backend = backend
        # Like `nn.Linear`: uniform within ±1/√fan-in, with the fan-in of each block row.
        fan_in = pattern.blocks.row_lengths.clamp(min=1) * pattern.block
        bound = fan_in.float().rsqrt()[pattern.blocks.row_indices]
        self.weight = nn.Parameter((2 * torch.rand(pattern.values_shape) - 1) * bound[:, None, None])
        self.bias = nn.Parameter(torch.zeros(pattern.rows)) if bias else None


class BlockSparseLinear(BlockSparseModule):
    """y = x Wᵀ + bias with weights only in some blocks of W.

    Args:
        in_features, out_features: any sizes; the block needn't divide them.
        layout: (output blocks, input blocks) bool, True where there are weights. It is not part of the state dict.
        block: edge length of a block, 16, 32, 64 or 128.
        bias: whether to add a bias.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    The parameter `weight` is (number of blocks, block, block). Raises ValueError if the layout has another shape.

    >>> layout = torch.tensor([[True, False], [True, True]])
    >>> BlockSparseLinear(32, 32, layout, block=16)(torch.ones(5, 32)).shape
    torch.Size([5, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Tensor,
        *,
        block: int = 32,
        bias: bool = True,
        backend: Backend = "auto",
    ) -> None:
        pattern = BlockPattern.from_mask(layout, block, out_features, in_features)
        if pattern.heads != 1:
            raise ValueError(f"the layout of a linear layer has 2 dimensions, got {layout.ndim}")
        super().__init__(pattern, bias, backend)

    @classmethod
    def from_dense(
        cls, linear: nn.Linear, layout: Tensor | None = None, *, block: int = 32, backend: Backend = "auto"
    ) -> BlockSparseLinear:
        """Keep the weights of a dense layer in some blocks, by default those with a weight that is not 0.

        layout: (output blocks, input blocks) bool

        >>> BlockSparseLinear.from_dense(torch.nn.Linear(64, 64)).weight.shape
        torch.Size([4, 32, 32])
        """
        weight = linear.weight.detach()
        if layout is None:
            layout = BlockPattern.covering(Pattern.from_mask(weight != 0), block).mask[0]
        layer = cls(linear.in_features, linear.out_features, layout, block=block, bias=False, backend=backend)
        layer.to(weight.device)
        layer.weight.data = layer.pattern.sample(weight[None])
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone())
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """x (…, in_features) → (…, out_features)"""
        if x.shape[-1] != self.pattern.columns:
            raise ValueError(f"the input should have {self.pattern.columns} features, shape is {tuple(x.shape)}")
        rows = x.reshape(1, -1, x.shape[-1])
        out = block_matmul(self.pattern, rows, self.weight, "dds", transpose_b=True, backend=self.backend)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], self.pattern.rows)

    def extra_repr(self) -> str:
        pattern = self.pattern
        return f"{pattern.columns}, {pattern.rows}, block={pattern.block}, blocks={pattern.blocks.nnz}"
