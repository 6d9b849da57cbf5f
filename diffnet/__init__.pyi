from . import data, geometry, ops, train, viz
from .block import DiffusionNetBlock
from .block_sparse import BlockSparseAttention, BlockSparseConv2d, BlockSparseLinear
from .checkpoints.files import CheckpointError
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
    functional_map,
    functional_map_from_points,
    geodesic_label_errors,
    gradient,
    hks,
    load_mesh,
    mesh_mean,
    normalize_positions,
    point_map,
    precompute,
    precompute_all,
    random_rotation,
    soft_functional_map,
    to_spectral,
    wks,
    zoomout,
)
from .geometry.errors import DiffnetError
from .graphed_step import GraphedStep
from .implicit_diffusion import ImplicitDiffusion
from .mesh_attention import MeshAttention
from .model import DiffusionNet
from .ops import dice_loss, focal_loss, generalized_dice_loss, label_smoothing_loss
from .sparse import SparseLinear, SparseMultiheadAttention
from .spatial_gradient_features import SpatialGradientFeatures
from .weight_average import WeightAverage

__version__: str

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv2d",
    "BlockSparseLinear",
    "CheckpointError",
    "DiffnetError",
    "DiffusionNet",
    "DiffusionNetBlock",
    "GraphedStep",
    "ImplicitDiffusion",
    "LearnedTimeDiffusion",
    "MeshAttention",
    "MeshError",
    "Operators",
    "SparseLinear",
    "SparseMultiheadAttention",
    "SpatialGradientFeatures",
    "WeightAverage",
    "boundary_vertices",
    "collate",
    "data",
    "dice_loss",
    "diffuse",
    "farthest_points",
    "focal_loss",
    "from_spectral",
    "functional_map",
    "functional_map_from_points",
    "generalized_dice_loss",
    "geodesic_label_errors",
    "geometry",
    "gradient",
    "graphed",
    "hks",
    "label_smoothing_loss",
    "load_mesh",
    "mesh_mean",
    "normalize_positions",
    "ops",
    "point_map",
    "precompute",
    "precompute_all",
    "random_rotation",
    "soft_functional_map",
    "to_spectral",
    "train",
    "viz",
    "wks",
    "zoomout",
]
