"""`BlockPattern`: the positions of the blocks of a block-sparse matrix, or of one such matrix per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffnet.ops.common.checks import check_is_tensor, check_operand
from diffnet.ops.common.precision import scipy_array
from diffnet.ops.sparse.pattern import Pattern, block_diagonal_pattern, check_is_pattern

BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class BlockPattern:
    """The structure of H matrices (rows, columns) made of square blocks. It holds no values.

    Values have shape (…, number of blocks, block, block). They are ordered by head, block row and block column.

    Args:
        blocks: a Pattern (H · block rows, H · block columns) of whole blocks, with the heads along its diagonal
        block: the edge length of a block, 16, 32, 64 or 128
        rows, columns: the size of each head's matrix. If it is no multiple of the block, the last blocks extend beyond
            the matrix. Products ignore the values there, which must be finite, and results have 0 there.
        heads: H

    Raises:
        ValueError: for another block, a negative size, or a pattern of another shape.

    >>> import torch
    >>> pattern = BlockPattern.from_mask(torch.tensor([[True, False], [True, True]]), 16)
    >>> pattern.shape, pattern.values_shape
    ((1, 32, 32), (3, 16, 16))
    """

    blocks: Pattern
    block: int
    rows: int
    columns: int
    heads: int = 1

    def __post_init__(self) -> None:
        _check_block(self.block)
        check_is_pattern(self.blocks, "blocks")
        if self.heads < 1 or self.rows < 0 or self.columns < 0:
            raise ValueError(f"heads should be at least 1 and sizes at least 0, got {self.shape}")
        if not isinstance(self.blocks.indices, Tensor):  # a stand-in of torch.compile, see `Pattern`
            return
        expected = (self.heads * self.block_rows, self.heads * self.block_columns)
        if self.blocks.shape != expected:
            raise ValueError(f"blocks should be a pattern of shape {expected}, shape is {self.blocks.shape}")

    @classmethod
    def from_mask(cls, mask: Tensor, block: int, rows: int | None = None, columns: int | None = None) -> BlockPattern:
        """Make a pattern from the layout of its blocks.

        Args:
            mask: (block rows, block columns) or (H, block rows, block columns) bool, True where there is a block
            block: the edge length of a block
            rows, columns: the size of each head's matrix, by default that of whole blocks
        """
        check_is_tensor("mask", mask)
        if mask.dtype != torch.bool or mask.ndim not in (2, 3):
            raise ValueError(f"the mask should be bool with 2 or 3 dimensions, got {mask.dtype} with {mask.ndim}")
        layout = mask if mask.ndim == 3 else mask[None]
        heads, block_rows, block_columns = layout.shape
        head, _, column = layout.nonzero().unbind(1)
        lengths = layout.sum(-1).reshape(-1)
        pattern = Pattern.from_row_lengths(lengths, column + head * block_columns, heads * block_columns, check=False)
        rows = block_rows * block if rows is None else rows
        columns = block_columns * block if columns is None else columns
        return cls(pattern, block, rows, columns, heads)

    @classmethod
    def covering(cls, pattern: Pattern, block: int) -> BlockPattern:
        """Make the pattern with the fewest blocks that cover all entries of a pattern, for one head."""
        check_is_pattern(pattern)
        _check_block(block)
        rows, columns = pattern.shape
        mask = torch.zeros(-(-rows // block), -(-columns // block), dtype=torch.bool, device=pattern.device)
        mask[pattern.row_indices.long() // block, pattern.column_indices.long() // block] = True
        return cls.from_mask(mask, block, rows, columns)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.rows, self.columns

    @property
    def nnz(self) -> int:
        """The number of values, those beyond the edge included."""
        return self.blocks.nnz * self.block**2

    @property
    def block_rows(self) -> int:
        """The number of block rows of one head."""
        return -(-self.rows // self.block)

    @property
    def block_columns(self) -> int:
        """The number of block columns of one head."""
        return -(-self.columns // self.block)

    @property
    def values_shape(self) -> tuple[int, int, int]:
        """The shape of one set of values."""
        return self.blocks.nnz, self.block, self.block

    @property
    def mask(self) -> Tensor:
        """The layout, (H, block rows, block columns) bool."""
        mask = torch.zeros(self.heads, self.block_rows, self.block_columns, dtype=torch.bool, device=self.device)
        mask[self.head_indices, self.row_indices, self.column_indices] = True
        return mask

    @property
    def device(self) -> torch.device:
        return self.blocks.indices.device

    @property
    def head_indices(self) -> Tensor:
        """The head of each block, (number of blocks,)."""
        return self.blocks.row_indices // max(self.block_rows, 1)

    @property
    def row_indices(self) -> Tensor:
        """The block row of each block within its head, (number of blocks,)."""
        return self.blocks.row_indices % max(self.block_rows, 1)

    @property
    def column_indices(self) -> Tensor:
        """The block column of each block within its head, (number of blocks,)."""
        return self.blocks.indices % max(self.block_columns, 1)

    def expand_heads(self, heads: int) -> BlockPattern:
        """Repeat the pattern of one head for several. Keep the result if it is used again."""
        if self.heads != 1 or heads < 1:
            raise ValueError(f"only a pattern of 1 head can be expanded, to at least 1; got {self.heads} and {heads}")
        blocks = block_diagonal_pattern([self.blocks] * heads)
        return BlockPattern(blocks, self.block, self.rows, self.columns, heads)

    def to(self, device: torch.device | str | None) -> BlockPattern:
        """Move the pattern to a device."""
        blocks = self.blocks.to(device)
        if blocks is self.blocks:
            return self
        return BlockPattern(blocks, self.block, self.rows, self.columns, self.heads)

    def sample(self, dense: Tensor) -> Tensor:
        """Take the blocks from a dense tensor (…, H or 1, rows, columns) → (…, number of blocks, block, block).

        Values beyond the edge are 0. Differentiable.
        """
        check_is_tensor("dense", dense)
        if dense.ndim < 3 or dense.shape[-3] not in (1, self.heads) or dense.shape[-2:] != (self.rows, self.columns):
            sizes = ", ".join(map(str, self.shape))
            raise ValueError(f"a dense tensor (…, {sizes}) expected, shape is {tuple(dense.shape)}")
        whole = dense.expand(*dense.shape[:-3], *self.shape)
        pad = (0, self.block_columns * self.block - self.columns, 0, self.block_rows * self.block - self.rows)
        whole = torch.nn.functional.pad(whole, pad)
        grid = (self.heads, self.block_rows, self.block, self.block_columns, self.block)
        tiles = whole.reshape(*dense.shape[:-3], *grid).transpose(-2, -3)  # (…, H, block rows, block columns, ·, ·)
        return tiles[..., self.head_indices, self.row_indices, self.column_indices, :, :]

    def to_dense(self, values: Tensor) -> Tensor:
        """Convert values (…, number of blocks, block, block) → (…, H, rows, columns), 0 where there is no block.

        Differentiable.
        """
        self.expect_values(values)
        batch = values.shape[:-3]
        grid = (self.heads, self.block_rows, self.block_columns)
        place = (self.head_indices * grid[1] + self.row_indices) * grid[2] + self.column_indices
        tiles = values.new_zeros(*batch, grid[0] * grid[1] * grid[2], self.block, self.block)
        tiles = tiles.index_copy(-3, place, values).reshape(*batch, *grid, self.block, self.block)
        whole = tiles.transpose(-2, -3).flatten(-2).flatten(-3, -2)
        return whole[..., : self.rows, : self.columns]

    @classmethod
    def from_torch(cls, matrix: Tensor) -> tuple[BlockPattern, Tensor]:
        """Convert a torch.sparse_bsr tensor (rows, columns) of square blocks to the pattern and its values."""
        if not isinstance(matrix, Tensor):
            raise TypeError(f"a torch.sparse_bsr tensor expected, got {type(matrix).__name__}")
        if matrix.layout != torch.sparse_bsr or matrix.ndim != 2:
            raise ValueError(f"a 2-D torch.sparse_bsr tensor expected, got {matrix.ndim}-D of {matrix.layout}")
        return cls._from_bsr(matrix.crow_indices(), matrix.col_indices(), matrix.values(), tuple(matrix.shape))

    def to_torch(self, values: Tensor) -> Tensor:
        """Convert one head with one set of values to a torch.sparse_bsr tensor. Sizes are multiples of the block."""
        self._expect_bsr(values)
        pattern = self.blocks
        return torch.sparse_bsr_tensor(
            pattern.indptr, pattern.indices, values.contiguous(), (self.rows, self.columns), check_invariants=False
        )

    @classmethod
    def from_scipy(cls, matrix: Any) -> tuple[BlockPattern, Tensor]:
        """Convert a scipy.sparse BSR matrix or array of square blocks to the pattern and its values."""
        if not hasattr(matrix, "tobsr"):
            raise TypeError(f"a BSR matrix of SciPy expected, got {type(matrix).__name__}")
        if matrix.format != "bsr":
            raise ValueError(f"a BSR matrix expected, got {matrix.format}")
        indptr, indices, values = (torch.from_numpy(a) for a in (matrix.indptr, matrix.indices, matrix.data))
        return cls._from_bsr(indptr, indices, values, matrix.shape)

    def to_scipy(self, values: Tensor) -> Any:
        """Convert one head with one set of values to a scipy.sparse.bsr_array. Sizes are multiples of the block.

        float16 and bfloat16 become float32, because SciPy has neither.
        """
        from scipy.sparse import bsr_array

        self._expect_bsr(values)
        arrays = (values, self.blocks.indices, self.blocks.indptr)
        return bsr_array(tuple(scipy_array(a) for a in arrays), shape=(self.rows, self.columns))

    @classmethod
    def _from_bsr(
        cls, indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...]
    ) -> tuple[BlockPattern, Tensor]:
        _, block, across = values.shape
        if block != across:
            raise ValueError(f"blocks should be square, got {block} × {across}")
        rows, columns = shape
        return cls(Pattern(indptr, indices, columns // block), block, rows, columns), values

    def expect_values(self, values: Tensor, name: str = "values", *, floating: bool = False) -> None:
        """Check the shape, dtype and device of values, see `check_operand`. Raises TypeError or ValueError."""
        check_operand(name, values, self.values_shape, self.device, floating=floating)

    def _expect_bsr(self, values: Tensor) -> None:
        self.expect_values(values)
        if values.ndim != 3 or self.heads != 1 or self.rows % self.block or self.columns % self.block:
            raise ValueError(
                "a BSR matrix has one head, one set of values and sizes that are multiples of the block, "
                f"got {self.shape} with blocks of {self.block} and values {tuple(values.shape)}"
            )


def _check_block(block: Any) -> None:
    if block not in BLOCKS:
        raise ValueError(f"block should be one of {', '.join(map(str, BLOCKS))}, got {block}")


class BlockArrays(NamedTuple):
    """The arrays of a pattern that operators take.

    indptr, indices: of `BlockPattern.blocks`
    t_indptr, t_indices: of the transposed pattern
    order: the position in the pattern of each block of the transposed pattern
    """

    indptr: Tensor
    indices: Tensor
    t_indptr: Tensor
    t_indices: Tensor
    order: Tensor


def block_arrays(pattern: BlockPattern) -> list[Tensor]:
    """Return the fields of `BlockArrays` for a pattern, as a list, which operators of torch.library take."""
    blocks, (transposed, order) = pattern.blocks, pattern.blocks.transpose
    return list(BlockArrays(blocks.indptr, blocks.indices, transposed.indptr, transposed.indices, order))
