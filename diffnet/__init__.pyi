from . import benchmarks, data, geometry, ops, train
from .block import DiffusionNetBlock
from .block_sparse import BlockSparseAttention, BlockSparseConv2d, BlockSparseLinear
from .checkpoints.files import CheckpointError
from .cuda_graphs import graphed
from .diffusion import LearnedTimeDiffusion
from .geometry import (
    MeshError,
    Operators,
    collate,
    hks,
    load_mesh,
    normalize_positions,
    precompute,
    precompute_all,
    wks,
)
from .geometry.errors import DiffnetError
from .implicit_diffusion import ImplicitDiffusion
from .mesh_attention import MeshAttention
from .model import DiffusionNet
from .spatial_gradient_features import SpatialGradientFeatures

__version__: str

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConv2d",
    "BlockSparseLinear",
    "CheckpointError",
    "DiffnetError",
    "DiffusionNet",
    "DiffusionNetBlock",
    "ImplicitDiffusion",
    "LearnedTimeDiffusion",
    "MeshAttention",
    "MeshError",
    "Operators",
    "SpatialGradientFeatures",
    "benchmarks",
    "collate",
    "data",
    "geometry",
    "graphed",
    "hks",
    "load_mesh",
    "normalize_positions",
    "ops",
    "precompute",
    "precompute_all",
    "train",
    "wks",
]
