"""Differentiable functions on tensors. They know nothing of meshes or modules.

The names in `__all__` are public. `Operators`, the matrices and the basis of a mesh, is in `diffnet.geometry`. The
function `gradient_features` computes what the module `SpatialGradientFeatures` learns; the argument `gradient_features`
of `DiffusionNet` decides whether the network has these modules.
"""

from diffnet.ops.block_sparse.attention import block_attention
from diffnet.ops.block_sparse.op import block_matmul
from diffnet.ops.block_sparse.pattern import BlockPattern
from diffnet.ops.block_sparse.softmax import block_softmax
from diffnet.ops.common.backend import Backend
from diffnet.ops.common.ragged import row_offsets
from diffnet.ops.cross_entropy.losses import dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss
from diffnet.ops.cross_entropy.op import cross_entropy
from diffnet.ops.diffusion_features.op import diffusion_and_gradient_features
from diffnet.ops.functional_maps.conversion import (
    functional_map_from_correspondences,
    functional_map_from_points,
    point_map,
    zoomout,
)
from diffnet.ops.functional_maps.losses import bijectivity_loss, coupling_loss, orthogonality_loss
from diffnet.ops.functional_maps.nearest import nearest_neighbors
from diffnet.ops.functional_maps.op import Regularizer, functional_map
from diffnet.ops.functional_maps.soft_map import soft_map
from diffnet.ops.gradient_features.op import gradient_features, spectral_gradient_features, values_and_gradient_features
from diffnet.ops.implicit.op import implicit_diffusion
from diffnet.ops.mlp.op import mlp
from diffnet.ops.sparse.ell import EllPattern
from diffnet.ops.sparse.hybrid import HybridPattern
from diffnet.ops.sparse.op import SparseMatrix, block_diagonal, diagonal, row_sum, sddmm, split_diagonal, spmm
from diffnet.ops.sparse.pattern import Pattern, block_diagonal_pattern, split_diagonal_pattern
from diffnet.ops.sparse.softmax import sparse_softmax
from diffnet.ops.spectral.op import diffuse, from_spectral, segment_mean, to_spectral

__all__ = [
    "Backend",
    "BlockPattern",
    "EllPattern",
    "HybridPattern",
    "Pattern",
    "Regularizer",
    "SparseMatrix",
    "bijectivity_loss",
    "block_attention",
    "block_diagonal",
    "block_diagonal_pattern",
    "block_matmul",
    "block_softmax",
    "coupling_loss",
    "cross_entropy",
    "diagonal",
    "dice_loss",
    "diffuse",
    "diffusion_and_gradient_features",
    "focal_loss",
    "from_spectral",
    "functional_map",
    "functional_map_from_correspondences",
    "functional_map_from_points",
    "generalized_dice_loss",
    "gradient_features",
    "implicit_diffusion",
    "label_smoothing_loss",
    "mlp",
    "nearest_neighbors",
    "orthogonality_loss",
    "point_map",
    "row_offsets",
    "row_sum",
    "sddmm",
    "segment_mean",
    "soft_map",
    "sparse_softmax",
    "spectral_gradient_features",
    "split_diagonal",
    "split_diagonal_pattern",
    "spmm",
    "to_spectral",
    "values_and_gradient_features",
    "zoomout",
]
