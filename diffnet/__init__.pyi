from . import data as data, geometry as geometry, ops as ops, train as train, viz as viz
from .block import DiffusionNetBlock as DiffusionNetBlock
from .block_sparse.attention import BlockSparseAttention as BlockSparseAttention
from .block_sparse.conv2d import BlockSparseConv2d as BlockSparseConv2d
from .block_sparse.linear import BlockSparseLinear as BlockSparseLinear
from .checkpoints.files import CheckpointError as CheckpointError
from .cuda_graphs import graphed as graphed
from .diffusion import LearnedTimeDiffusion as LearnedTimeDiffusion
from .geometry import (
    MeshError as MeshError,
    Operators as Operators,
    boundary_vertices as boundary_vertices,
    collate as collate,
    diffuse as diffuse,
    farthest_points as farthest_points,
    from_spectral as from_spectral,
    functional_map as functional_map,
    functional_map_from_points as functional_map_from_points,
    geodesic_label_errors as geodesic_label_errors,
    gradient as gradient,
    hks as hks,
    load_mesh as load_mesh,
    mesh_mean as mesh_mean,
    normalize_positions as normalize_positions,
    point_map as point_map,
    precompute as precompute,
    precompute_all as precompute_all,
    random_rotation as random_rotation,
    soft_functional_map as soft_functional_map,
    to_spectral as to_spectral,
    wks as wks,
    zoomout as zoomout,
)
from .geometry.errors import DiffnetError as DiffnetError
from .global_tokens import GlobalTokens as GlobalTokens
from .graphed_step import GraphedStep as GraphedStep
from .implicit_diffusion import ImplicitDiffusion as ImplicitDiffusion
from .mesh_attention import MeshAttention as MeshAttention
from .model import DiffusionNet as DiffusionNet
from .modulation import Modulation as Modulation
from .ops import (
    dice_loss as dice_loss,
    focal_loss as focal_loss,
    generalized_dice_loss as generalized_dice_loss,
    label_smoothing_loss as label_smoothing_loss,
)
from .sparse.attention import SparseMultiheadAttention as SparseMultiheadAttention
from .sparse.linear import SparseLinear as SparseLinear
from .spatial_gradient_features import SpatialGradientFeatures as SpatialGradientFeatures
from .tangent_vectors import TangentVectors as TangentVectors
from .weight_average import WeightAverage as WeightAverage

__version__: str
