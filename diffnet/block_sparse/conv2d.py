"""A convolution whose weights are block-sparse over channels."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from diffnet.block_sparse.linear import BlockSparseModule
from diffnet.ops import Backend, BlockPattern, block_matmul

Pair = int | tuple[int, int]


class BlockSparseConv2d(BlockSparseModule):
    """`nn.Conv2d` with weights only between some blocks of input and output channels.

    The weights multiply the unfolded input, which takes kernel height × kernel width times the input's memory.

    Args:
        in_channels, out_channels: any sizes; the block needn't divide them.
        kernel_size, stride, padding, dilation: as in `nn.Conv2d`, with zero padding.
        layout: (output blocks, input blocks) bool, True where there are weights; or (kernel height, kernel width,
            output blocks, input blocks) with a layout for each place in the kernel. It is not part of the state dict.
        block: edge length of a block, 16, 32, 64 or 128.
        bias: whether to add a bias.
        backend: "torch" for plain PyTorch, "triton" for the kernels, "auto" for the kernels on a GPU.

    The parameter `weight` is (number of blocks, block, block). Raises ValueError if the layout has another shape.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        layout: Tensor,
        *,
        block: int = 32,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        bias: bool = True,
        backend: Backend = "auto",
    ) -> None:
        size = _pair(kernel_size)
        blocks = -(-out_channels // block), -(-in_channels // block)
        if layout.ndim not in (2, 4) or layout.shape[-2:] != blocks or layout.shape[:-2] not in ((), size):
            raise ValueError(
                f"the layout should have shape {blocks} or {(*size, *blocks)}, shape is {tuple(layout.shape)}"
            )
        # One matrix for all places in the kernel. The input channels of each place are padded to whole blocks.
        each = layout.expand(*size, *blocks).flatten(0, 1)
        padded = blocks[1] * block
        mask = each.transpose(0, 1).flatten(1)
        super().__init__(BlockPattern.from_mask(mask, block, out_channels, len(each) * padded), bias, backend)
        self.in_channels, self.channels_padded = in_channels, padded
        self.kernel_size, self.stride = size, _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, in_channels, height, width) → (N, out_channels, …, …), with the sizes of nn.Conv2d"""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"the input should be (N, {self.in_channels}, …, …), shape is {tuple(x.shape)}")
        geometry = zip(x.shape[2:], self.kernel_size, self.padding, self.dilation, self.stride, strict=True)
        size = [
            (n + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for n, kernel, pad, dilation, stride in geometry
        ]
        padded = F.pad(x, (0, 0, 0, 0, 0, self.channels_padded - self.in_channels))
        patches = F.unfold(padded, self.kernel_size, self.dilation, self.padding, self.stride)
        # (N, channels · places, L) → (places · channels, N · L)
        patches = patches.reshape(len(x), self.channels_padded, math.prod(self.kernel_size), patches.shape[2]).permute(
            2, 1, 0, 3
        )
        patches = patches.flatten(0, 1).flatten(1)
        out = block_matmul(self.pattern, self.weight, patches[None], "dsd", backend=self.backend)[0]
        out = out if self.bias is None else out + self.bias.to(out.dtype)[:, None]
        return out.reshape(len(out), len(x), *size).transpose(0, 1)

    def extra_repr(self) -> str:
        pattern = self.pattern
        return (
            f"{self.in_channels}, {pattern.rows}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, block={pattern.block}, blocks={pattern.blocks.nnz}"
        )


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
