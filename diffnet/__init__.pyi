from .block import DiffusionNetBlock
from .block_sparse import BlockSparseAttention, BlockSparseConv2d, BlockSparseLinear
from .cuda_graphs import graphed
from .diffusion import LearnedTimeDiffusion
from .geometry import (
    MeshError,
    Operators,
    boundary_vertices,
    collate,
    diffuse,
    farthest_points,
    from_spectral,
    geodesic_label_errors,
    gradient,
    hks,
    load_mesh,
    mesh_mean,
    normalize_positions,
    precompute,
    precompute_all,
    random_rotation,
    to_spectral,
    wks,
)
from .geometry.errors import DiffnetError
from .gradient_features import SpatialGradientFeatures
from .implicit_diffusion import ImplicitDiffusion
from .mesh_attention import MeshAttention
from .model import DiffusionNet
from .ops import label_smoothing_loss

__version__: str

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv2d",
    "BlockSparseLinear",
    "DiffnetError",
    "DiffusionNet",
    "DiffusionNetBlock",
    "ImplicitDiffusion",
    "LearnedTimeDiffusion",
    "MeshAttention",
    "MeshError",
    "Operators",
    "SpatialGradientFeatures",
    "boundary_vertices",
    "collate",
    "diffuse",
    "farthest_points",
    "from_spectral",
    "geodesic_label_errors",
    "gradient",
    "graphed",
    "hks",
    "label_smoothing_loss",
    "load_mesh",
    "mesh_mean",
    "normalize_positions",
    "precompute",
    "precompute_all",
    "random_rotation",
    "to_spectral",
    "wks",
]
