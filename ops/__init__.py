"""Differentiable functions on tensors; nothing here knows of meshes or modules."""

from diffnet.ops.backend import Backend
from diffnet.ops.gradient_features import (
    gradient_features,
    spectral_gradient_features,
    values_and_gradient_features,
)
from diffnet.ops.linear import linear
from diffnet.ops.ragged import row_offsets, segment_mean
from diffnet.ops.sparse import Pattern, SparseMatrix, block_diagonal, split_diagonal, spmm
from diffnet.ops.spectral import diffuse, from_spectral, to_spectral

__all__ = [
    "Backend",
    "Pattern",
    "SparseMatrix",
    "block_diagonal",
    "diffuse",
    "from_spectral",
    "gradient_features",
    "linear",
    "row_offsets",
    "segment_mean",
    "spectral_gradient_features",
    "split_diagonal",
    "spmm",
    "to_spectral",
    "values_and_gradient_features",
]
