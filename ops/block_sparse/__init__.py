"""Block-sparse matrices: patterns, products, softmax and attention."""

from diffnet.ops.block_sparse.attention import block_attention
from diffnet.ops.block_sparse.op import MatmulMode, block_matmul
from diffnet.ops.block_sparse.pattern import BLOCKS, BlockPattern
from diffnet.ops.block_sparse.softmax import block_softmax

__all__ = ["BLOCKS", "BlockPattern", "MatmulMode", "block_attention", "block_matmul", "block_softmax"]
